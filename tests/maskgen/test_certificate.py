"""Certificates: every invariant is broken once, and what holds is stated."""

import dataclasses
import re

import pytest
import torch

import cache
from maskgen import certificate
from maskgen.build import build
from maskgen.certificate import (
    MAX_DENSE_CELLS,
    Certificate,
    certify,
    is_causal,
    rows_without_key,
    span_findings,
    table_findings,
)
from maskgen.entry import load_entry
from maskgen.families import families
from maskgen.intervals import RowIntervals
from maskgen.spec import read_specs

CAUSAL = {"name": "causal", "family": "causal", "Q_LEN": 100}
WINDOW = {"name": "window", "family": "sliding_window", "window": 300, "Q_LEN": 2500}
DFLASH = {
    "name": "dflash",
    "family": "dflash",
    "kind": "layouts",
    "context": 64,
    "anchors": 8,
    "draft_block_size": 4,
    "draws": 2,
    "answer_starts": [0, 8, 16, 32],
    "answer_ends": [40, 48, 56, 64],
}
DRAWN = ("draws", "answer_starts", "answer_ends")
DATA = {key: value for key, value in DFLASH.items() if key not in DRAWN} | {
    "name": "data",
    "kind": "parametric",
}


def specs_of(*entries):
    return read_specs({"masks": {"BLOCK_SIZE": 16, "entry": list(entries)}})


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    opened = cache.open_store(tmp_path_factory.mktemp("certificate") / "m.zarr", writable=True)
    build(specs_of(CAUSAL, WINDOW, DFLASH, DATA), opened)
    return opened


@pytest.fixture
def causal(store):
    return load_entry(store, "causal/q100-kv100")


def test_a_small_mask_is_compared_in_every_cell(causal):
    found = certify(causal)
    assert isinstance(found, Certificate)
    assert found.findings == ()
    assert found.compared == "every cell, with the formula of causal"
    assert found.compared_cells == 100 * 100
    assert (found.rows_without_key, found.causal) == (0, True)
    assert found.torch == torch.__version__
    assert found.sha256 == causal.sha256


def test_all_layouts_are_compared(store):
    found = certify(load_entry(store, "dflash/ctx64"))
    assert found.findings == ()
    assert found.compared_cells == 32 * 32 * 96
    assert found.causal is False


def test_a_large_mask_is_compared_in_tiles_drawn_by_its_digest(store):
    entry = load_entry(store, "window/q2500-kv2500")
    assert entry.spec.Q_LEN * entry.spec.KV_LEN > MAX_DENSE_CELLS
    found = certify(entry)
    assert found.findings == ()
    assert "tiles drawn by the digest" in found.compared
    assert 24 * 256 <= found.compared_cells <= 73 * 256
    assert certify(entry).compared_cells == found.compared_cells
    other = dataclasses.replace(entry, sha256="0" * 64)
    kinds = entry.tables.block_kinds()
    drawn, again, others = (
        certificate._sampled_tiles((1, 1), kinds, digest)
        for digest in (entry.sha256, entry.sha256, other.sha256)
    )
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn[: len(others)], others[: len(drawn)])
    # One tile of each kind in a row, and the ragged last one.
    assert {int(kinds[tuple(tile)]) for tile in drawn} == {0, 1, 2}
    assert drawn[-1].tolist() == [0, 0, 156, 156]


def test_a_parametric_entry_has_its_bounds_checked(store):
    found = certify(load_entry(store, "data/ctx64"))
    assert found.findings == ()
    assert found.compared == (
        "must within the mask within may, of a drawn batch; every cell, with the formula of dflash"
    )
    assert found.compared_cells == certificate.DRAWN_SAMPLES * 32 * 96
    assert (found.rows_without_key, found.causal) == (None, None)


