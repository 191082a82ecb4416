"""Inputs that showed faults in public trainers; each names the report it comes from."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from maskgen import compile_mask
from maskgen.errors import MaskSpecError
from maskgen.families import dflash, eagle3_ttt, families


def seen(mask, q, b=0):
    return mask.dense()[b, 0, q].nonzero().flatten().tolist()


def test_slots_of_a_block_see_each_other_both_ways():
    # SpecForge #427: the in-block mask was causal.
    mask = dflash(4, 12, draft_block_size=4, anchors=[3])
    assert seen(mask, 1) == [0, 1, 2, 8, 9, 10, 11]


def test_the_state_at_the_anchor_is_hidden():
    # SpecForge #455: context up to and including the anchor gave acceptance near 0.
    mask = dflash(8, 16, draft_block_size=4, anchors=[3, 7])
    assert not mask.dense()[0, 0, :4, 3].any()
    assert not mask.dense()[0, 0, 4:, 7].any()


def test_near_anchors_do_not_leak_into_each_other():
    # SpecForge #470: context visible by block index, so a block saw states after its anchor.
    mask = dflash(8, 20, draft_block_size=4, anchors=[5, 6])
    for slot in range(4):
        assert seen(mask, 4 + slot) == [*range(6), 16, 17, 18, 19]


def test_fewer_rows_than_a_tile():
    # SpecForge #501: the builder rounds rows up and an index passed the last block.
    params = {"draft_block_size": 16, "anchors": torch.tensor([[4, 9, 30]])}
    mask_mod = families["dflash"].mask_mod(48, 88, **params)
    block_mask = create_block_mask(mask_mod, 1, None, 48, 88, device="cpu")
    assert block_mask.kv_num_blocks.tolist() == [[[1]]]
    # TorchSpec #187: a mask of one tile.
    one_tile = compile_mask(dflash(32, 72, draft_block_size=16, anchors=[3, 20]))
    assert one_tile.block_kinds().tolist() == [[[[1]]]]


def test_rows_past_the_last_block_are_still_an_index():
    mask_mod = families["dflash"].mask_mod(8, 20, draft_block_size=4, anchors=[5, 6])
    last = mask_mod(*(torch.tensor(i) for i in (0, 0, 7, 5)))
    past = mask_mod(*(torch.tensor(i) for i in (0, 0, 127, 5)))
    assert bool(last)
    assert bool(past)


def test_lookup_tables_of_the_exact_length():
    # cartridges #21: tables of 15 and 143 entries, indexed up to the rounded block length.
    params = {"doc_ids": [0] * 15 + [1] * 128}
    mask_mod = families["document"].mask_mod(15, 143, inner="full", **params)
    block_mask = create_block_mask(mask_mod, None, None, 15, 143, device="cpu")
    assert block_mask.kv_num_blocks.tolist() == [[[1]]]
    mask = families["document"].intervals(15, 143, inner="full", **params)
    assert mask.row_counts().flatten().tolist() == [15] * 15


def test_no_row_is_empty_when_a_sample_has_no_anchor():
    # NeMo #2826: rows without a visible key gave NaN in eager attention.
    mask = dflash(8, 20, draft_block_size=4, anchors=[[3, 5], [0, 0]], n_valid=[2, 0])
    assert mask.dense().any(-1).all()
    assert seen(mask, 5, b=1) == [16, 17, 18, 19]


def test_unsorted_anchors_are_refused():
    # speculators #823: unsorted anchors cost seven times the attention.
    with pytest.raises(MaskSpecError, match="sort them"):
        dflash(12, 20, draft_block_size=4, anchors=[3, 7, 5])


def test_the_mask_has_one_head():
    # SpecForge #453: a mask built for every head although it ignores them.
    assert dflash(8, 20, draft_block_size=4, anchors=[3, 5]).H == 1


def test_steps_of_two_lengths_have_masks_of_their_own():
    # ModelOpt #1296: a cached mask of length 64 served length 96.
    for L in (64, 96):
        mask = eagle3_ttt(L, 2 * L, variant="modelopt")
        assert seen(mask, L - 1) == [*range(L - 1), 2 * L - 1]


def test_a_bucket_sees_the_same_as_the_exact_length():
    # Context 300 padded to 512 and 7 blocks to 16: live rows see the same tokens.
    anchors = [4, 30, 31, 100, 200, 250, 299]
    exact = dflash(28, 328, draft_block_size=4, anchors=anchors).dense()[0, 0]
    bucket = dflash(64, 576, draft_block_size=4, anchors=anchors + [0] * 9, n_valid=[7]).dense()[
        0, 0
    ]
    assert torch.equal(bucket[:28, :300], exact[:, :300])
    assert not bucket[:28, 300:512].any()
    assert torch.equal(bucket[:28, 512:540], exact[:, 300:])
    assert not bucket[:28, 540:].any()
