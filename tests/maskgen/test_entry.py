"""Entries: what is loaded is what was built, or a clear refusal."""

import dataclasses
import tracemalloc

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import cache
import maskgen
from cache.errors import EntryNotFoundError
from maskgen.block_mask import to_block_mask
from maskgen.buckets import Bucket
from maskgen.build import build, build_entry
from maskgen.compile import compile_mask
from maskgen.entry import check_size, load_entry
from maskgen.errors import LayoutInvariantError, MaskSpecError, UnsupportedMaskError
from maskgen.intervals import RowIntervals
from maskgen.picture import entry_kinds
from maskgen.spec import read_specs
from maskgen.verify import verify_deep

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
ENTRIES = [
    DFLASH,
    {key: value for key, value in DFLASH.items() if key not in DRAWN}
    | {"name": "data", "kind": "parametric"},
    {"name": "window", "family": "sliding_window", "window": 9, "Q_LEN": 70, "KV_LEN": 90},
]
SPECS = read_specs({"masks": {"BLOCK_SIZE": [16, 32], "entry": ENTRIES}})


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    opened = cache.open_store(tmp_path_factory.mktemp("entry") / "masks.zarr", writable=True)
    build(SPECS, opened)
    return opened


def test_a_static_entry(store):
    entry = load_entry(store, "window/q70-kv90")
    assert (entry.name, entry.kind, entry.num_layouts) == ("window/q70-kv90", "static", 1)
    assert entry.spec == SPECS[2]
    assert entry.version == store.current
    assert entry.bucket == Bucket(70, 90, (16, 32), 1)
    assert dict(entry.params) == {}
    wanted = [[0 <= q - kv < 9 for kv in range(90)] for q in range(70)]
    assert entry.spans.dense()[0, 0].tolist() == wanted
    assert entry.spans.is_canonical


def test_the_mask_mod_of_an_entry_is_the_formula_where_that_is_faster(store):
    entry = load_entry(store, "window/q70-kv90")
    block_mask = to_block_mask(entry.tables, entry.spans, mask_mod=entry.chosen_mask_mod("cpu"))
    assert block_mask.mask_mod.__name__ == "sliding_window_mask_mod"
    dense = create_mask(block_mask.mask_mod, 1, 1, 70, 90, device="cpu")
    assert torch.equal(dense, entry.spans.dense())
    assert load_entry(store, "dflash/ctx64").chosen_mask_mod() is None


def test_the_formula_of_another_revision_is_not_chosen(store):
    entry = load_entry(store, "window/q70-kv90")
    for other in ({"revision": 2}, {"family": "module:function"}):
        spec = dataclasses.replace(entry.spec, **other)
        assert dataclasses.replace(entry, spec=spec).chosen_mask_mod() is None


def test_tables_are_those_of_the_spans(store):
    for name in ("window/q70-kv90", "dflash/ctx64"):
        entry = load_entry(store, name)
        wanted = compile_mask(entry.spans, (16, 32)).as_dict()
        for field, table in entry.tables.as_dict().items():
            assert torch.equal(table, wanted[field]), field


def test_a_layouts_entry(store):
    entry = load_entry(store, "dflash/ctx64")
    assert entry.kind == "layouts"
    assert entry.num_layouts == entry.spans.B == entry.tables.B == 32
    assert entry.bucket == Bucket(32, 96, (16, 32), 2)
    assert entry.bucket.context == 64
    assert entry.params["anchors"].shape == (32, 8)
    assert entry.params["n_valid"].tolist() == [8] * 24 + [7] * 2 + [8] * 6
    assert entry.params["anchors"].dtype == torch.int32


def test_a_parametric_entry_has_a_bucket_and_no_arrays(store):
    entry = load_entry(store, "data/ctx64")
    assert (entry.kind, entry.num_layouts) == ("parametric", 1)
    assert entry.bucket == Bucket(32, 96, (16, 32), 2)
    for field in ("spans", "tables"):
        with pytest.raises(UnsupportedMaskError, match=f"{field} of 'data/ctx64'"):
            getattr(entry, field)