PARAMETRIC = [
    ("full", 100, 100, {}),
    ("prefix_lm", 90, 100, {}),
    ("document", 100, 100, {"inner": "prefix_lm"}),
    ("document", 40, 100, {}),
    ("document", 100, 40, {"inner": "full"}),
    ("document", 3000, 3000, {"inner": "sliding_window", "window": 40}),
    ("shared_prefix", 100, 100, {}),
    ("shared_prefix", 40, 100, {}),
    ("block_diffusion", 100, 100, {"diffusion_block_size": 7, "variant": "packed"}),
    ("block_diffusion", 100, 100, {"diffusion_block_size": 7}),
    (
        "dflash",
        60,
        130,
        {"draft_block_size": 5, "layer": "sliding", "window": 9, "convention": "vllm"},
    ),
    ("eagle3_ttt", 50, 150, {}),
    ("eagle3_ttt", 50, 150, {"variant": "speculators", "window": 9}),
    ("eagle3_ttt", 50, 150, {"variant": "modelopt"}),
    ("p_eagle", 100, 100, {"num_depths": 4, "window": 11}),
    # As many spans as a row may have.
    ("p_eagle", 50, 50, {"num_depths": 32}),
    ("tree", 60, 100, {"max_depth": 6}),
]


def parametric(tmp_path, family, Q_LEN, KV_LEN, params):
    table = {"name": "x", "family": family, "kind": "parametric", **params}
    specs = specs_of({**table, "Q_LEN": Q_LEN, "KV_LEN": KV_LEN})
    opened = cache.open_store(tmp_path / "p.zarr", writable=True)
    build(specs, opened)
    return load_entry(opened, specs[0].name)


@pytest.mark.parametrize(("family", "Q_LEN", "KV_LEN", "params"), PARAMETRIC)
def test_the_mask_of_a_drawn_batch_is_compared(tmp_path, family, Q_LEN, KV_LEN, params):
    entry = parametric(tmp_path, family, Q_LEN, KV_LEN, params)
    found = certify(entry)
    assert found.findings == ()
    assert found.compared_cells > 0
    drawn = certificate._drawn(entry)
    again = certificate._drawn(entry)
    assert drawn.spans.equals(again.spans)
    # What is drawn makes a difference from sample to sample, wherever a batch can.
    B = certificate.DRAWN_SAMPLES if drawn.params else 1
    assert B == drawn.spans.B


def test_every_family_with_runtime_parameters_draws_them_all():
    drawn = {name: set() for name, family in families.items() if family.draw_fn}
    for name, Q_LEN, KV_LEN, params in PARAMETRIC:
        family = families[name]
        values = family.draw("5" * 64, 3, Q_LEN, KV_LEN, **params)
        family.check(Q_LEN, KV_LEN, {**params, **values})
        assert all(len(value.unique(dim=0)) > 1 for value in values.values()), name
        drawn[name] |= set(values)
    for name, family in families.items():
        # A document's offsets say no more than its ids.
        said = {"doc_offsets"} if name == "document" else set()
        assert set(family.runtime_params) - said == drawn.get(name, set()), name


def wrong_spans(family):
    def spans(*sizes, **params):
        starts, ends = family.span_fn(*sizes, **params)
        return starts, (ends - 1).clamp(min=starts)

    return spans


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lambda family: {"span_fn": wrong_spans(family)},
            "drawn batch: spans: .* of the cells compared differ from the formula",
        ),
        (
            lambda family: {"bounds_fn": lambda *s, **p: (family.bounds_fn(*s, **p)[0],) * 2},
            "bounds: the mask of a drawn batch is not within may",
        ),
        (
            lambda family: {"bounds_fn": lambda *s, **p: (family.bounds_fn(*s, **p)[1],) * 2},
            "bounds: must is not within the mask of a drawn batch",
        ),
    ],
)
@pytest.mark.parametrize("case", PARAMETRIC[:4], ids=lambda case: case[0])
def test_a_wrong_family_is_found_by_its_drawn_batch(tmp_path, monkeypatch, case, fault, message):
    entry = parametric(tmp_path, *case)
    family = families[case[0]]
    wrong = dataclasses.replace(family, **fault(family))
    monkeypatch.setattr("maskgen.named_family.families", {case[0]: wrong})
    assert any(re.search(message, finding) for finding in certify(entry).findings)


def test_bounds_that_cross_are_found(store, monkeypatch):
    entry = load_entry(store, "data/ctx64")
    family = families["dflash"]
    swapped = dataclasses.replace(
        family, bounds_fn=lambda *sizes, **params: family.bounds_fn(*sizes, **params)[::-1]
    )
    monkeypatch.setattr("maskgen.named_family.families", {"dflash": swapped})
    assert "bounds: must is not within may, first in row (0, 0, 0)" in certify(entry).findings


