"""Sliding layers: decoding, the mask family and the network mean the same cells."""

import dataclasses
import json

import pytest
import torch
from torch.nn.functional import embedding, scaled_dot_product_attention

import maskgen
from runtime.dflash.decoding.speculate import DraftSession, greedy
from runtime.dflash.folder.saved_drafter import load_published, save_published
from runtime.dflash.network.config import DrafterConfig
from runtime.dflash.network.sliding import sliding_cells
from runtime.dflash.start.initialise import drafter_config, from_target
from runtime.errors import CheckpointError, ConfigError
from runtime.static.attention import dense_attention
from tests.runtime.tiny_llama import prompts, tiny_target

LAYER_IDS = (1, 2, 3)
BLOCK = 4


def see_all(q, k, v):
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def network_of(target, layers, window):
    network = drafter_config(
        target, num_layers=len(layers), draft_block_size=BLOCK, target_layer_ids=LAYER_IDS
    )
    return dataclasses.replace(network, layers=layers, sliding_window=window)


def make_drafter(target, layers, window):
    ids = torch.tensor([prompts(1)[0] * 5])
    network = network_of(target, layers, window)
    return from_target(target, network, torch.Generator().manual_seed(0), input_ids=ids)


def brute_force(anchor, slots, window, context):
    """Row (slot), key by key: positions p - W + 1 to p, of the context and of the own block."""
    cells = torch.zeros(slots, context + slots, dtype=torch.bool)
    for slot in range(slots):
        p = anchor + slot
        for key in range(anchor):
            cells[slot, key] = p - window + 1 <= key <= p
        for other in range(slots):
            cells[slot, context + other] = p - window + 1 <= anchor + other <= p
    return cells


@pytest.mark.parametrize("convention", ["sglang", "vllm", "specforge"])
def test_every_cell_is_the_familys_and_that_of_a_brute_force(convention):
    context = 14
    for slots in (1, 2, 4):
        for window in (*range(slots, 10), context + slots, 100):
            for anchor in range(context):
                wanted = brute_force(anchor, slots, window, context)
                cells = sliding_cells(anchor, slots, window)
                assert torch.equal(cells[:, :anchor], wanted[:, :anchor])
                assert torch.equal(cells[:, anchor:], wanted[:, context:])
                spans = maskgen.dflash(
                    slots,
                    context + slots,
                    draft_block_size=slots,
                    anchors=[anchor],
                    layer="sliding",
                    window=window,
                    convention=convention,
                )
                assert torch.equal(spans.dense()[0, 0], wanted)


def test_a_window_over_all_is_a_causal_block():
    for anchor in (0, 1, 7):
        cells = sliding_cells(anchor, BLOCK, anchor + BLOCK)
        assert sliding_cells(anchor, BLOCK, 9, "meta").device.type == "meta"
        assert cells[:, :anchor].all()
        assert torch.equal(cells[:, anchor:], torch.ones(BLOCK, BLOCK).tril().bool())


@pytest.mark.parametrize("anchor", [2, 4, 11])
@pytest.mark.parametrize("window", [4, 6, 30])
def test_rows_fed_one_by_one_through_a_cache_of_the_window_are_the_same(target, anchor, window):
    drafter = make_drafter(target, ("sliding", "sliding"), window)
    text = torch.tensor([[*prompts(3)[2], *range(12)]])[:, : anchor + 1]
    x = drafter.block_inputs(text[:, -1:], target.embed_weight)
    F = drafter.fuse(target.features(text[:, :anchor], LAYER_IDS))
    positions = torch.arange(anchor, anchor + BLOCK)
    cells = sliding_cells(anchor, BLOCK, window)
    whole = drafter(
        x, F, torch.arange(anchor), positions, see_all, dense_attention(cells[None, None])
    )
    caches = list(drafter.context(F, torch.arange(anchor)))
    for slot in range(BLOCK):
        row, rope = x[:, slot : slot + 1], drafter.rope(positions[slot : slot + 1])
        for index, layer in enumerate(drafter.layers):
            # A cache of the window, with room for the row itself.
            kept = tuple(side[:, :, max(0, side.shape[2] - window + 1) :] for side in caches[index])
            own = layer.self_attn.key_value(layer.input_layernorm(row), rope)
            row = layer(row, kept, rope, see_all)
            caches[index] = tuple(torch.cat(pair, dim=2) for pair in zip(kept, own, strict=True))
            assert caches[index][0].shape[2] <= window
        torch.testing.assert_close(drafter.norm(row)[0, 0], whole[0, slot], rtol=1e-4, atol=1e-5)


MIXES = [(("sliding", "full"), 4), (("full", "sliding"), 6), (("sliding", "sliding"), 9)]


