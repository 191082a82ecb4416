"""What is read of a target's config and modules, by hand: ends, mask token, refusals."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runtime.errors import ConfigError
from runtime.target.model import Target
from runtime.target.outline import TargetOutline, cache_argument
from tests.runtime.tiny_llama import HIDDEN, LAYERS, tiny_model, tiny_target, tiny_tokenizer


def outline(**config):
    """A tiny Llama on the meta device whose config says something else."""
    with torch.device("meta"):
        model = tiny_model().to("meta")
    # Around the checks of transformers: other models' configs say what a Llama's may not.
    vars(model.config).update(config)
    return TargetOutline(model, tiny_tokenizer(), name="mine")


def test_a_llama_is_usable_whether_its_weights_are_read_or_not():
    assert outline().unusable is None
    outline().check_usable()
    assert tiny_target().unusable is None


@pytest.mark.parametrize(
    "kind", ["full_attention", "sliding_attention", "chunked_attention", "attention"]
)
def test_layers_that_keep_every_token_are_taken(kind):
    assert outline(layer_types=[kind] * LAYERS).unusable is None


def test_layers_whose_state_cannot_be_rewound_are_named():
    found = outline(layer_types=["full_attention", "mamba", "conv", "mamba"])
    said = (
        "LlamaForCausalLM has layers (conv, mamba) whose state cannot be rewound, as draft and "
        "verify must"
    )
    assert found.unusable == said
    with pytest.raises(ConfigError) as caught:
        found.check_usable()
    assert str(caught.value) == f"target.model = 'mine': {said}; choose another target"
    found = outline()
    found.model._is_stateful = True
    assert found.unusable == (
        "LlamaForCausalLM has layers whose state cannot be rewound, as draft and verify must"
    )
    with pytest.raises(ConfigError, match="whose state cannot be rewound"):
        Target(found.model, tiny_tokenizer(), name="mine")


@pytest.mark.parametrize("name", ["encoder_attn", "crossattention", "cross_attn"])
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_decoder_of_a_model_with_an_encoder_is_refused(name, layer):
    found = outline()
    found.layers[layer].add_module(name, nn.Identity())
    said = "LlamaForCausalLM is the decoder of a model that has an encoder too"
    assert found.unusable == said


def test_a_hidden_size_that_the_config_does_not_say_must_be_the_embeddings():
    assert outline(hidden_size=None).unusable is None
    said = outline(hidden_size=HIDDEN + 1).unusable
    assert said == (
        "LlamaForCausalLM has an embedding of shape (24, 32), a head of (24, 32) and hidden size "
        "33, where both must be [vocabulary, hidden size]"
    )
    found = outline()
    found.model.lm_head = nn.Linear(HIDDEN, 25, device="meta")
    assert "an embedding of shape (24, 32), a head of (25, 32) and hidden" in found.unusable
    found.model.lm_head = nn.Identity()
    assert "a head of None and" in found.unusable


@pytest.mark.parametrize("last", [False, True])
def test_a_layer_whose_output_is_odd_is_told_by_its_shape(last):
    found = outline()
    odd = found.layers[-1 if last else 0]
    once = odd.forward
    odd.forward = lambda hidden, *args, **options: once(hidden, *args, **options)[..., :16]
    said = "LlamaForCausalLM has layers that return (1, 4, 16), not [B, S, hidden size]"
    assert found.unusable == said
    assert not odd._forward_hooks


def test_a_layer_that_returns_several_things_returns_its_states_first():
    found = outline()
    for layer in found.layers:
        layer.forward = lambda hidden, *args, **options: (hidden, None)
    assert found.unusable is None


def test_layers_that_run_for_half_of_the_model_only_are_left_to_the_real_thing():
    found = outline()

    def broken(*args, **options):
        raise RuntimeError("no values here")

    found.layers[3].forward = broken
    assert found.unusable is None
    assert not any(layer._forward_hooks for layer in found.layers)


def test_a_model_without_layers_is_refused_with_the_names_that_are_known():
    found = outline()
    found.layers = None
    said = "LlamaForCausalLM keeps decoder layers under none of layers, h, blocks"
    assert (found.num_layers, found.unusable) == (0, said)
    found.layers = nn.ModuleList()
    assert found.unusable == said


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (lambda x, past_key_values=None: x, "past_key_values"),
        (lambda x, cache=None: x, "cache"),
        (lambda x, past_key_values=None, cache=None: x, "cache"),
        (lambda x, **options: x, None),
    ],
)
def test_the_cache_goes_by_one_of_two_names(forward, name):
    assert cache_argument(SimpleNamespace(forward=forward)) == name
    if name is None:
        found = outline()
        found.decoder.forward = forward
        assert found.unusable == "LlamaForCausalLM takes no cache of keys and values"


@pytest.mark.parametrize(
    ("generation", "tokenizer", "ends"),
    [
        (None, None, set()),
        (0, None, {0}),
        ([5, 7], 2, {2, 5, 7}),
        ([5], 5, {5}),
        (None, 2, {2}),
        ((5,), [2, 3], {2, 3, 5}),
        (torch.tensor([4, 6]), None, {4, 6}),
    ],
)
def test_end_tokens_by_hand(generation, tokenizer, ends):
    found = outline()
    found.model.generation_config = SimpleNamespace(eos_token_id=generation)
    found.tokenizer = SimpleNamespace(eos_token_id=tokenizer)
    assert found.eos_token_ids == ends
    assert {type(end) for end in found.eos_token_ids} <= {int}
    found.model.generation_config = None
    assert found.eos_token_ids <= ends


class Words:
    """A tokenizer of so many tokens, of which some are special."""

    chat_template = "<x>{{ messages }}"
    mask_token_id = None
    bos_token_id = pad_token_id = unk_token_id = eos_token_id = None

    def __init__(self, count=24, special=(), **options):
        self.count = count
        self.added_tokens_decoder = {
            index: SimpleToken(text, is_special) for index, text, is_special in special
        }
        for name, value in options.items():
            setattr(self, name, value)

    def __len__(self):
        return self.count


class SimpleToken:
    def __init__(self, text, special):
        self.text = text
        self.special = special

    def __str__(self):
        return self.text


SPECIAL = [(3, "<a>", True), (7, "<b>", True), (9, "<x>", True), (11, "plain", False)]


@pytest.mark.parametrize(
    ("tokenizer", "token"),
    [
        (Words(mask_token_id=0), 0),
        (Words(mask_token_id=23), 23),
        (Words(mask_token_id=24, count=20), 20),
        (Words(mask_token_id=24, count=24, pad_token_id=4), 4),
        (Words(count=23), 23),
        (Words(special=SPECIAL), 7),
        (Words(special=SPECIAL, bos_token_id=7), 3),
        (Words(special=SPECIAL, pad_token_id=7, unk_token_id=3), 7),
        (Words(special=SPECIAL, pad_token_id=7), 3),
        (Words(special=SPECIAL, eos_token_id=7), 3),
        (Words(special=[(23, "<c>", True), (24, "<d>", True)]), 23),
        (Words(special=[(23, "<c>", True)], chat_template={"default": "<c>"}, pad_token_id=1), 1),
        (Words(pad_token_id=0), 0),
        (Words(pad_token_id=2, unk_token_id=5), 5),
        (Words(unk_token_id=5), 5),
    ],
)
def test_the_mask_token_by_hand(tokenizer, token):
    found = outline()
    found.tokenizer = tokenizer
    # Of the model 2 ends an answer.
    assert found.mask_token_id == token


@pytest.mark.parametrize("tokenizer", [Words(), Words(pad_token_id=2, unk_token_id=2)])
def test_a_tokenizer_without_a_row_to_spare_is_refused(tokenizer):
    found = outline()
    found.tokenizer = tokenizer
    with pytest.raises(ConfigError) as caught:
        _ = found.mask_token_id
    assert str(caught.value) == (
        "target.model = 'mine': must have an embedding row that text does not use, for the mask "
        "token"
    )


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (6, 1, (3,)),
        (6, 2, (1, 3)),
        (6, 3, (1, 2, 3)),
        (5, 2, (1, 2)),
        (7, 4, (1, 2, 3, 4)),
        (12, 3, (1, 5, 9)),
        (13, 4, (1, 4, 7, 10)),
        (1, 1, (0,)),
    ],
)
def test_feature_layers_by_hand(layers, count, ids):
    made = SimpleNamespace(num_layers=layers)
    assert TargetOutline.default_layer_ids(made, count) == ids


@pytest.mark.parametrize(
    ("layers", "count", "most"), [(6, 4, 3), (5, 3, 2), (4, 2, 1), (3, 2, 1), (2, 3, 1)]
)
def test_more_features_than_there_are_layers_for_are_refused(layers, count, most):
    with pytest.raises(ConfigError) as caught:
        TargetOutline.default_layer_ids(SimpleNamespace(num_layers=layers), count)
    assert str(caught.value) == (
        f"target.num_features = {count}: must be at most {most} for a target of {layers} layers"
    )


def test_positions_that_a_config_does_not_say():
    assert outline(max_position_embeddings=None).max_positions is None
    assert outline(max_position_embeddings=77.0).max_positions == 77


def test_wherever_features_fit_they_are_of_different_layers_in_order():
    for layers in range(1, 81):
        made = SimpleNamespace(num_layers=layers)
        for count in range(2, layers + 1):
            if count > layers - 3:
                with pytest.raises(ConfigError):
                    TargetOutline.default_layer_ids(made, count)
                continue
            ids = TargetOutline.default_layer_ids(made, count)
            assert list(ids) == sorted(set(ids))
            assert (len(ids), ids[0], ids[-1]) == (count, 1, layers - 3)