def spans(*rows, KV_LEN=9):
    """Rows of (start, end) pairs, as many in each, as RowIntervals."""
    table = torch.tensor(rows, dtype=torch.int32)
    return RowIntervals(
        table[..., 0].T[None, None].contiguous(), table[..., 1].T[None, None].contiguous(), KV_LEN
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[(0, 2), (3, 4)], [(0, 0), (3, 4)]], r"before a non-empty one, first in row \(0, 0, 1\)"),
        ([[(0, 2), (5, 5)]], r"not \(0, 0\), first in row \(0, 0, 0\)"),
        ([[(0, 2), (2, 4)]], "touch, overlap or descend"),
        ([[(5, 7), (0, 2)]], "touch, overlap or descend"),
    ],
)
def test_spans_out_of_canonical_order_are_found(rows, message):
    (finding,) = span_findings(spans(*rows))
    assert re.search(message, finding)


def test_canonical_spans_have_no_finding():
    assert span_findings(spans([(0, 2), (3, 9)], [(1, 2), (0, 0)], [(0, 0), (0, 0)])) == []


def changed(entry, field, place, value):
    table = getattr(entry.tables, field).clone()
    table[place] = value
    return dataclasses.replace(entry.tables, **{field: table})


@pytest.mark.parametrize(
    ("field", "place", "value", "finding"),
    [
        ("full_kv_indices", (0, 0, 3, 1), 0, "indices of a row must ascend, but found row 3"),
        ("q_indices", (0, 0, 2, 0), 3, "q_indices: must be the transpose of kv_indices"),
        ("full_q_num_blocks", (0, 0, 0), 4, "full_q_num_blocks: must list as many blocks"),
        ("kv_indices", (0, 0, 3, 0), 2, "both full and partial, but found block .* (0, 0, 3, 2)"),
    ],
)
def test_tables_that_break_an_invariant_are_found(causal, field, place, value, finding):
    assert table_findings(causal.tables) == []
    (found,) = table_findings(changed(causal, field, place, value))
    assert re.search(finding.replace("(", r"\(").replace(")", r"\)"), found)


def test_spans_that_differ_from_the_formula_are_found(causal):
    ends = causal.spans.ends.clone()
    ends[0, 0, 0, 40] -= 1
    wrong = dataclasses.replace(causal, _spans=RowIntervals(causal.spans.starts, ends, 100))
    (finding,) = certify(wrong).findings
    assert "1 of the cells compared differ" in finding
    assert "(b, h, q, kv) = (0, 0, 40, 40)" in finding


def test_a_block_of_the_wrong_kind_is_found(causal):
    # Row 1 sees block 0 in full; here it is listed as partial, both ways round.
    tables = {name: table.clone() for name, table in causal.tables.as_dict().items()}
    tables["full_kv_num_blocks"][0, 0, 1] = 0
    tables["kv_num_blocks"][0, 0, 1] = 2
    tables["kv_indices"][0, 0, 1, :2] = torch.tensor([0, 1])
    tables["full_q_num_blocks"][0, 0, 0] -= 1
    tables["full_q_indices"][0, 0, 0] = torch.tensor([2, 3, 4, 5, 0, 0, 0])
    tables["q_num_blocks"][0, 0, 0] = 3
    tables["q_indices"][0, 0, 0, :3] = torch.tensor([0, 1, 6])
    wrong = dataclasses.replace(causal, _tables=dataclasses.replace(causal.tables, **tables))
    (finding,) = certify(wrong).findings
    assert finding == (
        "tables: block (b, h, row, column) = (0, 0, 1, 0) is listed as partial and is full"
    )


def test_rows_without_keys_are_counted_and_named():
    mask = spans([(0, 2)], [(0, 0)], [(4, 4)], [(8, 9)])
    assert rows_without_key(mask) == ([(0, 0, 1), (0, 0, 2)], 2)


def test_causality_is_stated_as_it_is():
    assert is_causal(spans([(0, 1)], [(0, 0)], [(1, 3)]))
    assert not is_causal(spans([(0, 1)], [(2, 3)]))
