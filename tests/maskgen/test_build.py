"""Builds: exact entries, the same version anywhere, and only what is missing is made."""

import dataclasses
import importlib
import shutil
import sys
import textwrap
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import cache
from maskgen.build import build, build_entry
from maskgen.entry import load_entry, parse_entry
from maskgen.errors import (
    LayoutInvariantError,
    MaskSpecError,
    StaleMaskError,
    UnsupportedMaskError,
)
from maskgen.families.registry import families
from maskgen.named_function import installed_source
from maskgen.spec import read_specs

CAUSAL = {"name": "causal", "family": "causal", "Q_LEN": [100, 160], "KV_LEN": [130, 160]}
LAYOUTS = {
    "name": "dflash",
    "family": "dflash",
    "kind": "layouts",
    "context": [40, 64],
    "anchors": 6,
    "draft_block_size": 4,
    "draws": 3,
}
WINDOWS = {"context": 40, "answer_starts": [0, 5, 10, 20], "answer_ends": [25, 30, 35, 40]}
DATA = {**LAYOUTS, "name": "dflash-data", "kind": "parametric"}
del DATA["draws"]

FIRST_ANCHORS = [0, 2, 5, 7, 13, 23]
"""Layout 0 of LAYOUTS at context 40, as every machine draws it."""


def specs_of(*entries):
    return read_specs({"masks": {"BLOCK_SIZE": 16, "entry": list(entries)}})


def fresh(tmp_path, name="masks"):
    return cache.open_store(tmp_path / f"{name}.zarr", writable=True)


def test_a_static_entry_equals_create_block_mask(tmp_path):
    store = fresh(tmp_path)
    build(specs_of(CAUSAL), store)
    for Q_LEN, KV_LEN in ((100, 130), (160, 160)):
        entry = load_entry(store, f"causal/q{Q_LEN}-kv{KV_LEN}")
        wanted = create_block_mask(
            lambda b, h, q, kv: q >= kv, None, None, Q_LEN, KV_LEN, "cpu", BLOCK_SIZE=16
        )
        for side in ("kv", "full_kv", "q", "full_q"):
            counts = getattr(entry.tables, f"{side}_num_blocks")
            indices = getattr(entry.tables, f"{side}_indices")
            torch.testing.assert_close(
                counts, getattr(wanted, f"{side}_num_blocks"), rtol=0, atol=0
            )
            live = torch.arange(indices.shape[-1]) < counts[..., None]
            wanted_indices = getattr(wanted, f"{side}_indices")
            assert indices.shape == wanted_indices.shape
            assert torch.equal(indices[live], wanted_indices[live])


