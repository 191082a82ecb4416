import dataclasses

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM

from runtime.config import parse_config
from runtime.data.dataset import Dataset
from runtime.dflash.settings import DFlashConfig
from runtime.dflash.start.initialise import (
    RANDOM_STD,
    calibration_tokens,
    drafter_config,
    from_target,
    head_rms,
    initial_drafter,
    random_start,
)
from runtime.errors import ConfigError
from runtime.target.model import Target
from tests.runtime.tiny_llama import HIDDEN, LAYERS, save_dataset, tiny_target, tiny_tokenizer

LAYER_IDS = (1, 2, 3)


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def network(target, **changes):
    settings = {"num_layers": 2, "draft_block_size": 4, "target_layer_ids": LAYER_IDS}
    return drafter_config(target, **{**settings, **changes})


def tokens(n=3, length=20):
    return torch.randint(3, 20, (n, length), generator=generator(7))


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_config_follows_the_target(target):
    config = network(target)
    assert (config.hidden_size, config.intermediate_size) == (HIDDEN, 48)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert (config.vocab_size, config.num_target_layers) == (24, LAYERS)
    assert config.mask_token_id == target.mask_token_id == 23
    assert config.rope_theta == 10000.0
    assert config.rope_scaling is None


@pytest.mark.parametrize(("groups", "found"), [(None, 4), (1, 1), (2, 2), (3, 4), (4, 4), (8, 4)])
def test_key_heads_that_do_not_divide_the_heads_are_not_taken(groups, found):
    """As of models whose keys are shared in another way."""
    target = tiny_target()
    target.config.num_key_value_heads = groups
    config = network(target)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, found)


def test_config_takes_the_targets_rope_scaling():
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    target = tiny_target(rope_parameters={**scaling, "rope_theta": 5e5})
    config = network(target)
    assert config.rope_theta == 5e5
    assert config.rope_scaling == scaling


def test_from_target_copies_the_last_layers(target):
    drafter = from_target(target, network(target), generator(), input_ids=tokens())
    model = target.model.model
    for draft, source in zip(drafter.layers, model.layers[4:], strict=True):
        copied, held = draft.state_dict(), source.state_dict()
        assert len(held) == 9
        # A Llama has no norm of queries and keys; those are measured.
        assert copied.keys() - held.keys() == {f"self_attn.{x}_norm.weight" for x in "qk"}
        for name, weight in held.items():
            assert torch.equal(copied[name], weight), name
    assert torch.equal(drafter.norm.weight, model.norm.weight)
    assert torch.equal(drafter.hidden_norm.weight, model.layers[4].input_layernorm.weight)
    assert all(parameter.requires_grad for parameter in drafter.parameters())


def test_fusion_passes_the_last_feature(target):
    drafter = from_target(target, network(target), generator(), input_ids=tokens())
    features = torch.randn(2, 9, 3 * HIDDEN, generator=generator(3))
    norm = target.layers[4].input_layernorm
    found = drafter.fuse(features, torch.tensor([1.0, 1.0, 1.0]))
    torch.testing.assert_close(found, norm(features[..., -HIDDEN:]), rtol=0.01, atol=0.015)
    assert not torch.equal(found, norm(features[..., -HIDDEN:]))


def test_last_layer_is_read_through_the_final_norm(target):
    config = network(target, target_layer_ids=(1, LAYERS - 1))
    drafter = from_target(target, config, generator(), input_ids=tokens())
    assert torch.equal(drafter.hidden_norm.weight, target.final_norm.weight)


def test_head_norms_take_the_measured_rms(target):
    ids = tokens()
    drafter = from_target(target, network(target), generator(), input_ids=ids)
    hidden = target.model(ids, output_hidden_states=True).hidden_states
    for i, draft in enumerate(drafter.layers):
        source = target.layers[4 + i]
        x = source.input_layernorm(hidden[4 + i])
        for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
            rows = getattr(source.self_attn, projection)(x).reshape(-1, 16)
            expected = (rows.pow(2).sum(1) / 16).sqrt().mean()
            weight = getattr(draft.self_attn, norm).weight
            torch.testing.assert_close(weight, expected.expand(16))


def test_head_rms_leaves_no_hooks(target):
    head_rms(target, [target.layers[0]], tokens())
    assert not target.layers[0].self_attn.q_proj._forward_hooks


