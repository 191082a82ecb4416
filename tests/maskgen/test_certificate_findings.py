"""What a certificate says of masks with several heads, of several faults, and of itself."""

import dataclasses
import re
import sys
import time

import pytest
import torch

import cache
from maskgen import certificate, compile_mask
from maskgen.build import build
from maskgen.certificate import certify, is_causal, rows_without_key, span_findings, table_findings
from maskgen.entry import load_entry
from maskgen.intervals import RowIntervals
from maskgen.spec import read_specs
from maskgen.verify import verify_deep

CODE = """
def small(b, h, q, kv):
    return (kv <= q) & (q - kv <= 3 + 4 * h) & (kv >= 2 * b)

def large(b, h, q, kv):
    return (kv <= q) & (q - kv <= 90 + 40 * h + 10 * b)
"""
ENTRIES = [
    {"name": "small", "mask_mod": "masks_of_heads:small", "Q_LEN": 40, "B": 2, "H": 3},
    {"name": "large", "mask_mod": "masks_of_heads:large", "Q_LEN": 1000, "B": 3, "H": 2},
    {"name": "causal", "family": "causal", "Q_LEN": 100},
    {"name": "data", "family": "full", "kind": "parametric", "Q_LEN": 40, "KV_LEN": 50},
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    (folder / "masks_of_heads.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(sys, "dont_write_bytecode", True)
        opened = cache.open_store(folder / "m.zarr", writable=True)
        build(read_specs({"masks": {"BLOCK_SIZE": [16, 32], "entry": ENTRIES}}), opened)
        yield opened
    sys.modules.pop("masks_of_heads", None)


def with_ends(entry, change):
    """The entry with other ends of its spans, its tables as they were."""
    spans = entry.spans
    ends = spans.ends.clone()
    change(ends)
    return dataclasses.replace(entry, _spans=RowIntervals(spans.starts, ends, spans.KV_LEN))


def test_a_certificate_says_what_it_is_of(store):
    shares = []
    for name in ("small/q40-kv40", "causal/q100-kv100", "data/q40-kv50"):
        entry = load_entry(store, name)
        began = time.perf_counter()
        found = certify(entry)
        elapsed_ms = (time.perf_counter() - began) * 1e3
        assert (found.name, found.spec, found.sha256) == (name, entry.spec.digest, entry.sha256)
        assert found.findings == ()
        assert found.compare_ms <= elapsed_ms
        shares.append(found.compare_ms / elapsed_ms)
    # Most of the time in milliseconds; one of them may have had to wait elsewhere.
    assert max(shares) > 0.01
    small = certify(load_entry(store, "small/q40-kv40"))
    assert small.compared == "every cell, with the function of masks_of_heads:small"
    assert small.compared_cells == 2 * 3 * 40 * 40
    # Keys start at 2 * b: of batch row 1 the first two rows see none.
    assert small.rows_without_key == 6
    assert small.first_rows_without_key == ((1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1))
    assert small.causal is True


@pytest.mark.parametrize(("b", "h", "q"), [(0, 0, 5), (1, 0, 39), (0, 2, 7), (1, 2, 39)])
def test_a_wrong_cell_of_any_head_is_found(store, b, h, q):
    def change(ends):
        ends[b, h, 0, q] -= 1

    wrong = with_ends(load_entry(store, "small/q40-kv40"), change)
    assert certify(wrong).findings == (
        "spans: 1 of the cells compared differ from the formula, "
        f"first (b, h, q, kv) = {(b, h, q, q)}",
    )


def test_every_wrong_cell_is_counted_and_the_first_named(store):
    def change(ends):
        ends[0, 1, 0, 20] -= 2
        ends[1, 2, 0, 30] -= 1

    wrong = with_ends(load_entry(store, "small/q40-kv40"), change)
    (finding,) = certify(wrong).findings
    assert finding.startswith("spans: 3 of the cells")
    assert finding.endswith("(b, h, q, kv) = (0, 1, 20, 19)")


def test_a_cell_too_many_is_a_difference_too(store):
    def change(ends):
        ends[0, 0, 0, 98] += 1

    found = certify(with_ends(load_entry(store, "causal/q100-kv100"), change))
    assert found.findings[0].endswith("(b, h, q, kv) = (0, 0, 98, 99)")
    assert found.causal is False


def test_heads_of_a_large_mask_are_drawn_too(store):
    entry = load_entry(store, "large/q1000-kv1000")
    found = certify(entry)
    assert found.findings == ()
    tiles = certificate._sampled_tiles((3, 2), entry.tables.block_kinds(), entry.sha256)
    assert found.compared == f"{len(tiles)} tiles drawn by the digest, with the function of " + (
        "masks_of_heads:large"
    )
    assert set(tiles[:, 0].tolist()) == {0, 1, 2}
    assert set(tiles[:, 1].tolist()) == {0, 1}
    assert tiles.max(0).values.tolist() == [2, 1, 62, 31]
    # The ragged last tile is looked at in the last head.
    assert tiles[-1].tolist() == [2, 1, 62, 31]
    assert len(tiles.unique(dim=0)) == len(tiles)
    # 24 rows are drawn, in each a tile of every kind that it has, and the last tile.
    assert 24 < len(tiles) <= 24 * 3 + 1
    # The last tile is 8 rows by 8 columns, all others of the last row or column are ragged, too.
    rows = torch.where(tiles[:, 2] == 62, 1000 - 62 * 16, 16)
    columns = torch.where(tiles[:, 3] == 31, 1000 - 31 * 32, 32)
    assert found.compared_cells == int((rows * columns).sum())


def test_tiles_of_a_mask_that_is_one_for_all_heads():
    kinds = torch.tensor([[0, 1, 2], [1, 1, 1]], dtype=torch.uint8)[None, None]
    tiles = certificate._sampled_tiles((4, 5), kinds, "7" * 64)
    assert tiles[-1].tolist() == [3, 4, 1, 2]
    assert len(set(tiles[:, 0].tolist())) == 4
    assert len(set(tiles[:, 1].tolist())) == 5


def test_a_mask_of_just_the_largest_size_is_compared_whole(store, monkeypatch):
    entry = load_entry(store, "small/q40-kv40")
    monkeypatch.setattr(certificate, "MAX_DENSE_CELLS", 2 * 3 * 40 * 40)
    assert certify(entry).compared.startswith("every cell")
    monkeypatch.setattr(certificate, "MAX_DENSE_CELLS", 2 * 3 * 40 * 40 - 1)
    assert "tiles drawn" in certify(entry).compared


def test_samples_are_drawn_as_far_as_they_fit(store, monkeypatch):
    entry = load_entry(store, "data/q40-kv50")
    # Blocks 3 x 2, keys 50, and 40 rows of one span: keys are the most.
    for limit, samples in ((50 * 9, 4), (50 * 3, 3), (50 * 3 - 1, 2), (50, 1), (49, 1)):
        monkeypatch.setattr(certificate, "MAX_NUMBERS", limit)
        assert certify(entry).compared_cells == samples * 40 * 50, limit


def test_a_block_is_named_with_the_kind_it_is_listed_as(store):
    entry = load_entry(store, "causal/q100-kv100")
    # The other way round: spans and formula agree, and two kinds of the listed blocks are changed.
    kinds = entry.tables.block_kinds()
    for place, kind, said in (
        ((0, 0, 0, 0), 0, "(0, 0, 0, 0) is listed as empty and is partial"),
        ((0, 0, 6, 1), 1, "(0, 0, 6, 1) is listed as partial and is partial"),
        ((0, 0, 2, 0), 1, "(0, 0, 2, 0) is listed as partial and is full"),
        ((0, 0, 0, 3), 2, "(0, 0, 0, 3) is listed as full and is empty"),
    ):
        wrong = kinds.clone()
        wrong[place] = kind
        tiles = certificate._all_tiles((1, 1), wrong)
        findings, cells = certificate._compare_tiles(entry, wrong, tiles)
        same = int(kinds[place]) == kind
        wanted = [] if same else [f"tables: block (b, h, row, column) = {said}"]
        assert (findings, cells) == (wanted, 100 * 100)


def rows_of(*rows, KV_LEN=9):
    """Rows of (start, end) pairs, as many in each, as RowIntervals that nothing was checked of."""
    table = torch.tensor(rows, dtype=torch.int32).permute(2, 1, 0)[:, None, None].contiguous()
    return RowIntervals._trusted(table[0], table[1], KV_LEN)


@pytest.mark.parametrize(
    ("rows", "findings"),
    [
        (
            [[(0, 1), (2, 3), (4, 5)], [(0, 1), (4, 6), (6, 8)]],
            ["spans touch, overlap or descend, first in row (0, 0, 1)"],
        ),
        (
            [[(0, 1), (2, 3), (4, 5)], [(0, 1), (0, 0), (6, 8)]],
            ["an empty span stands before a non-empty one, first in row (0, 0, 1)"],
        ),
        (
            [[(0, 1), (2, 3), (4, 5)], [(0, 1), (0, 0), (7, 0)], [(0, 1), (0, 0), (0, -1)]],
            ["an empty span is not (0, 0), first in row (0, 0, 1)"],
        ),
        ([[(0, 9)], [(0, 10)]], ["a span leaves the columns, first in row (0, 0, 1)"]),
        ([[(0, 9)], [(-1, 4)]], ["a span leaves the columns, first in row (0, 0, 1)"]),
        (
            [[(2, 4), (4, 11)]],
            [
                "spans touch, overlap or descend, first in row (0, 0, 0)",
                "a span leaves the columns, first in row (0, 0, 0)",
            ],
        ),
        ([[(0, 1), (2, 3)], [(8, 9), (0, 0)], [(0, 0), (0, 0)]], []),
    ],
)
def test_each_rule_of_the_order_is_found_in_its_row(rows, findings):
    assert span_findings(rows_of(*rows)) == [f"spans: {finding}" for finding in findings]


def heads_of(*ends, KV_LEN=9):
    """A mask of two heads, a span from 0 on in each row."""
    ends = torch.tensor(ends, dtype=torch.int32)[None, :, None]
    return RowIntervals(torch.zeros_like(ends), ends, KV_LEN)


def test_rows_without_keys_of_all_heads():
    assert rows_without_key(heads_of([0, 2], [2, 0])) == ([(0, 0, 0), (0, 1, 1)], 2)
    assert rows_without_key(heads_of([0] * 3, [0] * 3)) == (
        [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0)],
        6,
    )
    # A row of one span has an empty slot, and is not blind.
    assert rows_without_key(rows_of([(0, 2), (0, 0)], [(0, 0), (3, 4)])) == ([], 0)


def test_causality_is_of_every_head_and_span():
    assert is_causal(heads_of([1, 2], [0, 2]))
    assert not is_causal(heads_of([1, 2], [1, 3]))
    assert not is_causal(heads_of([2, 2], [1, 2]))
    assert not is_causal(rows_of([(0, 1), (4, 5)]))
    # What an empty span says does not matter.
    assert is_causal(rows_of([(0, 1), (7, 7)]))


def test_a_table_of_a_second_head_that_is_wrong_is_found(store):
    tables = load_entry(store, "small/q40-kv40").tables
    assert table_findings(tables) == []
    counts = tables.q_num_blocks.clone()
    counts[1, 2, 1] -= 1
    (finding,) = table_findings(dataclasses.replace(tables, q_num_blocks=counts))
    assert re.search("must list as many blocks as kv_num_blocks", finding)


def test_functions_are_run_only_where_that_is_asked(store):
    found = verify_deep(store)
    assert [(difference.entry, difference.compared) for difference in found] == [
        ("large/q1000-kv1000", False),
        ("small/q40-kv40", False),
    ]
    assert found[0].message == (
        "entry 'large/q1000-kv1000': not compared: it comes from the function "
        "masks_of_heads:large, which is only imported with --run-functions"
    )
    assert verify_deep(store, run_functions=True) == []


@pytest.mark.parametrize("cells", [1, 16 * 32, 16 * 32 * 5])
def test_tiles_are_evaluated_some_at_a_time(store, monkeypatch, cells):
    entry = load_entry(store, "small/q40-kv40")
    whole = certify(entry)
    monkeypatch.setattr("maskgen.reference.CHUNK_CELLS", cells)
    in_parts = certify(entry)
    assert (in_parts.findings, in_parts.compared_cells) == ((), whole.compared_cells)

    def change(ends):
        ends[1, 2, 0, 39] -= 1

    assert certify(with_ends(entry, change)).findings == (
        "spans: 1 of the cells compared differ from the formula, "
        "first (b, h, q, kv) = (1, 2, 39, 39)",
    )


def test_order_and_cells_of_one_mask_are_both_told(store):
    entry = load_entry(store, "causal/q100-kv100")
    starts, ends = (
        torch.nn.functional.pad(side, (0, 0, 0, 1), value=5)
        for side in (entry.spans.starts, entry.spans.ends)
    )
    ends[0, 0, 0, 40] -= 1
    wrong = dataclasses.replace(entry, _spans=RowIntervals(starts, ends, 100))
    assert certify(wrong).findings == (
        "spans: an empty span is not (0, 0), first in row (0, 0, 0)",
        "spans: 1 of the cells compared differ from the formula, "
        "first (b, h, q, kv) = (0, 0, 40, 40)",
    )


def test_every_fault_of_a_drawn_batch_is_told(store, monkeypatch):
    entry = load_entry(store, "data/q40-kv50")

    def damaged(spans, BLOCK_SIZE):
        tables = compile_mask(spans, BLOCK_SIZE)
        # Of every block row the first column is left out, and the transposes still list it.
        counts = (tables.kv_num_blocks - 1).clamp(min=0)
        return dataclasses.replace(
            tables, kv_num_blocks=counts, kv_indices=tables.kv_indices.roll(-1, -1)
        )

    monkeypatch.setattr(certificate, "compile_mask", damaged)
    findings = certify(entry).findings
    assert any(re.match("drawn batch: tables: block .* is listed as ", each) for each in findings)
    assert any(re.match("drawn batch: q_num_blocks: must list as many", each) for each in findings)