def test_tensors_are_the_callers_own(store):
    first = load_entry(store, "dflash/ctx64")
    first.params["anchors"].zero_()
    first.spans.starts.fill_(1)
    again = load_entry(store, "dflash/ctx64")
    assert again.params["anchors"].any()
    assert again.spans.is_canonical or again.spans.equals(again.spans.canonical())
    assert not torch.equal(first.spans.starts, again.spans.starts)


def test_an_entry_of_an_older_version_still_loads(store):
    old = store.current
    build([SPECS[2]], store)
    try:
        assert load_entry(store, "dflash/ctx64", old).version == old
        with pytest.raises(EntryNotFoundError, match="no entry 'dflash/ctx64'"):
            load_entry(store, "dflash/ctx64")
    finally:
        store.use(old)


def tampered(tmp_path, mask_spec, **changes):
    """Publish an entry whose digests are right and whose contents do not belong together."""
    data = build_entry(mask_spec)
    data = dataclasses.replace(
        data, **{k: change(getattr(data, k)) for k, change in changes.items()}
    )
    target = cache.open_store(tmp_path / "bad.zarr", writable=True)
    target.publish([data])
    return target


def put(name, value):
    """The first number of an array replaced."""

    def change(arrays):
        table = arrays[name].copy()
        table.flat[0] = value
        return {**arrays, name: table}

    return change


def other_family(name):
    return lambda spec: {**spec, "family": name}


def with_params(params):
    return lambda spec: {**spec, "params": {**spec["params"], **params}}


def foreign_columns(tables):
    """The q tables of another mask of the same shape."""
    other = compile_mask(maskgen.sliding_window(70, 90, window=40), (16, 32)).pack()
    mine = {name: table.numpy() for name, table in other.items() if name.startswith("q_")}
    return {**tables, **mine}


@pytest.mark.parametrize(
    ("spec", "field", "change", "error", "message"),
    [
        (2, "attrs", lambda a: {**a, "K": 2}, MaskSpecError, "array starts .* must be"),
        (2, "attrs", lambda a: {**a, "K": 0}, MaskSpecError, "attribute K .* at least 1"),
        (2, "attrs", lambda a: {**a, "B": "1"}, MaskSpecError, "attribute B"),
        (2, "attrs", lambda a: {k: a[k] for k in "BH"}, MaskSpecError, "attribute K .* = None"),
        (2, "attrs", lambda a: {**a, "B": 1 << 40}, MaskSpecError, "array starts"),
        (2, "spans", lambda s: {"starts": s["starts"]}, MaskSpecError, "array ends .* = None"),
        (2, "spans", lambda s: {**s, "ends": s["ends"] + 90}, MaskSpecError, "must lie inside"),
        (2, "tables", lambda t: {}, LayoutInvariantError, "must be given"),
        (
            2,
            "tables",
            lambda t: {**t, "kv_indices": t["kv_indices"] + 9},
            LayoutInvariantError,
            "in",
        ),
        (2, "spec", lambda s: {**s, "KV_LEN": 40}, MaskSpecError, "must lie inside"),
        (2, "spec", lambda s: {**s, "more": 1}, MaskSpecError, "must have the fields"),
        (0, "attrs", lambda a: {**a, "B": 4}, MaskSpecError, "its 32 layouts"),
        (0, "attrs", lambda a: {**a, "N": 9}, MaskSpecError, "attribute N"),
        (0, "spans", lambda s: {**s, "n_valid": s["n_valid"][:4]}, MaskSpecError, "array n_valid"),
        (0, "spans", put("anchors", 64), MaskSpecError, "anchors = 64: .* 0 to 63"),
        (0, "spans", put("anchors", -1), MaskSpecError, "anchors = -1: .* 0 to 63"),
        (0, "spans", put("anchors", 2**31 - 1), MaskSpecError, "anchors = 2147483647"),
        (0, "spans", put("anchors", 40), MaskSpecError, "anchors = .*must ascend"),
        (0, "spans", put("n_valid", 9), MaskSpecError, "n_valid = 9: each must be 0 to 8"),
        (0, "spans", put("n_valid", -1), MaskSpecError, "n_valid = -1: each must be at least 0"),
        (0, "spec", other_family("causal"), MaskSpecError, "no parameter of family 'causal'"),
        (0, "spec", other_family("module:function"), MaskSpecError, "kind .* must be static"),
        (1, "attrs", lambda a: {**a, "K": 3}, MaskSpecError, "attribute K .* = 3: must be 2"),
        (1, "attrs", lambda a: {**a, "K": 1}, MaskSpecError, "attribute K .* = 1: must be 2"),
        (1, "attrs", lambda a: {**a, "K": 2**40}, MaskSpecError, "attribute K .* at most 32"),
        (1, "spec", lambda s: {**s, "KV_LEN": 32}, MaskSpecError, "KV_LEN = 32"),
        (1, "spec", lambda s: {**s, "Q_LEN": 30}, MaskSpecError, "Q_LEN = 30"),
        (2, "spec", with_params({"window": 0}), MaskSpecError, "window = 0"),
        (2, "spec", with_params({"windw": 9}), MaskSpecError, "windw"),
        (2, "tables", foreign_columns, LayoutInvariantError, "as many blocks"),
    ],
)
def test_contents_that_do_not_belong_together_are_refused(
    tmp_path, spec, field, change, error, message
):
    store = tampered(tmp_path, SPECS[spec], **{field: change})
    with pytest.raises(error, match=message):
        load_entry(store, SPECS[spec].name)


