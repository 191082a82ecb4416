"""A build's report, its counts and bounds by hand, and deep verification entry by entry."""

import dataclasses
import time

import pytest
import torch

import cache
from cache.errors import StoreWriteError, VersionNotFoundError
from maskgen.build import build, build_entry, layout_params, spec_spans
from maskgen.errors import MaskSpecError
from maskgen.families import families
from maskgen.families.dflash_layouts import dflash_layouts
from maskgen.holdings import Copies, already_built, entries_by_spec, find_version, readable_versions
from maskgen.spec import read_specs
from maskgen.verify import Difference, verify_deep

CAUSAL = {"name": "causal", "family": "causal", "Q_LEN": [40, 32], "KV_LEN": [50, 64]}
FULL = {"name": "full", "family": "full", "kind": "parametric", "Q_LEN": 40, "KV_LEN": 50}
DRAFT = {
    "name": "draft",
    "family": "dflash",
    "kind": "layouts",
    "context": 24,
    "anchors": 3,
    "draft_block_size": 4,
    "draws": 2,
    "answer_starts": [0, 8],
    "answer_ends": [20],
}


def specs_of(*entries):
    return read_specs({"masks": {"BLOCK_SIZE": [16, 32], "entry": list(entries)}})


@pytest.fixture
def store(tmp_path):
    return cache.open_store(tmp_path / "m.zarr", writable=True)


def test_a_report_has_the_order_of_the_specs_and_true_times(store):
    specs, seen = specs_of(DRAFT, CAUSAL, FULL), []
    began = time.perf_counter()
    report = build(specs, store, progress=lambda *step: seen.append(step))
    elapsed_ms = (time.perf_counter() - began) * 1e3
    names = ["draft/ctx24", "causal/q40-kv50", "causal/q32-kv64", "full/q40-kv50"]
    assert [row.name for row in report.rows] == names
    assert seen == [(name, done, 4) for done, name in enumerate(names, start=1)]
    times = [row.build_ms for row in report.rows]
    assert min(times) > 0
    assert 1 < sum(times) < elapsed_ms
    for row, spec in zip(report.rows, specs, strict=True):
        assert (row.kind, row.Q_LEN, row.KV_LEN) == (spec.kind, spec.Q_LEN, spec.KV_LEN)
        assert row.bytes == store.version().entries[row.name].nbytes
        assert not row.reused
    assert report.version == store.current
    assert all(row.reused for row in build(specs, store).rows)


def test_the_counts_of_a_static_mask_by_hand(store):
    data = build_entry(specs_of(CAUSAL)[0])
    # 40 rows of 16, 50 columns of 32: rows 0-15 see part of column 0 only, rows 16-31 all but the
    # last cells of it; row 32 on sees 33 cells, and the last row of blocks is ragged.
    assert dict(data.attrs) == {
        "B": 1,
        "H": 1,
        "K": 1,
        "full": 0,
        "partial": 4,
        "empty": 2,
        "cells": 40 * 41 // 2,
        "empty_rows": 0,
    }
    assert data.name == "causal/q40-kv50"
    assert data.spans["ends"].flatten().tolist() == list(range(1, 41))


def test_the_bounds_of_a_parametric_mask_by_hand():
    (data,) = (build_entry(spec) for spec in specs_of(FULL))
    # Every batch sees key 0, so column 0 in part; the ragged row and column are never full.
    assert dict(data.attrs) == {
        "K": 1,
        "must": {"full": 0, "partial": 3, "empty": 3},
        "may": {"full": 2, "partial": 4, "empty": 0},
    }
    assert (dict(data.spans), dict(data.tables)) == ({}, {})


