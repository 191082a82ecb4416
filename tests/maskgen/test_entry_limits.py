"""Entries of a cache that anyone may have made: what is just taken, and what is refused and how."""

import dataclasses
import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import cache
from maskgen.build import build, build_entry
from maskgen.entry import check_size, load_entry
from maskgen.errors import MaskSpecError, StaleMaskError, UnsupportedMaskError
from maskgen.spec import read_specs

LAYOUTS = {
    "name": "draft",
    "family": "dflash",
    "kind": "layouts",
    "context": 16,
    "anchors": 2,
    "draft_block_size": 4,
    "draws": 1,
    "answer_starts": [0, 4],
    "answer_ends": [12],
}
WINDOW = {"name": "w", "family": "sliding_window", "window": 5, "Q_LEN": 20, "KV_LEN": 30}


def specs_of(*entries):
    return read_specs({"masks": {"BLOCK_SIZE": [16, 32], "entry": list(entries)}})


def published(tmp_path, built_from, **changes):
    """A cache of one entry, some of its parts replaced, with sound digests."""
    data = dataclasses.replace(build_entry(built_from), **changes)
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    store.publish([data])
    return store


def with_spare_slot(spans):
    """One span slot more in each row, and nobody needs it."""
    room = [(0, 0), (0, 0), (0, 1), (0, 0)]
    return {**spans, **{name: np.pad(spans[name], room) for name in ("starts", "ends")}}


@pytest.mark.parametrize(("table", "K", "most"), [(WINDOW, 2, 1), (LAYOUTS, 3, 2)])
def test_more_spans_than_the_family_has_are_refused(tmp_path, table, K, most):
    (spec,) = specs_of(table)
    data = build_entry(spec)
    store = published(
        tmp_path, spec, attrs={**data.attrs, "K": K}, spans=with_spare_slot(data.spans)
    )
    with pytest.raises(MaskSpecError) as caught:
        load_entry(store, spec.name)
    rule = f"must be {most}, as the family has it"
    assert str(caught.value) == f"attribute K of '{spec.name}' = {K}: {rule}"


def test_a_static_mask_has_the_spans_that_it_needs(tmp_path):
    (spec,) = specs_of({"name": "s", "family": "sink_window", "sinks": 0, "window": 3, "Q_LEN": 9})
    assert load_entry(published(tmp_path, spec), spec.name).spans.K == 1


def test_layouts_have_room_for_the_familys_spans(tmp_path):
    (spec,) = specs_of(LAYOUTS)
    data = build_entry(spec)
    narrow = {**data.spans, **{name: data.spans[name][:, :, 1:] for name in ("starts", "ends")}}
    store = published(tmp_path, spec, attrs={**data.attrs, "K": 1}, spans=narrow)
    with pytest.raises(MaskSpecError, match="= 1: must be 2, as the family has it"):
        load_entry(store, spec.name)


def test_as_many_spans_as_there_may_be(tmp_path):
    (spec,) = specs_of(
        {"name": "p", "family": "p_eagle", "kind": "parametric", "num_depths": 32, "Q_LEN": 40}
    )
    store = published(tmp_path, spec)
    assert load_entry(store, spec.name).bucket.K == 32
    store = published(tmp_path, spec, attrs={**build_entry(spec).attrs, "K": 33})
    with pytest.raises(MaskSpecError, match="attribute K of 'p/q40-kv40' = 33: must be at most 32"):
        load_entry(store, spec.name)


@pytest.mark.parametrize(
    ("table", "array", "change", "message"),
    [
        (WINDOW, "starts", lambda a: a[..., :-1], "array starts of .* = .1, 1, 1, 19.: must be "),
        (WINDOW, "ends", lambda a: a[..., :-1], r"array ends of .*: must be \[1, 1, 1, 20\]"),
        (LAYOUTS, "anchors", lambda a: a[:, :1], "attribute N of .* = 2: must be 1, as its arr"),
        (LAYOUTS, "n_valid", lambda a: a[:1], r"array n_valid of .* = \[1\]: must be \[2, "),
    ],
)
def test_an_array_of_another_shape_is_refused(tmp_path, table, array, change, message):
    (spec,) = specs_of(table)
    data = build_entry(spec)
    store = published(tmp_path, spec, spans={**data.spans, array: change(data.spans[array])})
    with pytest.raises(MaskSpecError, match=message):
        load_entry(store, spec.name)


@pytest.mark.parametrize("count", ["B", "H", "N", "K"])
def test_a_count_that_is_missing_is_named(tmp_path, count):
    (spec,) = specs_of(LAYOUTS)
    attrs = {name: value for name, value in build_entry(spec).attrs.items() if name != count}
    store = published(tmp_path, spec, attrs=attrs)
    with pytest.raises(MaskSpecError) as caught:
        load_entry(store, spec.name)
    rule = "must be an integer of at least 1"
    assert str(caught.value) == f"attribute {count} of 'draft/ctx16' = None: {rule}"


@pytest.mark.parametrize("layout", [0, 1])
def test_the_anchors_of_every_layout_are_checked(tmp_path, layout):
    (spec,) = specs_of(LAYOUTS)
    spans = dict(build_entry(spec).spans)
    spans["anchors"] = spans["anchors"].copy()
    spans["anchors"][layout, 1] = 16
    with pytest.raises(MaskSpecError, match=r"^'draft/ctx16': anchors = 16: each .* 0 to 15$"):
        load_entry(published(tmp_path, spec, spans=spans), spec.name)
    spans["anchors"][layout] = [14, 15]
    assert load_entry(published(tmp_path, spec, spans=spans), spec.name).num_layouts == 2