@pytest.mark.parametrize(("layers", "window"), MIXES)
def test_decoding_drafts_every_block_by_the_familys_mask(target, monkeypatch, layers, window):
    drafter, prompt, blocks = make_drafter(target, layers, window), prompts(2)[1], []

    def recorded(x, context, positions, *attention):
        hidden = type(drafter).draft(drafter, x, context, positions, *attention)
        blocks.append((int(positions[0]), hidden))
        return hidden

    with monkeypatch.context() as patch:
        patch.setattr(drafter, "draft", recorded)
        found = DraftSession(target, drafter).generate(prompt, 24)
    assert found.tokens == greedy(target, prompt, 24).tokens
    text = torch.tensor([[*prompt, *found.tokens]])
    S = text.shape[1]
    assert len(blocks) > 4
    moved = 0.0
    for anchor, hidden in blocks:
        masks = [
            dense_attention(
                maskgen.dflash(
                    BLOCK, S + BLOCK, draft_block_size=BLOCK, anchors=[anchor], **layer
                ).dense()
            )
            for layer in ({}, {"layer": "sliding", "window": window, "convention": "sglang"})
        ]
        tokens = text[:, [anchor]], torch.full((1, BLOCK - 1), drafter.config.mask_token_id)

        def whole(*attention, tokens=tokens, anchor=anchor):
            return drafter(
                embedding(torch.cat(tokens, dim=1), target.embed_weight),
                drafter.fuse(target.features(text, LAYER_IDS)),
                torch.arange(S),
                torch.arange(anchor, anchor + BLOCK),
                *attention,
            )

        torch.testing.assert_close(hidden, whole(*masks), rtol=1e-4, atol=1e-4)
        moved = max(moved, float((hidden - whole(masks[0], masks[0])).detach().abs().max()))
    assert moved > 1e-2


def test_a_folder_says_which_layers_slide(target, tmp_path):
    drafter = make_drafter(target, ("sliding", "full"), 6)
    save_published(tmp_path, drafter.config, drafter.state_dict())
    published = json.loads((tmp_path / "config.json").read_text())
    assert published["layer_types"] == ["sliding_attention", "full_attention"]
    assert published["sliding_window"] == 6
    assert published["use_sliding_window"] is True
    flags = {"is_causal", "causal", "use_swa"}
    assert not flags & (published.keys() | published["dflash_config"].keys())
    again = load_published(tmp_path, dtype=torch.float32)
    assert again.config == drafter.config
    prompt = prompts(2)[1]
    first = DraftSession(target, again).first_block(prompt)
    full = dataclasses.replace(drafter.config, layers=(), sliding_window=None)
    save_published(tmp_path, full, drafter.state_dict())
    other = DraftSession(target, load_published(tmp_path, dtype=torch.float32)).first_block(prompt)
    assert not torch.allclose(first, other, atol=1e-3)


def test_layers_that_are_all_full_are_a_network_without_sliding(target):
    network = network_of(target, ("full", "full"), 6)
    plain = drafter_config(target, num_layers=2, draft_block_size=BLOCK, target_layer_ids=LAYER_IDS)
    assert network == plain
    assert plain.to_published() == network.to_published()


@pytest.mark.parametrize(
    ("layers", "window", "message"),
    [
        (("sliding",), 6, "layers = .*must be full or sliding for each of the 2 layers"),
        (("sliding", "round"), 6, "layers = .*must be full or sliding"),
        (("sliding", "full"), 3, "sliding_window = 3: must be at least draft_block_size = 4"),
        (("sliding", "full"), None, "sliding_window = None: must be at least"),
        (("sliding", "full"), 2**31, "sliding_window = 2147483648: must be at least"),
    ],
)
def test_networks_that_cannot_be(target, layers, window, message):
    plain = drafter_config(target, num_layers=2, draft_block_size=BLOCK, target_layer_ids=LAYER_IDS)
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(plain, layers=layers, sliding_window=window)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"use_sliding_window": None},
        {"swa_window_size": 6},
        {"dflash_config": {"swa_window_size": 6, "use_swa": False}},
        {"max_window_layers": 1},
    ],
)
def test_folders_of_other_trainers_are_read(target, change):
    network = network_of(target, ("sliding", "full"), 6)
    published = network.to_published()
    inner = {**published["dflash_config"], **change.get("dflash_config", {})}
    assert DrafterConfig.from_published({**published, **change, "dflash_config": inner}) == network


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_causal": False}, "is_causal = false: must be missing, since servers take it for all"),
        ({"is_causal": True}, "is_causal = true: must be false or missing"),
        ({"causal": False}, "causal = false: must be missing, since servers take it for all"),
        ({"use_swa": True}, "use_swa = true: must be false or missing, since here layer_types say"),
        ({"swa_window_size": 7}, "swa_window_size = 7: must be sliding_window = 6 or missing"),
        ({"sliding_window": None}, "must hold 'sliding_window'"),
        ({"sliding_window": "6"}, 'sliding_window = "6": must be an integer'),
        ({"use_sliding_window": False}, "use_sliding_window = false: must be true or missing"),
        ({"layer_types": ["sliding_attention"]}, "layer_types names 1 layers: must be num_hidden"),
        (
            {"layer_types": ["chunked_attention", "full_attention"]},
            "every layer must be full_attention or sliding_attention",
        ),
        ({"layer_types": None}, "use_sliding_window is set without layer_types"),
        ({"sliding_window_non_causal": True}, "sliding_window_non_causal = true: is no key that"),
    ],
)
def test_what_slides_otherwise_is_refused(target, change, message):
    published = network_of(target, ("sliding", "full"), 6).to_published()
    with pytest.raises(CheckpointError, match=message):
        DrafterConfig.from_published({**published, **change})