def test_layouts_are_drawn_from_all_that_a_spec_says():
    (spec,) = specs_of(DRAFT)
    params = layout_params(spec)
    key = bytes.fromhex(spec.digest)
    anchors, n_valid = dflash_layouts(24, 3, 4, 2, [(0, 19), (8, 19)], key)
    assert torch.equal(params["anchors"], anchors)
    assert torch.equal(params["n_valid"], n_valid)
    data = build_entry(spec)
    assert {name: data.attrs[name] for name in "BHKN"} == {"B": 4, "H": 1, "K": 2, "N": 3}
    assert data.spans["anchors"].tolist() == anchors.tolist()
    wanted = families["dflash"].intervals(
        12, 36, draft_block_size=4, anchors=anchors, n_valid=n_valid
    )
    assert torch.equal(spec_spans(spec, params).dense(), wanted.dense())
    assert data.attrs["cells"] == int(wanted.dense().sum())


def test_the_installed_revision_is_named():
    spec = dataclasses.replace(specs_of(FULL)[0], kind="static", revision=3)
    with pytest.raises(MaskSpecError) as caught:
        build_entry(spec)
    assert str(caught.value) == (
        "revision of 'full/q40-kv50' = 3: must be the installed one of family full, 1"
    )


def changed(store, entry, **changes):
    """Publish the current version's entries, of which one has other parts."""
    entries = [store.load(name).to_data() for name in store.version().entries]
    entries = [
        dataclasses.replace(data, **{k: change(getattr(data, k)) for k, change in changes.items()})
        if data.name == entry
        else data
        for data in entries
    ]
    return store.publish(entries)


def test_deep_verification_looks_into_every_entry(store):
    build(specs_of(CAUSAL, FULL, DRAFT), store)
    sound, seen = store.current, []
    assert verify_deep(store, progress=lambda *step: seen.append(step)) == []
    names = list(store.version().entries)
    assert seen == [(name, done, 4) for done, name in enumerate(names, start=1)]
    changed(store, "causal/q32-kv64", attrs=lambda attrs: {**attrs, "cells": 7})
    changed(store, "full/q40-kv50", attrs=lambda attrs: {**attrs, "K": 2})
    found = verify_deep(store)
    assert [difference.entry for difference in found] == ["causal/q32-kv64", "full/q40-kv50"]
    assert all(difference.compared for difference in found)
    assert "'cells': 7" in found[0].problem.partition(", built again they are ")[0]
    assert f"'cells': {32 * 33 // 2}" in found[0].problem.partition("built again they are ")[2]
    assert found[1].problem == (
        "attribute K of 'full/q40-kv50' = 2: must be 1, as the family has it"
    )
    # The version that is asked for, by a prefix.
    assert verify_deep(store, sound[:8]) == []


def test_a_bound_that_was_published_wrong_is_found(store):
    build(specs_of(FULL), store)
    wrong = {"full": 1, "partial": 2, "empty": 3}
    changed(store, "full/q40-kv50", attrs=lambda attrs: {**attrs, "must": wrong})
    (found,) = verify_deep(store)
    assert found.problem.startswith("attributes are ")
    assert found.message == f"entry 'full/q40-kv50': {found.problem}"


def test_arrays_that_are_too_many_are_named(store):
    build(specs_of(CAUSAL), store)

    def more(spans):
        return {**spans, "anchors": spans["starts"]}

    changed(store, "causal/q40-kv50", spans=more)
    (found,) = verify_deep(store)
    assert found.entry == "causal/q40-kv50"
    lists = found.problem.partition(", built again they are ")
    assert lists[0].startswith("arrays are ['anchors', 'ends', ")
    assert lists[2].startswith("['ends', ")


