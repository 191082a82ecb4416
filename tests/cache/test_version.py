import hashlib
import json

import numpy as np
import pytest

import cache
from cache.digest import sha256_hex
from cache.errors import DamagedEntryError, FormatVersionError, InvalidEntryError
from cache.format import version_document
from cache.unpublished import assemble
from cache.version import Diff, parse_version
from tests.cache.samples import entries, entry


def test_entries_lie_end_to_end_sorted_by_name_and_hashed_in_order():
    b = cache.EntryData(
        name="b",
        spec={"k": 1},
        spans={"z": np.array([[7, 8]], np.int32), "a": np.array([5], np.int32)},
        tables={"t": np.array([9], np.int32)},
    )
    a = cache.EntryData(name="a", spec={}, attrs={"n": 2}, spans={"s": np.array([1, 2], np.int32)})
    version = assemble([b, a]).version
    manifest = json.loads(version.document)["attributes"]["manifest"]
    assert manifest == {
        "format": "flex-mask-cache",
        "format_version": 1,
        "sections": {"spans": 5, "tables": 1},
        "entries": [
            {
                "name": "a",
                "spec": {},
                "attrs": {"n": 2},
                "offsets": {"spans": 0, "tables": 0},
                "spans": {"s": [2]},
                "tables": {},
                "sha256": hashlib.sha256(np.array([1, 2], "<i4").tobytes()).hexdigest(),
            },
            {
                "name": "b",
                "spec": {"k": 1},
                "attrs": {},
                "offsets": {"spans": 2, "tables": 0},
                "spans": {"a": [1], "z": [1, 2]},
                "tables": {"t": [1]},
                "sha256": hashlib.sha256(np.array([5, 7, 8, 9], "<i4").tobytes()).hexdigest(),
            },
        ],
    }
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    assert version.id == hashlib.sha256(text).hexdigest()
    assert version.entries["b"].nbytes == 16
    assert dict(version.entries["b"].arrays) == {
        "a": cache.ArrayInfo("spans", 2, (1,)),
        "t": cache.ArrayInfo("tables", 0, (1,)),
        "z": cache.ArrayInfo("spans", 3, (1, 2)),
    }
    assert version.entries["b"].extents == {"spans": (2, 5), "tables": (0, 1)}


def test_equal_content_has_an_equal_id_whatever_the_order_and_memory_layout():
    made = entries()
    turned = [
        cache.EntryData(
            name=e.name,
            spec=dict(reversed(e.spec.items())),
            attrs=e.attrs,
            spans={k: np.asfortranarray(v) for k, v in reversed(e.spans.items())},
            tables=e.tables,
        )
        for e in reversed(made)
    ]
    assert assemble(made).version.id == assemble(turned).version.id
    # The values go by their place, not by where they lie in memory.
    table = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    other = np.asfortranarray(table.transpose(2, 0, 1)[::-1])
    assert not other.flags.c_contiguous
    (view,), (copy,) = (
        assemble([cache.EntryData(name="a", spec={}, spans={"x": array})]).values["spans"]
        for array in (other, np.array(other.tolist(), np.int32))
    )
    assert view.tolist() == copy.tolist() == np.array(other.tolist()).reshape(-1).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a/../b"}, "a name must be parts"),
        ({"name": "/abs"}, "a name must be parts"),
        ({"name": ""}, "a name must be parts"),
        ({"name": "a//b"}, "a name must be parts"),
        ({"name": "..."}, "a name must be parts"),
        ({"name": "x" * 201}, "a name must be parts"),
        ({"name": "a\n"}, "a name must be parts"),
        ({"spec": {"a": 0.5}}, "spec: value.a is 0.5 of type float"),
        ({"attrs": {"a": None}}, "attrs: value.a is None"),
        ({"spans": {"x": np.zeros(2)}}, "must be a numpy array of int32, found float64"),
        ({"spans": {"x": [1]}}, "must be a numpy array of int32, found list"),
        ({"spans": {"x": np.zeros((), np.int32)}}, "must have 1 to 8 dimensions, found 0"),
        ({"spans": {"..": np.zeros(1, np.int32)}}, "must be a name like an entry's"),
        ({"spans": {"kv_indices": np.zeros(1, np.int32)}}, "must stand in one section"),
    ],
)
def test_an_entry_that_breaks_a_rule_is_refused(change, message):
    good = entry()
    fields = {
        "name": good.name,
        "spec": good.spec,
        "attrs": good.attrs,
        "spans": good.spans,
        "tables": good.tables,
    }
    with pytest.raises(InvalidEntryError, match=message):
        assemble([cache.EntryData(**(fields | change))])