def dense_layout(anchors, n_valid, context, draft):
    """The DFlash formula, cell by cell in plain Python."""
    Q_LEN = len(anchors) * draft
    return [
        [
            (kv < anchors[q // draft] and q // draft < n_valid and kv < context)
            or (kv >= context and (kv - context) // draft == q // draft)
            for kv in range(context + Q_LEN)
        ]
        for q in range(Q_LEN)
    ]


def test_cells_are_counted_beyond_int32():
    sizes = {"Q_LEN": 2**15, "KV_LEN": 2**16, "BLOCK_SIZE": 1024}
    (spec,) = specs_of({"name": "all", "family": "full", **sizes})
    assert build_entry(spec).attrs["cells"] == 2**31


def test_every_layout_is_the_mask_of_its_anchors(tmp_path):
    store = fresh(tmp_path)
    build(specs_of({**LAYOUTS, **WINDOWS}), store)
    entry = load_entry(store, "dflash/ctx40")
    anchors, n_valid = entry.params["anchors"], entry.params["n_valid"]
    assert anchors.shape == (48, 6)
    assert entry.num_layouts == entry.spans.B == entry.tables.B == 48
    wanted = torch.tensor(
        [dense_layout(a, n, 40, 4) for a, n in zip(anchors.tolist(), n_valid.tolist(), strict=True)]
    )
    assert torch.equal(entry.spans.dense()[:, 0], wanted)
    assert entry.attrs["cells"] == int(wanted.sum())
    assert entry.attrs["empty_rows"] == 0
    # Blocks by counting the cells of each 16 x 16 tile; 24 x 64 is padded to 32 x 64.
    padded = torch.nn.functional.pad(wanted, (0, 0, 0, 8))
    tiles = padded.view(48, 2, 16, 4, 16).sum(dim=(2, 4))
    kinds = (tiles > 0).int() + (tiles == 256).int()
    assert torch.equal(entry.tables.block_kinds()[:, 0].int(), kinds)


def test_anchors_ascend_inside_each_groups_range(tmp_path):
    store = fresh(tmp_path)
    build(specs_of(LAYOUTS), store)
    for context, starts, ends in (
        (40, [0, 2, 5, 7, 10, 12, 15, 17, 20, 25, 30, 35], [22, 25, 27, 30, 32, 35, 37, 40]),
        (64, [*range(0, 33, 4), 40, 48, 56], [*range(36, 65, 4)]),
    ):
        entry = load_entry(store, f"dflash/ctx{context}")
        assert entry.spec.params["answer_starts"] == starts
        assert entry.spec.params["answer_ends"] == ends
        pairs = [(start, end) for start in starts for end in ends if end - 1 > start]
        n_valid = entry.params["n_valid"].tolist()
        for layout, row in enumerate(entry.params["anchors"].tolist()):
            start, end = pairs[layout // 3]
            live = row[: n_valid[layout]]
            assert len(live) == min(len(row), end - 1 - start)
            assert live == sorted(set(live))
            assert live[0] >= start
            assert live[-1] < end - 1


def test_a_context_shorter_than_its_anchors_pads_them(tmp_path):
    store = fresh(tmp_path)
    build(specs_of({**LAYOUTS, "context": 4, "answer_starts": [0, 2], "answer_ends": [4]}), store)
    entry = load_entry(store, "dflash/ctx4")
    assert entry.params["n_valid"].tolist() == [3, 3, 3, 1, 1, 1]
    assert entry.params["anchors"][0].tolist() == [0, 1, 2, 0, 0, 0]
    # All three layouts of a group are equal here; each keeps its own rows all the same.
    assert entry.spans.B == 6
    assert entry.bucket.K == 2


def test_layouts_are_drawn_alike_everywhere():
    (spec,) = specs_of({**LAYOUTS, **WINDOWS})
    again = build_entry(dataclasses.replace(spec, name="renamed"))
    assert build_entry(spec).spans["anchors"].tolist() == again.spans["anchors"].tolist()
    assert build_entry(spec).spans["anchors"][0].tolist() == FIRST_ANCHORS
    other = build_entry(dataclasses.replace(spec, params={**spec.params, "draws": 4}))
    assert other.spans["anchors"][0].tolist() != FIRST_ANCHORS


def test_a_parametric_entry_has_bounds_and_no_arrays(tmp_path):
    store = fresh(tmp_path)
    report = build(specs_of(DATA), store)
    info = store.version().entries["dflash-data/ctx64"]
    assert not info.arrays
    assert info.attrs["K"] == 2
    may, must = info.attrs["may"], info.attrs["must"]
    assert must["full"] + must["partial"] <= may["full"] + may["partial"]
    row = report.rows[1]
    assert (row.full, row.partial, row.empty, row.sparsity, row.bytes) == (None,) * 4 + (0,)


def test_the_report_counts_blocks_bytes_and_sparsity(tmp_path):
    store = fresh(tmp_path)
    seen = []
    report = build(specs_of(CAUSAL), store, progress=lambda *args: seen.append(args))
    row = report.rows[1]
    assert (row.name, row.kind, row.Q_LEN, row.KV_LEN) == ("causal/q160-kv160", "static", 160, 160)
    assert (row.full, row.partial, row.empty, row.BLOCK_SIZE) == (45, 10, 45, (16, 16))
    assert row.sparsity == 45.0
    assert row.bytes == store.version().entries[row.name].nbytes
    assert seen == [("causal/q100-kv130", 1, 2), ("causal/q160-kv160", 2, 2)]


def test_sparsity_of_ragged_lengths_stays_a_percentage(tmp_path):
    (row,) = build(
        specs_of({"name": "c", "family": "causal", "Q_LEN": 129, "BLOCK_SIZE": 128}),
        fresh(tmp_path),
    ).rows
    assert (row.full, row.partial, row.empty, row.sparsity) == (0, 3, 1, 25.0)


def test_two_caches_of_one_config_are_one_version(tmp_path):
    specs = specs_of(CAUSAL, LAYOUTS, DATA)
    first = build(specs, fresh(tmp_path, "a")).version
    assert build(specs[::-1], fresh(tmp_path, "b")).version == first


def test_equal_specs_are_copied_and_the_rest_is_built(tmp_path):
    store = fresh(tmp_path)
    first = build(specs_of(CAUSAL, LAYOUTS), store)
    assert not any(row.reused for row in first.rows)
    again = build(specs_of(CAUSAL, LAYOUTS), store)
    assert again.version == first.version
    assert all(row.reused for row in again.rows)
    changed = build(specs_of(CAUSAL, {**LAYOUTS, "draws": 2}), store)
    assert [row.reused for row in changed.rows] == [True, True, False, False]
    assert changed.version != first.version == store.versions()[-1].id
    renamed = build(specs_of({**CAUSAL, "name": "lower"}), store)
    assert [row.reused for row in renamed.rows] == [True, True]
    assert list(store.version().entries) == ["lower/q100-kv130", "lower/q160-kv160"]


def test_a_copy_is_the_same_as_a_build(tmp_path):
    store = fresh(tmp_path)
    build(specs_of(CAUSAL), store)
    copied = build(specs_of(CAUSAL, LAYOUTS), store).version
    assert build(specs_of(CAUSAL, LAYOUTS), fresh(tmp_path, "b")).version == copied


def test_a_version_may_be_published_without_becoming_current(tmp_path):
    store = fresh(tmp_path)
    first = build(specs_of(CAUSAL), store).version
    second = build(specs_of(LAYOUTS), store, make_current=False).version
    assert store.current == first
    assert second in {info.id for info in store.versions()}


def test_a_raised_revision_is_built_again(tmp_path, monkeypatch):
    store = fresh(tmp_path)
    before = build(specs_of(CAUSAL, LAYOUTS), store).version
    raised = dataclasses.replace(families["causal"], revision=2)
    newer = MappingProxyType({**families, "causal": raised})
    monkeypatch.setattr(importlib.import_module("maskgen.families"), "families", newer)
    monkeypatch.setattr("maskgen.named_family.families", newer)
    report = build(specs_of(CAUSAL, LAYOUTS), store)
    assert [row.reused for row in report.rows] == [False, False, True, True]
    assert report.version != before


def test_a_spec_of_another_revision_is_not_built():
    spec = dataclasses.replace(specs_of(CAUSAL)[0], revision=7)
    with pytest.raises(MaskSpecError, match="revision of 'causal/q100-kv130' = 7") as caught:
        build_entry(spec)
    assert caught.value.value == 7


def damaged(tmp_path):
    """Flip a bit of the one chunk of spans."""
    (chunk,) = (tmp_path / "masks.zarr").glob("*/spans/c/0")
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)


def test_entries_of_a_version_that_is_removed_meanwhile_are_built_and_that_is_said(tmp_path):
    version = build(specs_of(CAUSAL), fresh(tmp_path)).version
    store, said = fresh(tmp_path), []
    store.version()
    shutil.rmtree(Path(store.location) / version)
    report = build(specs_of(CAUSAL), store, notice=said.append)
    assert report.version == version
    assert not any(row.reused for row in report.rows)
    assert len(said) == 2
    assert all(f"version {version[:12]} was removed while it was read" in text for text in said)
    assert store.verify() == []


def test_a_damaged_entry_is_built_anew_and_said(tmp_path):
    version = build(specs_of(CAUSAL), fresh(tmp_path)).version
    damaged(tmp_path)
    store, said = fresh(tmp_path), []
    report = build(specs_of(CAUSAL), store, notice=said.append)
    assert report.version == version
    assert not any(row.reused for row in report.rows)
    assert [text.rpartition("; ")[2] for text in said] == [
        "'causal/q100-kv130' is built, not copied",
        "'causal/q160-kv160' is built, not copied",
        "the version that was built now replaces it",
    ]
    assert all(f"{version}/spans/c/0" in text for text in said)
    assert store.verify() == []
    assert load_entry(store, "causal/q160-kv160").attrs["cells"] == 160 * 161 // 2


def test_without_a_listener_damage_is_a_warning(tmp_path):
    build(specs_of(CAUSAL), fresh(tmp_path))
    damaged(tmp_path)
    with pytest.warns(RuntimeWarning, match="is damaged: its CRC-32C must fit") as warned:
        build(specs_of(CAUSAL), fresh(tmp_path))
    assert len(warned) == 3


def test_a_changed_config_builds_beside_a_damaged_version(tmp_path):
    version = build(specs_of(CAUSAL), fresh(tmp_path)).version
    damaged(tmp_path)
    store, said = fresh(tmp_path), []
    report = build(specs_of(CAUSAL, LAYOUTS), store, notice=said.append)
    assert len(said) == 2
    assert report.version != version
    assert store.verify(report.version) == []
    assert store.verify(version) != []


@pytest.mark.parametrize(
    ("change", "said_of_it"),
    [
        (shutil.rmtree, "holds no version"),
        (lambda folder: (folder / "zarr.json").write_bytes(b"{}"), "is damaged"),
    ],
)
def test_an_unreadable_current_version_is_nothing_to_reuse(tmp_path, change, said_of_it):
    version = build(specs_of(CAUSAL), fresh(tmp_path)).version
    change(tmp_path / "masks.zarr" / version)
    store, said = fresh(tmp_path), []
    report = build(specs_of(CAUSAL), store, notice=said.append)
    assert said_of_it in said[0]
    assert said[0].endswith("; nothing is copied from it")
    assert report.version == version
    assert not any(row.reused for row in report.rows)
    assert store.verify() == []


def test_a_layout_with_more_spans_than_the_family_says_is_our_fault(monkeypatch):
    (spec,) = specs_of({**LAYOUTS, "context": 40})
    narrow = dataclasses.replace(families["dflash"], max_k_fn=lambda *_, **__: 1)
    monkeypatch.setattr("maskgen.named_family.families", {"dflash": narrow})
    with pytest.raises(LayoutInvariantError, match="K is at most 1"):
        build_entry(spec)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of masks that can be written anew between builds."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(body):
        sys.modules.pop("masks_under_test", None)
        (tmp_path / "masks_under_test.py").write_text(textwrap.dedent(body))

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield write
    sys.modules.pop("masks_under_test", None)


FUNCTION = {"name": "mine", "mask_mod": "masks_under_test:mask", "Q_LEN": 48}


def test_a_function_is_evaluated_again_each_time(tmp_path, module):
    store = fresh(tmp_path)
    module("def mask(b, h, q, kv):\n    return (q >= kv) & (q - kv < 20)\n")
    first = build(specs_of(FUNCTION), store)
    dense = load_entry(store, "mine/q48-kv48").spans.dense()[0, 0]
    wanted = [[0 <= q - kv < 20 for kv in range(48)] for q in range(48)]
    assert dense.tolist() == wanted
    same = build(specs_of(FUNCTION), store)
    assert (same.version, same.rows[0].reused) == (first.version, False)
    module("def mask(b, h, q, kv):\n    return (q >= kv) & (q - kv < 21)\n")
    changed = build(specs_of(FUNCTION), store)
    assert (changed.version == first.version, changed.rows[0].reused) == (False, False)


@pytest.mark.parametrize("name", ["stale_top", "stale_package.inner.masks"])
def test_a_mask_of_code_that_changed_is_not_loaded(tmp_path, monkeypatch, name):
    """In a package, too, and without an import: one that is imported prints."""
    folder = tmp_path / "code"
    file = folder / f"{name.replace('.', '/')}.py"
    file.parent.mkdir(parents=True)
    if file.parent != folder:
        # Its own package has a file of its own, the one around it has none.
        (file.parent / "__init__.py").touch()
    code = "def mask(b, h, q, kv):\n    return q >= kv\n"
    file.write_text(code)
    store = fresh(tmp_path)
    with monkeypatch.context() as importable:
        importable.syspath_prepend(folder)
        entry = {**FUNCTION, "mask_mod": f"{name}:mask"}
        version = build(specs_of(entry, CAUSAL), store).version
        for module in [module for module in sys.modules if module.startswith("stale_")]:
            del sys.modules[module]
        assert load_entry(store, "mine/q48-kv48").spans.K == 1
        file.write_text("raise SystemExit('imported')\n")
        with pytest.raises(StaleMaskError, match=rf"{name}:mask.*changed.*maskgen build"):
            load_entry(store, "mine/q48-kv48")
        # Others of the version load, and it can be looked at.
        load_entry(store, "causal/q160-kv160")
        assert parse_entry(store.load("mine/q48-kv48")).spans.K == 1
        file.write_text(code)
        assert load_entry(store, "mine/q48-kv48").spans.K == 1
        assert build(specs_of(entry, CAUSAL), store).version == version
    file.write_text("changed")
    for module in [module for module in sys.modules if module.startswith("stale_")]:
        del sys.modules[module]
    # Where the module is not, what was built elsewhere is taken.
    assert load_entry(store, "mine/q48-kv48").spans.K == 1


def test_a_mask_whose_build_recorded_no_source_is_taken_as_it_is(tmp_path, module):
    """As of code that stood in no file where it was built."""
    store = fresh(tmp_path)
    module("def mask(b, h, q, kv):\n    return q >= kv\n")
    (spec,) = specs_of(FUNCTION)
    data = build_entry(spec)
    attrs = {name: value for name, value in data.attrs.items() if name != "source"}
    assert len(attrs) == len(data.attrs) - 1
    store.publish([dataclasses.replace(data, attrs=attrs)])
    assert installed_source(spec.family)
    assert load_entry(store, spec.name).spans.K == 1


def test_a_build_in_a_process_that_has_the_old_code_is_noticed(tmp_path, module):
    store = fresh(tmp_path)
    module("def mask(b, h, q, kv):\n    return q >= kv\n")
    build(specs_of(FUNCTION), store)
    Path(sys.modules["masks_under_test"].__file__).write_text("mask = None\n")
    build(specs_of(FUNCTION), store)
    with pytest.raises(StaleMaskError):
        load_entry(store, "mine/q48-kv48")


@pytest.mark.parametrize("path", ["..:x", "a b:x", "sys:x", "os.path.none:x", "json:x.y", ":x"])
def test_names_of_a_hostile_cache_find_no_source_and_do_no_harm(path):
    found = installed_source(path)
    assert found is None or path.startswith("json")


def test_a_function_may_depend_on_the_head(tmp_path, module):
    store = fresh(tmp_path)
    module("def mask(b, h, q, kv):\n    return q - kv >= 5 * h\n")
    build(specs_of({**FUNCTION, "H": 2}), store)
    entry = load_entry(store, "mine/q48-kv48")
    assert (entry.spans.B, entry.spans.H, entry.tables.H) == (1, 2, 2)
    assert entry.attrs["empty_rows"] == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:mask", "must be importable"),
        ("masks_under_test:other", "must be importable"),
        ("masks_under_test:number", "must be a function"),
    ],
)
def test_a_function_that_is_not_there_is_named(module, name, message):
    module("number = 3\n")
    (spec,) = specs_of({**FUNCTION, "mask_mod": name})
    with pytest.raises(MaskSpecError, match=message) as caught:
        build_entry(spec)
    assert caught.value.value == name


@pytest.mark.parametrize(
    ("entry", "count"),
    [
        ({"family": "p_eagle", "num_depths": 33, "Q_LEN": 40}, 33),
        ({"family": "tree", "Q_LEN": 40}, 41),
    ],
)
def test_a_parametric_entry_that_may_need_too_many_spans_is_refused(entry, count):
    (spec,) = specs_of({"name": "x", "kind": "parametric", **entry})
    with pytest.raises(
        UnsupportedMaskError, match=f"at most 32 spans.*up to {count} here"
    ) as caught:
        build_entry(spec)
    assert (caught.value.count, caught.value.limit) == (count, 32)


def test_as_many_spans_as_the_limit_are_taken(module):
    module("def mask(b, h, q, kv):\n    return (kv % 2 == 0) & (q >= 0)\n")
    (spec,) = specs_of({**FUNCTION, "Q_LEN": 64})
    assert build_entry(spec).attrs["K"] == 32
    (spec,) = specs_of(
        {"name": "x", "kind": "parametric", "family": "p_eagle", "num_depths": 32, "Q_LEN": 40}
    )
    assert build_entry(spec).attrs["K"] == 32


def test_a_function_with_too_many_spans_is_refused_with_its_row(module):
    module("def mask(b, h, q, kv):\n    return (kv % 2 == 0) & (q >= 0)\n")
    (spec,) = specs_of({**FUNCTION, "Q_LEN": 80})
    with pytest.raises(UnsupportedMaskError, match="at most 32 spans") as caught:
        build_entry(spec)
    assert caught.value.count == 40
