import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from runtime.dflash.network.drafter import Drafter, DrafterConfig, fold_feature_scale
from runtime.dflash.start.initialise import random_start
from runtime.errors import CheckpointError, ConfigError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def make_config(**changes):
    settings = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "vocab_size": 40,
        "draft_block_size": 3,
        "mask_token_id": 39,
        "target_layer_ids": (1, 3),
        "num_target_layers": 6,
        "max_position_embeddings": 512,
    }
    return DrafterConfig(**{**settings, **changes})


def make_drafter(config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drafter = random_start(config, generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.3, generator=generator)
    return drafter


def make_inputs(config, S=9, anchors=(4, 7), seed=1):
    generator = torch.Generator().manual_seed(seed)
    H, Bs = config.hidden_size, config.draft_block_size
    x = torch.randn(1, len(anchors) * Bs, H, generator=generator)
    features = torch.randn(1, S, len(config.target_layer_ids) * H, generator=generator)
    positions = torch.tensor([[a + k for a in anchors for k in range(Bs)]], dtype=torch.int32)
    return x, features, torch.arange(S, dtype=torch.int32), positions


def visible(config, S, anchors):
    """Context strictly before the anchor, and the own block both ways, cell by cell."""
    Bs = config.draft_block_size
    mask = torch.zeros(len(anchors) * Bs, S + len(anchors) * Bs, dtype=torch.bool)
    for row in range(mask.shape[0]):
        for column in range(mask.shape[1]):
            if column < S:
                mask[row, column] = column < anchors[row // Bs]
            else:
                mask[row, column] = (column - S) // Bs == row // Bs
    return mask


def dense(mask):
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def by_hand(drafter, x, features, positions, draft_positions, mask):
    """The formulas of the paper, one head and one row at a time, in float64."""
    config = drafter.config
    weights = {name: tensor.double() for name, tensor in drafter.state_dict().items()}
    hd, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads

    def norm(row, weight):
        return row / torch.sqrt((row * row).mean() + config.rms_norm_eps) * weight

    def rope(row, position):
        half = hd // 2
        out = row.clone()
        for i in range(half):
            angle = position * config.rope_theta ** (-2 * i / hd)
            a, b = row[i], row[i + half]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    F = [norm(weights["fc.weight"] @ row, weights["hidden_norm.weight"]) for row in features]
    at = [*positions.tolist(), *draft_positions.tolist()]
    h = list(x)
    for layer in range(config.num_hidden_layers):
        w = {
            name.removeprefix(f"layers.{layer}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        normed = [norm(row, w["input_layernorm.weight"]) for row in h]
        rows = F + normed
        attended = []
        for r, row in enumerate(normed):
            heads = []
            for head in range(config.num_attention_heads):
                cut = slice(head * hd, (head + 1) * hd)
                kv_cut = slice(head // group * hd, (head // group + 1) * hd)
                q = norm((w["self_attn.q_proj.weight"] @ row)[cut], w["self_attn.q_norm.weight"])
                q = rope(q, at[len(F) + r])
                seen = [c for c in range(len(rows)) if mask[r, c]]
                keys = [
                    rope(
                        norm(
                            (w["self_attn.k_proj.weight"] @ rows[c])[kv_cut],
                            w["self_attn.k_norm.weight"],
                        ),
                        at[c],
                    )
                    for c in seen
                ]
                share = torch.softmax(torch.stack([q @ k for k in keys]) / math.sqrt(hd), 0)
                values = [(w["self_attn.v_proj.weight"] @ rows[c])[kv_cut] for c in seen]
                heads.append(sum(p * v for p, v in zip(share, values, strict=True)))
            attended.append(w["self_attn.o_proj.weight"] @ torch.cat(heads))
        h = [row + more for row, more in zip(h, attended, strict=True)]
        for r, row in enumerate(h):
            n = norm(row, w["post_attention_layernorm.weight"])
            gate = w["mlp.gate_proj.weight"] @ n
            up = w["mlp.up_proj.weight"] @ n
            h[r] = row + w["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
    return torch.stack([norm(row, weights["norm.weight"]) for row in h])


def test_forward_follows_the_paper():
    config = make_config()
    drafter = make_drafter(config)
    anchors = (4, 7)
    x, features, positions, draft_positions = make_inputs(config, anchors=anchors)
    mask = visible(config, 9, anchors)
    found = drafter(x, drafter.fuse(features), positions, draft_positions, dense(mask))
    expected = by_hand(
        drafter, x[0].double(), features[0].double(), positions, draft_positions[0], mask
    )
    torch.testing.assert_close(found[0].double(), expected, rtol=1e-4, atol=1e-5)


def test_parameter_names_are_the_published_ones():
    config = make_config(num_hidden_layers=1)
    per_layer = [
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "self_attn.q_norm",
        "self_attn.k_norm",
        "post_attention_layernorm",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ]
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    expected |= {f"layers.0.{name}.weight" for name in per_layer}
    assert set(Drafter(config).state_dict()) == expected


def test_state_of_the_anchor_and_after_is_never_seen():
    config = make_config()
    drafter = make_drafter(config)
    anchors = (4, 7)
    x, features, positions, draft_positions = make_inputs(config, anchors=anchors)
    attention = dense(visible(config, 9, anchors))

    def run(features):
        return drafter(x, drafter.fuse(features), positions, draft_positions, attention)[0]

    changed = features.clone()
    changed[0, 4:] = 1e4
    assert torch.equal(run(changed)[:3], run(features)[:3])
    assert not torch.equal(run(changed)[3:], run(features)[3:])
    changed = features.clone()
    changed[0, 3] = 1e4
    assert not torch.equal(run(changed)[:3], run(features)[:3])


def test_slots_of_a_block_see_each_other_and_no_other_block():
    config = make_config()
    drafter = make_drafter(config)
    anchors = (4, 7)
    x, features, positions, draft_positions = make_inputs(config, anchors=anchors)
    attention = dense(visible(config, 9, anchors))
    F = drafter.fuse(features)
    before = drafter(x, F, positions, draft_positions, attention)[0]
    changed = x.clone()
    changed[0, 2] += 1
    after = drafter(changed, F, positions, draft_positions, attention)[0]
    assert (before[:3] != after[:3]).any(dim=1).all()
    assert torch.equal(before[3:], after[3:])


def test_cached_context_equals_a_whole_forward():
    config = make_config()
    drafter = make_drafter(config)
    x, features, positions, draft_positions = make_inputs(config, anchors=(9,))
    attention = dense(torch.ones(3, 12, dtype=torch.bool))
    F = drafter.fuse(features)
    whole = drafter(x, F, positions, draft_positions, attention)
    spans = (slice(0, 4), slice(4, 9))
    parts = [list(drafter.context(F[:, span], positions[span])) for span in spans]
    context = [
        tuple(torch.cat(pair, dim=2) for pair in zip(*layer, strict=True))
        for layer in zip(*parts, strict=True)
    ]
    torch.testing.assert_close(drafter.draft(x, context, draft_positions, attention), whole)


def test_batched_and_shared_positions_agree():
    config = make_config()
    drafter = make_drafter(config)
    x, features, positions, draft_positions = make_inputs(config)
    x, F = x.expand(2, -1, -1), drafter.fuse(features).expand(2, -1, -1)
    attention = dense(visible(config, 9, (4, 7)))
    shared = drafter(x, F, positions, draft_positions, attention)
    each = drafter(x, F, positions.expand(2, -1), draft_positions.expand(2, -1), attention)
    assert torch.equal(shared, each)


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN])
def test_rope_equals_transformers(scaling):
    drafter = Drafter(make_config(rope_scaling=scaling))
    theta = {"rope_theta": 1e4}
    reference = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=16,
            num_attention_heads=4,
            head_dim=16,
            max_position_embeddings=512,
            rope_parameters={**(scaling or {"rope_type": "default"}), **theta},
        )
    )
    positions = torch.arange(300)
    cos, sin = drafter.rope(positions)
    expected = reference(torch.zeros(1), positions[None])
    torch.testing.assert_close((cos[:, 0], sin[:, 0]), expected)


def test_casting_keeps_angles_in_fp32():
    config = make_config()
    drafter = make_drafter(config)
    expected = drafter.inv_freq.clone()
    positions = torch.arange(500, dtype=torch.int32)
    exact = drafter.rope(positions)[0]
    drafter = drafter.to(torch.bfloat16)
    assert torch.equal(drafter.inv_freq, expected)
    assert torch.equal(drafter.rope(positions)[0], exact.to(torch.bfloat16))
    x, features, positions, draft_positions = make_inputs(config)
    out = drafter(x, drafter.fuse(features), positions, draft_positions, dense(None))
    assert out.dtype == torch.bfloat16


def test_leaving_meta_makes_frequencies_real():
    drafter = Drafter(make_config(), device="meta")
    drafter.to_empty(device="cpu")
    assert torch.equal(drafter.inv_freq, Drafter(make_config()).inv_freq)


def test_compiles_as_one_graph_forward_and_backward():
    config = make_config(num_hidden_layers=1)
    drafter = make_drafter(config)
    x, features, positions, draft_positions = make_inputs(config)
    mask, scale = visible(config, 9, (4, 7)), torch.tensor([1.0, 2.0])

    def loss(x, features, mask):
        F = drafter.fuse(features, scale)
        return drafter(x, F, positions, draft_positions, dense(mask)).pow(2).sum()

    def gradients(function):
        drafter.zero_grad()
        function(x, features, mask).backward()
        return {name: p.grad.clone() for name, p in drafter.named_parameters()}

    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(gradients(compiled), gradients(loss))
    torch._dynamo.reset()


def test_folded_scale_equals_scaled_features():
    config = make_config()
    drafter = make_drafter(config)
    _, features, _, _ = make_inputs(config)
    scale = torch.tensor([3.0, 0.25])
    expected = drafter.fuse(features, scale)
    with torch.no_grad():
        drafter.fc.weight.copy_(fold_feature_scale(drafter.fc.weight, scale))
    torch.testing.assert_close(drafter.fuse(features), expected)


@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_config_survives_publishing(scaling):
    config = make_config(rope_scaling=scaling)
    published = config.to_published()
    assert DrafterConfig.from_published(published) == config
    assert published["block_size"] == published["dflash_config"]["block_size"] == 3
    assert published["architectures"] == ["DFlashDraftModel"]
    assert published["rope_parameters"]["rope_theta"] == published["rope_theta"] == 1e4
    assert Qwen3Config(**published).head_dim == 16


def test_config_reads_other_trainers_folders():
    published = make_config().to_published()
    del published["rope_parameters"], published["dflash_config"]["block_size"]
    assert DrafterConfig.from_published(published) == make_config()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 8}, "block_size = 8 and dflash_config.block_size = 3 must be equal"),
        ({"sample_from_anchor": True}, "must predict anchor\\+k"),
        ({"layer_types": ["linear_attention"] * 2}, "every layer must be full_attention or"),
        ({"dflash_config": {}}, "must hold 'mask_token_id'"),
        ({"rope_theta": None, "rope_parameters": {}}, "must hold 'rope_theta'"),
    ],
)
def test_config_refuses_other_conventions(change, message):
    with pytest.raises(CheckpointError, match=message):
        DrafterConfig.from_published({**make_config().to_published(), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_block_size": 1}, "draft_block_size = 1: must be at least 2"),
        ({"mask_token_id": 40}, "mask_token_id = 40: must be a row"),
        ({"num_key_value_heads": 3}, "must divide num_attention_heads = 4"),
        ({"target_layer_ids": (6,)}, "must name one or more layers"),
        ({"head_dim": 17}, "must be even"),
        ({"head_dim": 8}, "at least 16"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: must be at least 1"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type must be one of"),
    ],
)
def test_config_names_what_is_wrong(change, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**change)