def test_an_entry_of_more_than_4_gib_is_refused():
    big = np.broadcast_to(np.zeros(1, np.int32), (1 << 31,))
    with pytest.raises(InvalidEntryError, match="at most 4294967296 bytes, found 8589934592"):
        cache.EntryData(name="big", spec={}, spans={"x": big}).check()


def test_two_entries_of_one_name_are_refused():
    with pytest.raises(InvalidEntryError, match="the name must be unique"):
        assemble([entry(), entry(scale=2)])


def test_the_longest_name_is_published_and_read_back():
    (name,) = assemble([entry("x" * 200)]).version.entries
    assert name == "x" * 200


def test_names_with_dots_inside_are_fine():
    assert list(assemble([entry("v1.5/..x/.h")]).version.entries) == ["v1.5/..x/.h"]


def signed(manifest):
    """The document of a manifest and the id that fits it."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    return version_document(text), sha256_hex(text)


def manifest_of_entries():
    document = assemble(entries(2)).version.document
    return json.loads(document)["attributes"]["manifest"]


def test_a_signed_manifest_reads_back():
    document, version_id = signed(manifest_of_entries())
    assert list(parse_version(document, version_id, "f").entries) == ["causal/q4", "causal/q8"]


def edit(path, value):
    def change(manifest):
        *steps, last = path
        for step in steps:
            manifest = manifest[step]
        if value is ...:
            del manifest[last]
        else:
            manifest[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit(["entries", 0, "name"], "a/../b"), "name must be plain parts"),
        (edit(["entries", 0, "name"], 7), "name must be plain parts"),
        (edit(["entries", 0, "name"], "zzz"), "sorted by name"),
        (edit(["entries", 1, "name"], "causal/q4"), "sorted by name"),
        (edit(["entries", 0, "extra"], 1), "an entry must have the fields"),
        (edit(["entries", 0, "spec"], ...), "an entry must have the fields"),
        (edit(["entries", 0, "spec"], []), "spec must be a dict"),
        (edit(["entries", 0, "sha256"], "0" * 63), "sha256 must be 64"),
        (edit(["entries", 0], []), "an entry must have the fields"),
        (edit(["entries"], {}), "entries must be a list"),
        (edit(["sections", "spans"], 49), "sections must be as long as"),
        (edit(["sections", "more"], 0), "sections must be as long as"),
        (edit(["more"], 0), "manifest must have the fields"),
        (edit(["sections", "spans"], True), "sections must be as long as"),
        (edit(["entries", 0, "offsets", "spans"], 1), "must lie end to end"),
        (edit(["entries", 0, "offsets", "spans"], False), "must lie end to end"),
        (edit(["entries", 1, "offsets", "spans"], 2**40), "must lie end to end"),
        (edit(["entries", 1, "offsets", "spans"], -1), "must lie end to end"),
        (edit(["entries", 1, "offsets", "tables"], ...), "must lie end to end"),
        (edit(["entries", 0, "offsets"], []), "must lie end to end"),
        (edit(["entries", 0, "spans"], []), "spans must be a dict"),
        (edit(["entries", 0, "spans", "ends"], [-1]), "shape must be of counts"),
        (edit(["entries", 0, "spans", "ends"], [True]), "shape must be of counts"),
        (edit(["entries", 0, "spans", "ends"], [2**33]), "shape must be of counts"),
        (edit(["entries", 0, "spans", "ends"], []), "1 to 8 counts"),
        (edit(["entries", 0, "spans", "ends"], {}), "1 to 8 counts"),
        (edit(["entries", 0, "spans", "ends"], [1] * 9), "1 to 8 counts"),
        (edit(["entries", 0, "spans", "ends"], [2**32] * 8), "at most 68719476736 values"),
        (edit(["entries", 1, "spans", "ends"], [2**31]), "at most 4294967296 bytes"),
        (edit(["entries", 0, "spans", ".."], [1]), "array's name must be plain"),
        (edit(["entries", 0, "tables", "ends"], [0]), "must stand in one section"),
        (edit(["entries", 0, "attrs", "x"], 10**18), "must hold canonical JSON"),
        (edit(["entries", 0, "spec", "x"], None), "must hold canonical JSON"),
    ],
)
def test_a_signed_manifest_that_breaks_a_rule_is_refused(change, message):
    manifest = manifest_of_entries()
    change(manifest)
    document, version_id = signed(manifest)
    with pytest.raises(DamagedEntryError, match=message):
        parse_version(document, version_id, "f")


def test_sizes_are_taken_up_to_their_limits():
    """4 GiB an entry, 2**36 values a section; a manifest alone claims them."""

    def read(*sizes):
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        listed = [
            {
                "attrs": {},
                "name": f"{i:03}",
                "offsets": {"spans": at, "tables": 0},
                "sha256": "0" * 64,
                "spans": {"x": [size]},
                "spec": {},
                "tables": {},
            }
            for i, (at, size) in enumerate(zip(offsets, sizes, strict=True))
        ]
        sections = {"spans": sum(sizes), "tables": 0}
        document, version_id = signed(
            manifest_of_entries() | {"entries": listed, "sections": sections}
        )
        return parse_version(document, version_id, "f")

    assert read(*[2**30] * 64).totals == {"spans": 2**36, "tables": 0}
    with pytest.raises(DamagedEntryError, match="at most 68719476736 values"):
        read(*[2**30] * 64, 1)
    with pytest.raises(DamagedEntryError, match="at most 4294967296 bytes"):
        read(2**30 + 1)


@pytest.mark.parametrize(
    "text",
    [
        b"NaN",
        b"1.5",
        b"null",
        b"[" * 500 + b"]" * 500,
        b"[" * 100_000,
        b"9" * 5000,
        b'{"a":1,"a":1}',
        b"[1, 2]",
    ],
)
def test_hostile_json_under_a_fitting_id_is_refused(text):
    manifest = json.dumps(manifest_of_entries(), sort_keys=True, separators=(",", ":")).encode()
    hostile = manifest.replace(b'"family":"causal"', b'"family":' + text, 1)
    assert hostile != manifest
    with pytest.raises(DamagedEntryError, match=r"must (be|hold) canonical JSON"):
        parse_version(version_document(hostile), sha256_hex(hostile), "f")


def test_a_manifest_under_another_id_is_refused():
    document, version_id = signed(manifest_of_entries())
    with pytest.raises(DamagedEntryError, match="SHA-256 of its manifest must be its id"):
        parse_version(document, "0" * 64, "f")
    with pytest.raises(DamagedEntryError, match="SHA-256 of its manifest must be its id"):
        parse_version(document.replace(b"causal", b"casual"), version_id, "f")


def test_a_manifest_of_version_2_is_refused():
    manifest = manifest_of_entries() | {"format_version": 2}
    document, version_id = signed(manifest)
    with pytest.raises(FormatVersionError, match="format 2, this reader knows format 1"):
        parse_version(document, version_id, "f")


def test_a_diff_names_what_was_added_removed_and_changed():
    old = assemble([entry("a"), entry("b"), entry("c"), entry("d")]).version
    new = assemble([entry("a"), entry("b", 2), entry("c", revision=2), entry("e")]).version
    assert Diff.between(old, new) == Diff(added=("e",), removed=("d",), changed=("b", "c"))
    assert Diff.between(old, old) == Diff((), (), ())


@pytest.mark.parametrize(
    "changed",
    [
        {"attrs": {"n": 3}},
        {"spec": {"n": 3}},
        {"spans": {"x": np.array([1, 2, 3, 5], np.int32)}},
        # The same values in the same place, by another shape or name.
        {"spans": {"x": np.array([[1, 2], [3, 4]], np.int32)}},
        {"spans": {"y": np.array([1, 2, 3, 4], np.int32)}},
    ],
)
def test_a_diff_sees_each_field_of_an_entry(changed):
    was = {"name": "a", "spec": {}, "spans": {"x": np.array([1, 2, 3, 4], np.int32)}}
    old, new = (assemble([cache.EntryData(**fields)]).version for fields in (was, was | changed))
    assert Diff.between(old, new) == Diff((), (), ("a",))
