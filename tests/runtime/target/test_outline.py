"""What is known of a target before its weights are read: sizes, and why it cannot be one."""

import functools

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from runtime.dflash.start.initialise import drafter_config, made_up
from runtime.dflash.start.likeness import unlike
from runtime.errors import ConfigError
from runtime.target.model import Target, outline_target
from runtime.target.outline import TargetOutline
from tests.runtime.tiny_llama import save_target, tiny_model, tiny_target
from tests.runtime.try_targets import build


def outline_of(model_type, **values):
    """A model of default sizes on the meta device."""
    config = CONFIG_MAPPING[model_type](**values)
    with torch.device("meta"):
        return TargetOutline(AutoModelForCausalLM.from_config(config), None, name=model_type)


def meta(name):
    with torch.device("meta"):
        return TargetOutline(build(name).to("meta"), None, name=name)


def test_the_outline_says_what_the_target_says(tmp_path):
    target = save_target(tmp_path)
    outline = outline_target(tmp_path)
    assert outline.embed_weight.is_meta
    for name in ("hidden_size", "num_layers", "vocab_size", "max_positions", "mask_token_id"):
        assert getattr(outline, name) == getattr(target, name)
    assert outline.eos_token_ids == target.eos_token_ids
    shape = {"num_layers": 2, "draft_block_size": 4, "target_layer_ids": (1, 2)}
    assert drafter_config(outline, **shape, embedding="rows") == drafter_config(target, **shape)


def test_no_weights_are_read_for_a_model_that_cannot_be_a_target(tmp_path, monkeypatch):
    build("Mamba").save_pretrained(tmp_path)
    save_target(tmp_path / "other")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "other" / name).rename(tmp_path / name)

    def never(*args, **options):
        raise AssertionError("weights were read")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", never)
    with pytest.raises(ConfigError, match=r"target\.model = .*MambaForCausalLM has layers"):
        Target.load(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "values", "reason"),
    [
        ("rwkv", {"num_hidden_layers": 2}, "whose state cannot be rewound"),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "(conv)"),
        ("minimax", {"num_hidden_layers": 2}, "(linear_attention)"),
        ("recurrent_gemma", {"num_hidden_layers": 3}, "cannot be rewound"),
        ("bert", {"is_decoder": True, "num_hidden_layers": 2}, "under none of layers, h, blocks"),
        ("opt", {"word_embed_proj_dim": 16, "num_hidden_layers": 2}, "hidden size 768"),
        ("moshi", {"num_hidden_layers": 2}, "an embedding of shape"),
    ],
)
def test_models_that_cannot_be_targets(model_type, values, reason):
    assert reason in str(outline_of(model_type, **values).unusable)


def test_layers_whose_output_is_not_one_row_for_a_token():
    odd = outline_of("gemma3n_text").unusable
    assert "has layers that return (4, 1, 4, 2048), not [B, S, hidden size]" in str(odd)


def test_layers_that_run_more_than_once():
    model = tiny_model().to("meta")
    once = model.model.forward

    @functools.wraps(once)
    def twice(*args, **options):
        once(*args, **options)
        return once(*args, **options)

    assert TargetOutline(model, None, name="looped").unusable is None
    model.model.forward = twice
    assert "runs its layers more than once" in str(TargetOutline(model, None, name="x").unusable)


def test_every_causal_language_model_is_taken_or_refused_in_one_line():
    """With the default sizes of its config and no weights."""
    taken = 0
    for model_type in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            outline = outline_of(model_type, num_hidden_layers=2)
        except Exception:
            # Its own defaults do not make a model.
            outline = None
        if outline is None:
            continue
        reason = outline.unusable
        if reason is None:
            taken += 1
            shape = {"num_layers": 1, "draft_block_size": 4, "target_layer_ids": (0,)}
            outline.tokenizer = tiny_target().tokenizer
            try:
                network = drafter_config(outline, **shape, embedding="rows")
            except ConfigError as error:
                reason = str(error)
            else:
                reason = unlike(outline, network)
            assert all("\n" not in note for note in made_up(outline))
        assert reason is None or (len(reason) < 300 and "\n" not in reason), model_type
    assert taken > 60
