"""What of a drafter's shape is the target's, what is made up, and which targets can be copied."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runtime.dflash.folder.embedding import PROBES, module_scale
from runtime.dflash.network.config import rope_frequencies
from runtime.dflash.start.initialise import (
    CALIBRATION_SAMPLES,
    CALIBRATION_TOKENS,
    FUSION_STD,
    RANDOM_STD,
    calibration_tokens,
    drafter_config,
    from_target,
    head_rms,
    made_up,
    random_start,
)
from runtime.dflash.start.likeness import rope_of, unlike
from runtime.errors import ConfigError
from tests.runtime.dflash.test_drafter import YARN, make_config
from tests.runtime.tiny_gemma import gemma_target
from tests.runtime.tiny_llama import HIDDEN, LAYERS, prompts, tiny_target

LAYER_IDS = (1, 2, 3)


def network(target, **changes):
    settings = {"num_layers": 2, "draft_block_size": 4, "target_layer_ids": LAYER_IDS}
    return drafter_config(target, **{**settings, **changes})


def target_of(**config):
    """A tiny target whose config says this, and of what it does not say nothing."""
    target = tiny_target()
    target.config = SimpleNamespace(**config)
    return target


def test_all_sizes_and_settings_are_the_targets():
    target = target_of(
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=77,
        head_dim=18,
        rms_norm_eps=1e-5,
        max_position_embeddings=300,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    found = network(target, num_layers=3, draft_block_size=7, target_layer_ids=[0, 5])
    assert dataclasses.asdict(found) == {
        "hidden_size": HIDDEN,
        "intermediate_size": 77,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 18,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "rope_scaling": None,
        "vocab_size": 24,
        "draft_block_size": 7,
        "mask_token_id": 23,
        "target_layer_ids": (0, 5),
        "num_target_layers": LAYERS,
        "max_position_embeddings": 300,
        "embedding_scale": 1.0,
        "layers": (),
        "sliding_window": None,
        "markov_rank": 0,
        "confidence_head": False,
        "sample_from_anchor": False,
    }
    assert made_up(target) == []


def test_what_a_target_does_not_say_is_made_up():
    found = network(target_of())
    assert found.intermediate_size == 4 * HIDDEN
    # A head for each 64 of the hidden size, and at least one.
    assert (found.num_attention_heads, found.num_key_value_heads, found.head_dim) == (1, 1, HIDDEN)
    assert (found.rms_norm_eps, found.rope_theta, found.rope_scaling) == (1e-6, 1e4, None)
    assert found.max_position_embeddings == 32768
    assert made_up(target_of()) == [
        "the target has no intermediate size; the drafter's is 4 x hidden",
        "the target has no RoPE; the drafter's is plain",
    ]


@pytest.mark.parametrize(
    ("rope", "notes"),
    [
        ({"rope_type": "default"}, []),
        ({**YARN, "rope_theta": 1e4}, []),
        ({"rope_type": "dynamic"}, ["the target has dynamic RoPE; the drafter's is plain"]),
        ({"rope_type": "default", "partial_rotary_factor": 1.0}, []),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            ["the target's RoPE rotates a part of each head; the drafter's all of it"],
        ),
    ],
)
def test_a_rope_that_a_drafter_has_not_is_noted(rope, notes):
    assert made_up(target_of(intermediate_size=8, rope_parameters=rope)) == notes


@pytest.mark.parametrize(
    ("size", "found"),
    [
        (48, 48),
        (48.0, 48),
        ([16, 32, 64], 64),
        ((16, 96), 96),
        (1, 1),
        *((size, 4 * HIDDEN) for size in (None, 0, -3, [], "48", 0.5)),
    ],
)
def test_of_sizes_that_differ_from_layer_to_layer_the_last_is_taken(size, found):
    assert network(target_of(intermediate_size=size)).intermediate_size == found


def test_a_config_of_each_layer_is_read_at_the_last_one():
    per_layer = {n: SimpleNamespace(intermediate_size=10 + n) for n in range(8)}
    target = target_of(intermediate_size=99, per_layer_config=per_layer, num_hidden_layers=4)
    assert network(target).intermediate_size == 13


def test_of_a_scaled_rope_only_what_fixes_frequencies_is_taken():
    rope = {**YARN, "rope_theta": 2e4, "beta_fast": 16, "mrope_section": [1, 2], "other": 3}
    found = network(target_of(rope_parameters=rope))
    assert found.rope_scaling == {**YARN, "beta_fast": 16}
    assert found.rope_theta == 2e4
    # Without a theta of its own the table's is the config's.
    assert network(target_of(rope_parameters=YARN, rope_theta=3e4)).rope_theta == 3e4


FULL, SLIDING = {"rope_type": "default", "rope_theta": 1e6}, {"rope_type": "x", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        (None, {}),
        ({}, {}),
        (FULL, FULL),
        ({"sliding_attention": SLIDING, "full_attention": FULL}, FULL),
        ({"sliding_attention": SLIDING, "chunked_attention": FULL}, SLIDING),
        ({"sliding_attention": SLIDING, "rope_theta": 3.0}, SLIDING),
    ],
)
def test_of_several_tables_that_of_full_attention_is_taken(parameters, found):
    assert rope_of(SimpleNamespace(rope_parameters=parameters)) == found
    assert rope_of(SimpleNamespace()) == {}


def test_changing_what_was_read_leaves_the_config_as_it_is():
    config = SimpleNamespace(rope_parameters=dict(FULL))
    rope_of(config).clear()
    assert config.rope_parameters == FULL


def changed(**config):
    """A tiny target whose config says otherwise."""
    return target_of(**{"hidden_act": "silu", "rope_parameters": FULL, **config})


@pytest.mark.parametrize("act", ["silu", "swish", None])
@pytest.mark.parametrize("kind", ["default", "dynamic", "linear", "llama3", "yarn"])
def test_targets_of_a_drafters_kind_are_like_it(act, kind):
    target = changed(hidden_act=act, rope_parameters={"rope_type": kind})
    assert unlike(target, network(tiny_target())) is None


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"hidden_act": "gelu"}, "its activation is gelu, a drafter's is silu"),
        (
            {"hidden_act": None, "hidden_activation": "relu"},
            "its activation is relu, a drafter's is silu",
        ),
        (
            {"hidden_act": None, "activation_function": "tanh"},
            "its activation is tanh, a drafter's is silu",
        ),
        ({"hidden_act": None, "act_fn": "mish"}, "its activation is mish, a drafter's is silu"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            "its RoPE is of kind longrope, which a drafter has not",
        ),
        ({"rope_parameters": None}, "its RoPE is of kind none, which a drafter has not"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "it rotates a part of each head, a drafter all of it",
        ),
    ],
)
def test_why_a_config_is_unlike_a_drafters(config, why):
    assert unlike(changed(**config), network(tiny_target())) == why


def test_as_many_layers_as_the_target_has_can_be_copied_and_no_more():
    target = tiny_target()
    assert unlike(target, network(target, num_layers=LAYERS)) is None
    assert unlike(target, network(target, num_layers=LAYERS + 1)) == (
        f"it has only {LAYERS} layers, fewer than drafter.num_layers"
    )


@pytest.mark.parametrize(("index", "seen"), [(0, False), (3, False), (4, True), (5, True)])
def test_only_the_layers_that_are_copied_are_looked_at_and_all_of_them(index, seen):
    target = tiny_target()
    target.layers[index].mlp.router = nn.Linear(HIDDEN, 2, bias=False)
    why = "its layers have mlp.router.weight, a drafter has none"
    assert unlike(target, network(tiny_target())) == (why if seen else None)


def test_biases_of_projections_make_no_difference_and_other_biases_do():
    target = tiny_target()
    target.layers[5].self_attn.o_proj.bias = nn.Parameter(torch.zeros(HIDDEN))
    assert unlike(target, network(tiny_target())) is None
    target.layers[5].input_layernorm.bias = nn.Parameter(torch.zeros(HIDDEN))
    assert unlike(target, network(tiny_target())) == (
        "its layers have input_layernorm.bias, a drafter has none"
    )


class Other(nn.Module):
    """A norm of another formula."""

    def __init__(self, weight, formula, **eps):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.formula = formula
        for name, value in eps.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.formula(x, self.weight)


def rms(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


FORMULAS = {
    "mean": lambda x, weight: rms(x - x.mean(-1, keepdim=True), weight),
    "one more": lambda x, weight: rms(x, 1 + weight),
    "no weight": lambda x, weight: rms(x, torch.ones_like(weight)),
    "no root": lambda x, weight: x * weight,
}


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("name", ["input_layernorm", "post_attention_layernorm", "final"])
def test_norms_of_another_formula_are_found_wherever_they_stand(name, formula):
    target = tiny_target()
    norm = Other(target.final_norm.weight, FORMULAS[formula])
    if name == "final":
        target.final_norm = norm
    else:
        setattr(target.layers[5], name, norm)
    where = "final norm" if name == "final" else name
    wanted = f"its {where} is no RMSNorm that multiplies by its weight"
    assert unlike(target, network(tiny_target())) == wanted


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_norms_of_queries_and_keys_may_be_there_and_must_be_of_the_same_formula(name):
    target = tiny_target()
    for index in (4, 5):
        norm = nn.RMSNorm(16, eps=1e-6)
        setattr(target.layers[index].self_attn, name, norm)
    assert unlike(target, network(tiny_target())) is None
    setattr(target.layers[5].self_attn, name, Other(norm.weight, FORMULAS["one more"]))
    assert unlike(target, network(tiny_target())) == (
        f"its self_attn.{name} is no RMSNorm that multiplies by its weight"
    )
    setattr(target.layers[5].self_attn, name, nn.RMSNorm(8))
    assert unlike(target, network(tiny_target())) == (
        f"its self_attn.{name}.weight has shape (8,), a drafter's (16,)"
    )


def test_norms_in_half_precision_are_looked_at_in_full():
    target = tiny_target()
    target.model.to(torch.bfloat16)
    assert unlike(target, network(tiny_target())) is None
    target.final_norm = nn.RMSNorm(HIDDEN, elementwise_affine=False)
    assert "final norm is no RMSNorm" in unlike(target, network(tiny_target()))


@pytest.mark.parametrize("name", ["eps", "variance_epsilon"])
def test_a_norms_own_epsilon_is_used_under_either_name(name):
    target = tiny_target()
    weight = target.final_norm.weight
    target.final_norm = Other(weight, lambda x, w: rms(x, w, 0.5), **{name: 0.5})
    assert unlike(target, network(tiny_target())) is None
    setattr(target.final_norm, name, 0.1)
    assert unlike(target, network(tiny_target())) is not None
    target.final_norm = None
    assert "final norm is no RMSNorm" in unlike(target, network(tiny_target()))


def test_looking_at_norms_changes_none_and_needs_no_weights():
    target = tiny_target()
    before = {name: p.clone() for name, p in target.model.named_parameters()}
    assert unlike(target, network(target)) is None
    for name, parameter in target.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
    target.model.to("meta")
    assert unlike(target, network(tiny_target())) is None


def test_gemma_is_unlike_a_drafter():
    target = gemma_target()
    assert "activation is gelu" in unlike(target, network(target))


def generator(seed=1):
    return torch.Generator().manual_seed(seed)


def test_the_start_of_an_unlike_target_names_the_setting_and_the_way_out():
    target = tiny_target()
    target.config.hidden_act = "gelu"
    with pytest.raises(ConfigError) as caught:
        from_target(target, network(tiny_target()), generator(), input_ids=torch.ones(1, 4).long())
    assert str(caught.value) == (
        "drafter.init = 'target': needs a target of Llama-like layers, and its activation is gelu, "
        "a drafter's is silu; set drafter.init = 'random'"
    )


def test_fusion_is_the_identity_on_the_last_feature_with_little_noise_everywhere():
    target = tiny_target()
    ids = torch.tensor([prompts(1)[0] * 4])
    fc = from_target(target, network(target), generator(), input_ids=ids).fc.weight.detach()
    noise = fc.clone()
    noise[:, -HIDDEN:] -= torch.eye(HIDDEN)
    drawn = random_start(network(target), generator()).fc.weight.detach()
    torch.testing.assert_close(noise, drawn * (FUSION_STD / RANDOM_STD), rtol=1e-2, atol=1e-6)
    assert noise.std().item() == pytest.approx(2e-4, rel=0.1)
    assert RANDOM_STD == 0.02


def test_a_random_start_is_drawn_in_the_order_of_the_parameters_in_fp32():
    drafter = random_start(make_config(), generator(4))
    draws = generator(4)
    for name, parameter in drafter.named_parameters():
        assert parameter.dtype == torch.float32
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            wanted = torch.empty_like(parameter).normal_(0.0, 0.02, generator=draws)
            assert torch.equal(parameter, wanted), name


class Samples:
    """A training split of these lengths."""

    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def sample(self, index):
        ids = torch.arange(self.lengths[index], dtype=torch.int32) + 1000 * index
        return SimpleNamespace(input_ids=ids)


@pytest.mark.parametrize(
    ("lengths", "count", "length"),
    [([300] * 20, 8, 96), ([300, 95, 97], 3, 95), ([5], 1, 5), ([300] * 8 + [3], 8, 96)],
)
def test_the_first_samples_calibrate_cut_to_the_shortest_of_them(lengths, count, length):
    found = calibration_tokens(Samples(lengths))
    assert found.tolist() == [[1000 * index + at for at in range(length)] for index in range(count)]
    assert (CALIBRATION_SAMPLES, CALIBRATION_TOKENS) == (8, 96)


def test_the_rms_of_each_layer_is_its_own_queries_first():
    target = tiny_target()
    ids = torch.tensor([prompts(1)[0] * 4, prompts(2)[1][:4] * 4])
    hidden = target.model(ids, output_hidden_states=True).hidden_states
    found = head_rms(target, [target.layers[4], target.layers[1]], ids)
    for (q, k), index in zip(found, (4, 1), strict=True):
        layer = target.layers[index]
        x = layer.input_layernorm(hidden[index])
        for value, projection in ((q, layer.self_attn.q_proj), (k, layer.self_attn.k_proj)):
            heads = projection(x).double().unflatten(-1, (-1, 16))
            assert value == pytest.approx(heads.pow(2).mean(-1).sqrt().mean().item(), rel=1e-5)
    # A config without head_dim has hidden size over heads, here 8.
    target.config = copy.copy(target.config)
    target.config.head_dim = None
    ((q, _),) = head_rms(target, [target.layers[4]], ids)
    heads = target.layers[4].self_attn.q_proj(target.layers[4].input_layernorm(hidden[4]))
    heads = heads.double().unflatten(-1, (-1, 8))
    assert q == pytest.approx(heads.pow(2).mean(-1).sqrt().mean().item(), rel=1e-5)


def test_hooks_are_gone_after_an_error_too():
    target = tiny_target()
    with pytest.raises(IndexError):
        head_rms(target, [target.layers[0]], torch.tensor([[999]]))
    assert not target.layers[0].self_attn.q_proj._forward_hooks
    assert not target.layers[0].self_attn.k_proj._forward_hooks


def test_rows_are_probed_over_the_whole_vocabulary():
    """First and last row, and those between evenly: one that differs among the probed is seen."""
    target = tiny_target(vocab_size=200)
    ids = sorted({int(n * 199 / (PROBES - 1)) for n in range(PROBES)})
    assert (ids[0], ids[-1], len(ids)) == (0, 199, PROBES)

    class Odd(nn.Embedding):
        def forward(self, rows):
            made = super().forward(rows)
            return torch.where((rows == self.odd)[..., None], made * 2, made)

    module = Odd(*target.embed_weight.shape)
    module.weight = nn.Parameter(torch.randn(200, HIDDEN, generator=generator()))
    target.model.set_input_embeddings(module)
    for odd in (0, ids[30], 199):
        module.odd = odd
        assert module_scale(target) is None
    module.odd = -1
    assert module_scale(target) == 1.0


def test_frequencies_of_a_plain_rope_are_the_formula():
    found, factor = rope_frequencies(make_config(head_dim=20, rope_theta=500.0))
    assert factor == 1.0
    assert found == pytest.approx([500.0 ** (-2 * n / 20) for n in range(10)], rel=1e-6)