def test_the_rules_of_another_revision_are_not_known(tmp_path):
    (spec,) = specs_of(WINDOW)
    record = {**spec.to_json(), "revision": 2, "params": {"windw": 0}}
    assert load_entry(published(tmp_path, spec, spec=record), spec.name).spec.revision == 2
    with pytest.raises(MaskSpecError, match="'w/q20-kv30': windw = 0: is no parameter"):
        load_entry(published(tmp_path, spec, spec={**record, "revision": 1}), spec.name)


def test_an_entry_is_told_apart_by_its_version_and_its_digest(tmp_path):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    (window,) = specs_of(WINDOW)
    (wider,) = specs_of({**WINDOW, "window": 6})
    first, second = build([window], store).version, build([wider], store).version
    old, new = load_entry(store, "w/q20-kv30", first[:9]), load_entry(store, "w/q20-kv30")
    assert (old.version, new.version) == (first, second)
    assert [entry.spec.params["window"] for entry in (old, new)] == [5, 6]
    for entry in (old, new):
        info = store.version(entry.version).entries[entry.name]
        assert (entry.sha256, dict(entry.attrs)) == (info.sha256, dict(info.attrs))
        assert len(entry.sha256) == 64
    assert old.sha256 != new.sha256


def test_a_parametric_entry_says_what_computes_its_arrays(tmp_path):
    (spec,) = specs_of({"name": "f", "family": "full", "kind": "parametric", "Q_LEN": 9})
    entry = load_entry(published(tmp_path, spec), spec.name)
    for what in ("spans", "tables"):
        with pytest.raises(UnsupportedMaskError) as caught:
            getattr(entry, what)
        assert str(caught.value) == (
            f"{what} of 'f/q9-kv9' are asked for, but a parametric entry has none: they depend "
            "on the batch; compute them with spans_into and tables_into"
        )
    with pytest.raises(UnsupportedMaskError):
        entry.chosen_mask_mod()


def test_a_stale_mask_says_which_code_it_was_built_from(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = tmp_path / "stale_limits.py"
    file.write_text("def mask(b, h, q, kv):\n    return q >= kv\n")
    (spec,) = specs_of({"name": "m", "mask_mod": "stale_limits:mask", "Q_LEN": 9})
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    built = hashlib.sha256(file.read_bytes()).hexdigest()
    try:
        build([spec], store)
    finally:
        sys.modules.pop("stale_limits", None)
    assert store.version().entries[spec.name].attrs["source"] == built
    file.write_text("changed\n")
    now = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(StaleMaskError) as caught:
        load_entry(store, spec.name)
    assert str(caught.value).startswith(
        "mask 'm/q9-kv9' was built from stale_limits:mask, and that module has changed since "
        f"(SHA-256 {built[:12]}, now {now[:12]}); "
    )
    assert f"--cache {Path(store.location)}" in str(caught.value)


def test_blocks_are_counted_over_rows_columns_batch_and_heads():
    (spec,) = specs_of(WINDOW)
    # 16 x 32 blocks: rows 2**13, columns 2**12, so two of these are just taken.
    spec = dataclasses.replace(spec, Q_LEN=2**17, KV_LEN=2**17)
    for B, H in ((2, 1), (1, 2)):
        check_size(spec, B, H)
    for B, H in ((3, 1), (1, 3), (2, 2)):
        with pytest.raises(MaskSpecError) as caught:
            check_size(spec, B, H)
        assert str(caught.value) == (
            f"blocks of 'w/q20-kv30' = {B * H * 2**25}: "
            "must be at most 2**26 to be looked into; load the entry to use it"
        )
    with pytest.raises(MaskSpecError, match=f"^blocks of .* = {2 * (2**13 + 1) * 2**12}:"):
        check_size(dataclasses.replace(spec, Q_LEN=2**17 + 1), 2)


def test_a_mask_of_a_batch_and_heads_keeps_both(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "heads_limits.py").write_text(
        "def mask(b, h, q, kv):\n    return (kv <= q) & (kv >= 2 * b) & (q - kv <= 3 + 4 * h)\n"
    )
    table = {"name": "m", "mask_mod": "heads_limits:mask", "Q_LEN": 40, "KV_LEN": 33}
    (spec,) = specs_of({**table, "B": 2, "H": 3})
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    try:
        build([spec], store)
        entry = load_entry(store, spec.name)
    finally:
        sys.modules.pop("heads_limits", None)
    wanted = torch.tensor(
        [
            [
                [
                    [kv <= q and kv >= 2 * b and q - kv <= 3 + 4 * h for kv in range(33)]
                    for q in range(40)
                ]
                for h in range(3)
            ]
            for b in range(2)
        ]
    )
    assert torch.equal(entry.spans.dense(), wanted)
    attrs = {name: entry.attrs[name] for name in ("B", "H", "K", "cells", "empty_rows")}
    blind = int((~wanted.any(-1)).sum())
    assert blind > 0
    assert attrs == {"B": 2, "H": 3, "K": 1, "cells": int(wanted.sum()), "empty_rows": blind}
    padded = torch.nn.functional.pad(wanted, (0, 31, 0, 8)).view(2, 3, 3, 16, 2, 32)
    kinds = (padded.sum((3, 5)) > 0).int() + (padded.sum((3, 5)) == 512).int()
    assert torch.equal(entry.tables.block_kinds().int(), kinds)
    counts = [entry.attrs[name] for name in ("empty", "partial", "full")]
    assert counts == kinds.flatten().bincount(minlength=3).tolist()
