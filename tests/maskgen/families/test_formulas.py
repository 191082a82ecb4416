"""Every family equals its formula: spans, analytic mask_mod, stated K, and the block tables."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from maskgen import MAX_INTERVALS, RowIntervals, compile_mask
from maskgen.families import families
from maskgen.families.family import ANALYTIC_ABOVE_K
from tests.maskgen.families.cases import CASES
from tests.maskgen.families.formulas import FORMULAS

BLOCK_SIZE = (16, 32)


def batch_size(family, params):
    """Batch rows that the runtime parameters of a case have."""
    sizes = [1]
    for given in families[family].runtime:
        value = params.get(given.name)
        if value is not None and torch.as_tensor(value).dim() == given.rank:
            sizes.append(len(value))
    return max(sizes)


def dense_by_formula(case):
    """The mask bool ``[B, 1, Q_LEN, KV_LEN]``, one cell at a time."""
    formula = FORMULAS[case.family]
    Q, KV = case.Q_LEN, case.KV_LEN
    cells = [
        [[bool(formula(q, kv, Q, KV, b, **case.params)) for kv in range(KV)] for q in range(Q)]
        for b in range(batch_size(case.family, case.params))
    ]
    return torch.tensor(cells).unsqueeze(1)


def block_kinds(block_mask):
    """torch's tables as 0 empty, 1 partial, 2 full, uint8 ``[B, H, R, C]``."""
    kinds = torch.zeros(block_mask.kv_indices.shape, dtype=torch.uint8)
    for num, indices, kind in (
        (block_mask.kv_num_blocks, block_mask.kv_indices, 1),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, 2),
    ):
        column = torch.arange(indices.shape[-1])
        live = column < num.unsqueeze(-1)
        kinds.scatter_add_(3, indices.long(), (live * kind).to(torch.uint8))
    return kinds


@pytest.mark.parametrize("case", CASES, ids=str)
def test_spans_mask_mod_and_tables_equal_the_formula(case):
    family = families[case.family]
    Q, KV = case.Q_LEN, case.KV_LEN
    expected = dense_by_formula(case)
    B = len(expected)

    starts, ends = family.spans(Q, KV, **case.params)
    raw = RowIntervals(starts, ends, KV)
    assert starts.dtype == ends.dtype == torch.int32
    checked = family.check(Q, KV, case.params)
    K = family.max_K(Q, KV, checked)
    assert tuple(starts.shape) == (B, 1, family.max_K(Q, KV, case.params), Q)
    assert torch.equal(raw.dense(), expected)
    # Kernels and mask_mods count overlaps, so spans that a graph makes must be disjoint.
    assert torch.equal((ends - starts).sum(2), expected.sum(3))

    canonical = family.intervals(Q, KV, **case.params)
    assert canonical.is_canonical
    assert torch.equal(canonical.dense().expand_as(expected), expected)
    assert canonical.K == K if case.tight else canonical.K <= K

    mask_mod = family.mask_mod(Q, KV, **checked)
    assert mask_mod.__name__ == f"{case.family}_mask_mod"
    mask = create_mask(mask_mod, B, None, Q, KV, device="cpu")
    assert torch.equal(mask, expected)

    if canonical.K <= MAX_INTERVALS:
        tables = compile_mask(canonical, BLOCK_SIZE)
        theirs = create_block_mask(mask_mod, B, None, Q, KV, device="cpu", BLOCK_SIZE=BLOCK_SIZE)
        kinds = block_kinds(theirs)
        assert torch.equal(tables.block_kinds().expand_as(kinds), kinds)


@pytest.mark.parametrize("anchor", [9, 10, 19, 2**30])
def test_a_draft_block_sees_no_other_whatever_its_anchor_says(anchor):
    """In a graph nobody looks at the values: a valid anchor may lie past the context of 8."""
    params = {"draft_block_size": 4, "anchors": [[3, anchor, 5]], "n_valid": [2]}
    starts, ends = families["dflash"].spans(12, 20, **params)
    wanted = [[0] * 20 for _ in range(12)]
    for block, context in ((0, 3), (1, 8), (2, 0)):
        for slot in range(4):
            row = 4 * block + slot
            wanted[row][:context] = [1] * context
            wanted[row][8 + 4 * block : 12 + 4 * block] = [1] * 4
    assert RowIntervals(starts, ends, 20).dense()[0, 0].int().tolist() == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_mask_mod_on_a_gpu_equals_the_spans(case):
    family = families[case.family]
    Q, KV = case.Q_LEN, case.KV_LEN
    dense = family.intervals(Q, KV, **case.params).dense()
    B = batch_size(case.family, case.params)
    mask_mod = family.mask_mod(Q, KV, device="cuda", **family.check(Q, KV, case.params))
    mask = create_mask(mask_mod, B, None, Q, KV, device="cuda")
    assert torch.equal(mask.cpu(), dense.expand(B, -1, -1, -1))


def test_every_family_has_cases_and_a_formula():
    assert {case.family for case in CASES} == set(FORMULAS) == set(families)


def test_every_family_has_a_mask_that_needs_its_stated_largest_number_of_spans():
    tight = {case.family for case in CASES if case.tight}
    assert tight == set(families)


def test_the_formula_is_chosen_where_it_is_the_faster_mask_mod():
    chosen = set()
    for case in CASES:
        family, params = families[case.family], case.params
        spans = family.intervals(case.Q_LEN, case.KV_LEN, **params)
        mask_mod = family.chosen_mask_mod(spans, **params)
        assert (mask_mod is None) == (family.analytic_above >= spans.K)
        if mask_mod is not None:
            assert mask_mod.__name__ == f"{case.family}_mask_mod"
            chosen.add(case.family)
    windows = {"sliding_window", "sink_window", "global_prefix_window"}
    assert chosen == windows | {"eagle3_ttt", "p_eagle", "tree", "natten"}
    assert {f.name for f in families.values() if f.analytic_above == 0} == windows
    assert {f.analytic_above for f in families.values()} == {0, ANALYTIC_ABOVE_K}


def test_a_family_of_many_spans_has_an_analytic_mask_mod():
    many = {
        case.family
        for case in CASES
        if families[case.family].max_K(case.Q_LEN, case.KV_LEN, case.params) > ANALYTIC_ABOVE_K
    }
    assert many == {"eagle3_ttt", "p_eagle", "tree", "natten"}