def test_a_block_begins_with_its_anchors_row_and_goes_on_with_the_masks():
    config = make_config()
    rows = torch.randn(40, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    anchors = torch.tensor([[7, 3], [39, 0]])
    mask = rows[39].tolist()
    wanted = [[x for a in row for x in (rows[a].tolist(), mask, mask)] for row in anchors.tolist()]
    plain = Drafter(config).block_inputs(anchors, rows)
    assert (plain.shape, plain.dtype) == ((2, 6, 16), torch.bfloat16)
    assert plain.tolist() == wanted
    scaled = Drafter(make_config(embedding_scale=0.5)).block_inputs(anchors, rows)
    assert scaled.dtype == torch.bfloat16
    assert torch.equal(scaled, plain * 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_divided_in_fp32_whatever_dtype_they_come_in(dtype):
    drafter = make_drafter(make_config()).to(dtype)
    features = (1e3 * torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(3))).bfloat16()
    scale = torch.tensor([3.0, 700.0])
    exact = features.float()
    exact[..., :16] /= 3
    exact[..., 16:] /= 700
    assert torch.equal(drafter.fuse(features, scale), drafter.fuse(exact))
    assert torch.equal(
        drafter.fuse(features, scale.bfloat16()),
        drafter.fuse(
            torch.cat((features[..., :16].float() / 3, features[..., 16:].float() / 700), dim=-1)
        ),
    )
    assert drafter.fuse(features, scale).dtype == drafter.dtype == dtype


def test_a_folded_weight_keeps_its_dtype_and_is_divided_in_fp32():
    weight = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = fold_feature_scale(weight, torch.tensor([3.0, 7.0, 0.1], dtype=torch.float64))
    assert found.dtype == torch.bfloat16
    exact = weight.float() / torch.tensor([3.0, 3.0, 7.0, 7.0, 0.1, 0.1])
    assert torch.equal(found, exact.bfloat16())


def test_a_drafter_is_fp32_on_its_device_whatever_the_thread_prefers():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            drafter = Drafter(make_config())
    finally:
        torch.set_default_dtype(torch.float32)
    for name, tensor in [*drafter.named_parameters(), *drafter.named_buffers()]:
        assert (tensor.dtype, tensor.device.type) == (torch.float32, "cpu"), name
    assert Drafter(make_config(), device="meta").inv_freq.device.type == "meta"


def test_every_norm_has_the_configs_epsilon():
    drafter = Drafter(make_config(rms_norm_eps=0.125))
    norms = [module for module in drafter.modules() if isinstance(module, torch.nn.RMSNorm)]
    assert len(norms) == 2 + 2 * 4
    assert {norm.eps for norm in norms} == {0.125}
    assert not any(name.endswith("bias") for name in drafter.state_dict())


def test_yarns_factor_is_on_both_cos_and_sin():
    plain = Drafter(make_config(rope_scaling={**YARN, "attention_factor": 1.0}))
    louder = Drafter(make_config(rope_scaling={**YARN, "attention_factor": 1.5}))
    at = torch.arange(40)
    for one, more in zip(plain.rope(at), louder.rope(at), strict=True):
        torch.testing.assert_close(more, one * 1.5)


def test_as_many_contexts_as_layers_are_needed():
    config = make_config()
    drafter = make_drafter(config)
    x, features, positions, draft_positions = make_inputs(config)
    context = list(drafter.context(drafter.fuse(features), positions))
    assert [tuple(t.shape for t in pair) for pair in context] == [((1, 2, 9, 16),) * 2] * 2
    for wrong in (context[:1], [*context, context[0]]):
        with pytest.raises(ValueError, match="argument 2 is"):
            drafter.draft(x, wrong, draft_positions, dense(None))