def test_row_intervals_of_layouts_select_one(store):
    entry = load_entry(store, "dflash/ctx64")
    one = entry.spans.select(torch.tensor([3]))
    assert one.starts.shape == (1, 1, 2, 32)
    wanted = RowIntervals(entry.spans.starts[3:4], entry.spans.ends[3:4], 96)
    assert one.equals(wanted)


@pytest.mark.parametrize("spec", [0, 1, 2])
@pytest.mark.parametrize("sizes", [{"KV_LEN": 2**30}, {"Q_LEN": 2**30, "KV_LEN": 2**30}])
def test_a_claimed_size_is_refused_before_memory_is_spent(tmp_path, spec, sizes):
    store = tampered(tmp_path, SPECS[spec], spec=lambda record: {**record, **sizes})
    tracemalloc.start()
    (found,) = verify_deep(store)
    assert found.compared
    assert "_LEN of " in found.problem
    assert "must be at most 2**26" in found.problem
    with pytest.raises((MaskSpecError, LayoutInvariantError)):
        entry_kinds(load_entry(store, SPECS[spec].name))
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()


@pytest.mark.parametrize("count", ["full", "partial", "empty", "cells", "empty_rows"])
def test_a_count_that_was_published_wrong_is_found(tmp_path, count):
    store = tampered(tmp_path, SPECS[2], attrs=lambda attrs: {**attrs, count: attrs[count] + 1})
    (found,) = verify_deep(store)
    assert found.compared
    assert found.problem.startswith("attributes are ")


def test_the_largest_claimed_sizes_are_looked_into():
    spec = dataclasses.replace(SPECS[2], Q_LEN=16, KV_LEN=16, BLOCK_SIZE=(1024, 1024))
    for field in ("Q_LEN", "KV_LEN"):
        check_size(dataclasses.replace(spec, **{field: 2**26}))
        with pytest.raises(MaskSpecError, match=rf"^{field} of .* = 67108865: must be at most"):
            check_size(dataclasses.replace(spec, **{field: 2**26 + 1}))
    check_size(spec, B=2**20, H=2**6)
    with pytest.raises(MaskSpecError, match=r"^blocks of .* = 67108865: must be at most"):
        check_size(spec, B=2**26 + 1)


def test_blocks_of_many_claimed_heads_are_refused_too(tmp_path):
    store = tampered(tmp_path, SPECS[2], attrs=lambda attrs: {**attrs, "B": 2**20, "H": 2**10})
    (found,) = verify_deep(store)
    assert "blocks of 'window/q70-kv90' = 16106127360: must be at most 2**26" in found.problem