def test_a_targets_own_head_norms_are_copied():
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=24,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
    )
    for layer in model.model.layers:
        nn.init.uniform_(layer.self_attn.q_norm.weight, 0.5, 1.5)
    target = Target(model, tiny_tokenizer(), name="qwen3")
    config = network(target)
    drafter = from_target(target, config, generator(), input_ids=tokens())
    assert config.head_dim == 16
    for draft, source in zip(drafter.layers, model.model.layers[4:], strict=True):
        assert torch.equal(draft.self_attn.q_norm.weight, source.self_attn.q_norm.weight)


def test_starts_repeat_and_differ_by_seed(target):
    config = network(target)

    def fusion(seed):
        return from_target(target, config, generator(seed), input_ids=tokens()).fc.weight

    assert torch.equal(fusion(1), fusion(1))
    assert not torch.equal(fusion(1), fusion(2))


def test_random_start_has_the_stated_spread(target):
    drafter = random_start(network(target), generator())
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            assert (parameter == 1).all()
        else:
            assert parameter.std().item() == pytest.approx(RANDOM_STD, rel=0.1)


def test_initial_drafter_follows_the_run_file(target, tmp_path):
    save_dataset(tmp_path / "data", target, LAYER_IDS)
    train = Dataset.open(tmp_path / "data", "train")
    config = network(target)
    copied = initial_drafter(target, train, parse_config({}, DFlashConfig), config)
    drawn = initial_drafter(
        target, train, parse_config({"drafter": {"init": "random"}}, DFlashConfig), config
    )
    assert torch.equal(copied.norm.weight, target.final_norm.weight)
    assert (drawn.norm.weight == 1).all()
    again = initial_drafter(target, train, parse_config({}, DFlashConfig), config)
    assert torch.equal(copied.fc.weight, again.fc.weight)


@pytest.mark.parametrize("init", ["target", "random"])
def test_the_seed_of_the_run_reaches_the_first_weights(target, tmp_path, init):
    save_dataset(tmp_path / "data", target, LAYER_IDS)
    train = Dataset.open(tmp_path / "data", "train")

    def first(seed):
        config = parse_config({"run": {"seed": seed}, "drafter": {"init": init}}, DFlashConfig)
        return initial_drafter(target, train, config, network(target)).fc.weight

    assert torch.equal(first(4), first(4))
    assert not torch.equal(first(4), first(5))


def test_calibration_tokens_are_real_and_of_one_length(target, tmp_path):
    save_dataset(tmp_path / "data", target, LAYER_IDS)
    train = Dataset.open(tmp_path / "data", "train")
    found = calibration_tokens(train)
    assert found.dtype == torch.int64
    assert found.shape == (4, min(train.lengths))
    assert found[2].tolist() == train.sample(2).input_ids[: found.shape[1]].tolist()


def test_more_draft_layers_than_the_target_has(target):
    config = network(target, num_layers=7)
    with pytest.raises(ConfigError, match=r"it has only 6 layers, fewer than drafter.num_layers"):
        from_target(target, config, generator(), input_ids=tokens())


def test_other_sizes_are_refused(target):
    config = dataclasses.replace(network(target), intermediate_size=50)
    with pytest.raises(ConfigError, match=r"has shape \(48, 32\), a drafter's \(50, 32\)"):
        from_target(target, config, generator(), input_ids=tokens())


class ShiftedNorm(nn.Module):
    """Gemma's RMSNorm multiplies by 1 + weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight - 1), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def gelu(target):
    target.config.hidden_act = "gelu"


def partial_rope(target):
    target.config.rope_parameters = {**target.config.rope_parameters, "partial_rotary_factor": 0.5}


def shifted_norm(target):
    target.final_norm = ShiftedNorm(target.final_norm.weight)


def fused_queries(target):
    del target.layers[5].self_attn.q_proj
    target.layers[5].self_attn.qkv_proj = nn.Linear(HIDDEN, 64, bias=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (gelu, "its activation is gelu"),
        (partial_rope, "rotates a part of each head"),
        (shifted_norm, "final norm is no RMSNorm"),
        (fused_queries, "its layers have no self_attn.q_proj.weight"),
    ],
)
def test_unlike_targets_are_refused(change, message):
    target = tiny_target()
    config = network(target)
    change(target)
    with pytest.raises(ConfigError, match=message):
        from_target(target, config, generator(), input_ids=tokens())


def test_flat_rope_settings_are_read():
    target = tiny_target()
    target.config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=48, num_attention_heads=2, num_key_value_heads=2
    )
    target.config.rope_parameters = None
    target.config.rope_theta = 7e4
    assert network(target).rope_theta == 7e4