def test_each_array_that_differs_is_named(store):
    build(specs_of(DRAFT), store)

    def other(spans):
        anchors = spans["anchors"].copy()
        anchors[3] = [8, 9, 10] if anchors[3].tolist() != [8, 9, 10] else [8, 9, 11]
        return {**spans, "anchors": anchors}

    changed(store, "draft/ctx24", spans=other)
    problems = [difference.problem for difference in verify_deep(store)]
    assert "array anchors is another one when built again" in problems
    # The spans are those of the anchors that were drawn, so they differ from the formula, too.
    assert any(problem.startswith("spans: ") for problem in problems)
    assert "array starts is another one when built again" not in problems


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (
            {"revision": 4},
            "not compared: built with revision 4 of full, installed is revision 1; build again",
        ),
        ({"family": "later"}, "not compared: family 'later' is not installed"),
    ],
)
def test_what_cannot_be_built_again_is_not_compared(store, record, problem):
    build(specs_of(FULL, CAUSAL), store)
    changed(store, "full/q40-kv50", spec=lambda spec: {**spec, **record})
    assert verify_deep(store) == [
        Difference(entry="full/q40-kv50", problem=problem, compared=False)
    ]


def test_the_claims_of_heads_are_checked_before_anything_is_read(store):
    build(specs_of(CAUSAL), store)
    changed(store, "causal/q32-kv64", attrs=lambda attrs: {**attrs, "H": 2**24 + 1})
    (found,) = verify_deep(store)
    assert found.problem.startswith(f"blocks of 'causal/q32-kv64' = {2**26 + 4}: must be at most")
    changed(store, "causal/q32-kv64", attrs=lambda attrs: {**attrs, "B": 0, "H": 1})
    (found,) = verify_deep(store)
    assert found.problem == (
        "attribute B of 'causal/q32-kv64' = 0: must be an integer of at least 1"
    )


def test_entries_are_found_by_what_they_are_in_the_newest_version(store):
    skipped = []
    old = build(specs_of(CAUSAL, DRAFT), store).version
    new = build(specs_of(CAUSAL), store).version
    current = build(specs_of(FULL), store).version
    copies = Copies(store, lambda version, error: skipped.append(version))
    digest = {spec.name: spec.digest for spec in specs_of(CAUSAL, DRAFT, FULL)}
    for name, version in (
        ("draft/ctx24", old),
        ("causal/q40-kv50", new),
        ("full/q40-kv50", current),
    ):
        found = copies.find(digest[name])
        assert (found[0], found[1].name) == (version, name)
    assert copies.find("0" * 64) is None
    assert skipped == []
    assert [v.id for v in readable_versions(store, None)] == [current, new, old]
    held_by = entries_by_spec(store.version(old))
    assert {info.name for info in held_by.values()} == {
        "causal/q32-kv64",
        "causal/q40-kv50",
        "draft/ctx24",
    }
    assert find_version(store, [])[0].id == current


def refusal():
    return StoreWriteError("there", "there cannot be written: no", 30)


def test_a_cache_that_cannot_be_written_reports_on_the_version_that_it_has(store):
    old = build(specs_of(CAUSAL, DRAFT), store).version
    build(specs_of(FULL), store)
    report = already_built(specs_of(DRAFT, CAUSAL), store, refusal())
    assert report.version == old
    assert [row.name for row in report.rows] == [
        "draft/ctx24",
        "causal/q40-kv50",
        "causal/q32-kv64",
    ]
    assert all(row.reused and row.build_ms > 0 for row in report.rows)
    assert [row.bytes for row in report.rows] == [
        store.version(old).entries[row.name].nbytes for row in report.rows
    ]


def test_a_cache_that_cannot_be_written_and_lacks_masks_names_them(store, tmp_path):
    build(specs_of(CAUSAL, DRAFT), store)
    with pytest.raises(StoreWriteError) as caught:
        already_built(specs_of({**DRAFT, "draws": 3}, CAUSAL, FULL), store, refusal())
    assert str(caught.value) == (
        "there cannot be written: no; it lacks draft/ctx24, full/q40-kv50, as the config has it"
    )
    assert (caught.value.file, caught.value.errno) == ("there", 30)
    empty = cache.open_store(tmp_path / "e.zarr", writable=True)
    with pytest.raises(StoreWriteError, match="there cannot be written: no; ") as caught:
        already_built(specs_of(FULL), empty, refusal())
    assert isinstance(caught.value.__cause__, VersionNotFoundError)
    assert str(caught.value.__cause__) in str(caught.value)
