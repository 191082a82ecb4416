"""What a manifest that was not written here may hold: each rule, word for word, at its limits."""

import copy
import dataclasses
import hashlib
import json

import numpy as np
import pytest

import cache
from cache.errors import DamagedEntryError, FormatVersionError
from cache.unpublished import assemble
from cache.version import parse_version

MANIFEST_FIELDS = "entries, format, format_version, sections"
ENTRY_FIELDS = "attrs, name, offsets, sha256, spans, spec, tables"


def item(name, spans=None, tables=None, offsets=(0, 0)):
    """An entry of a manifest."""
    return {
        "attrs": {"n": 1},
        "name": name,
        "offsets": {"spans": offsets[0], "tables": offsets[1]},
        "sha256": "0" * 64,
        "spans": spans or {},
        "spec": {"m": [True]},
        "tables": tables or {},
    }


def manifest():
    """Three entries: 2 + 6 + 0 values of spans, 3 + 0 + 4 of tables."""
    listed = [
        item("a", {"x": [2]}, {"y": [3]}),
        item("b", {"x": [2, 3]}, {}, (2, 3)),
        item("c", {}, {"w": [4], "y": [0, 5]}, (8, 3)),
    ]
    return {
        "entries": listed,
        "format": "flex-mask-cache",
        "format_version": 1,
        "sections": {"spans": 8, "tables": 7},
    }


def document_of(text):
    return b'{"attributes":{"manifest":' + text + b'},"node_type":"group","zarr_format":3}'


def text_of(content):
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def read(text, **options):
    return parse_version(document_of(text), hashlib.sha256(text).hexdigest(), "the/file", **options)


def test_what_a_manifest_says_is_what_is_read():
    text = text_of(manifest())
    version = read(text)
    assert version.id == hashlib.sha256(text).hexdigest()
    assert version.document == document_of(text)
    assert dict(version.totals) == {"spans": 8, "tables": 7}
    assert list(version.entries) == ["a", "b", "c"]
    assert [dict(e.extents) for e in version.entries.values()] == [
        {"spans": (0, 2), "tables": (0, 3)},
        {"spans": (2, 8), "tables": (3, 3)},
        {"spans": (8, 8), "tables": (3, 7)},
    ]
    assert [e.nbytes for e in version.entries.values()] == [20, 24, 16]
    assert dict(version.entries["c"].arrays) == {
        "w": cache.ArrayInfo("tables", 3, (4,)),
        "y": cache.ArrayInfo("tables", 7, (0, 5)),
    }
    assert [found.size for found in version.entries["c"].arrays.values()] == [4, 0]
    found = version.entries["b"]
    assert (found.name, found.spec, found.attrs) == ("b", {"m": [True]}, {"n": 1})
    assert found.sha256 == "0" * 64
    for mapping in (version.entries, version.totals, found.arrays):
        with pytest.raises(TypeError):
            mapping["x"] = 1
    for thing in (version, found, version.entries["c"].arrays["w"]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            thing.name = "x"


def at(*path):
    """Set a value of the manifest, or delete it."""

    def edit(content, value):
        *steps, last = path
        for step in steps:
            content = content[step]
        if value is ...:
            del content[last]
        else:
            content[last] = value

    return edit


E = "entries"
NAME_RULE = "an entry's name must be plain parts joined by '/'"
SHA_RULE = "an entry's sha256 must be 64 hexadecimal digits"
END_RULE = "arrays must lie end to end in their section"
SORT_RULE = "entries must be sorted by name, each name once"
SUM_RULE = "sections must be as long as their entries"
COUNT_RULE = "an array's shape must be of counts"
SHAPE_RULE = "an array's shape must have 1 to 8 counts"


@pytest.mark.parametrize(
    ("edit", "value", "rule", "found"),
    [
        (at("extra"), 1, f"manifest must have the fields {MANIFEST_FIELDS}", None),
        (at("sections"), ..., f"manifest must have the fields {MANIFEST_FIELDS}", None),
        (at(E), {}, "entries must be a list", {}),
        (at(E, 2), [], f"an entry must have the fields {ENTRY_FIELDS}", []),
        (at(E, 2, "more"), 1, f"an entry must have the fields {ENTRY_FIELDS}", None),
        (at(E, 1, "attrs"), ..., f"an entry must have the fields {ENTRY_FIELDS}", None),
        *((at(E, i, "name"), "a/..", NAME_RULE, "a/..") for i in range(3)),
        (at(E, 2, "name"), 7, NAME_RULE, 7),
        (at(E, 2, "name"), "x" * 201, NAME_RULE, "x" * 201),
        *((at(E, i, "sha256"), "0" * 63, SHA_RULE, "0" * 63) for i in range(3)),
        (at(E, 2, "sha256"), "A" * 64, SHA_RULE, "A" * 64),
        (at(E, 2, "sha256"), 7, SHA_RULE, 7),
        (at(E, 2, "spec"), [], "spec must be a dict", []),
        (at(E, 2, "attrs"), 7, "attrs must be a dict", 7),
        (at(E, 2, "spans"), [], "spans must be a dict", []),
        (at(E, 2, "tables"), 7, "tables must be a dict", 7),
        (at(E, 0, "name"), "bb", SORT_RULE, "b"),
        (at(E, 1, "name"), "d", SORT_RULE, "c"),
        (at(E, 2, "name"), "b", SORT_RULE, "b"),
        (at(E, 0, "offsets", "spans"), 1, END_RULE, {"spans": 1, "tables": 0}),
        (at(E, 0, "offsets", "tables"), False, END_RULE, {"spans": 0, "tables": False}),
        (at(E, 1, "offsets", "tables"), 2, END_RULE, {"spans": 2, "tables": 2}),
        (at(E, 2, "offsets", "spans"), 9, END_RULE, {"spans": 9, "tables": 3}),
        (at(E, 2, "offsets", "more"), 0, END_RULE, {"more": 0, "spans": 8, "tables": 3}),
        (at(E, 2, "offsets"), 7, END_RULE, 7),
        (at("sections", "spans"), 7, SUM_RULE, {"spans": 7, "tables": 7}),
        (at("sections", "spans"), 9, SUM_RULE, {"spans": 9, "tables": 7}),
        (at("sections", "tables"), 8, SUM_RULE, {"spans": 8, "tables": 8}),
        (at("sections"), [8, 7], SUM_RULE, [8, 7]),
        *((at(E, 2, "tables", "w"), [c], COUNT_RULE, [c]) for c in (-1, True, "4", 2**32 + 1)),
        (at(E, 2, "tables", "w"), [4, -1], COUNT_RULE, [4, -1]),
        (at(E, 2, "tables", "w"), [0, -1], COUNT_RULE, [0, -1]),
        (at(E, 2, "tables", "y"), [-1, 0], COUNT_RULE, [-1, 0]),
        *((at(E, 1, "spans", "x"), s, SHAPE_RULE, s) for s in ([], {}, 6, "6", [1] * 9)),
        (at(E, 2, "tables", "y"), [], SHAPE_RULE, []),
        (at(E, 2, "tables", ".."), [0], "an array's name must be plain parts joined by '/'", ".."),
        (at(E, 0, "tables", "x"), [0], "an array must stand in one section", "a"),
        (at(E, 2, "spans", "y"), [0], "an array must stand in one section", "c"),
    ],
)  # fmt: skip
def test_a_rule_that_is_broken_is_told_wherever_it_is(edit, value, rule, found):
    content = manifest()
    edit(content, value)
    with pytest.raises(DamagedEntryError) as caught:
        read(text_of(content))
    error = caught.value
    assert (error.file, error.rule) == ("the/file", f"in its manifest, {rule}")
    if found is not None:
        assert error.found == found


def single(**fields):
    content = manifest() | {"entries": [item("a") | fields]}
    size = {s: sum(int(np.prod(v, dtype=object)) for v in fields.get(s, {}).values())
            for s in ("spans", "tables")}  # fmt: skip
    return text_of(content | {"sections": size})


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "x" * 200},
        {"sha256": "0123456789abcdef" * 4},
        {"spans": {"x": [1] * 8}},
        {"spans": {"x": [0, 2**32]}},
        {"spans": {"x": [2**30]}},
        {"spans": {"x": [2**29]}, "tables": {"y": [2**29]}},
        {"spans": {"x" * 200: [1]}},
        {"spec": {"n": 10**18 - 1, "m": -(10**18) + 1}},
        {"attrs": {"n": [[[]]], "empty": "", "none": {}}},
    ],
)
def test_what_is_at_a_limit_is_read(fields):
    assert read(single(**fields)).entries


@pytest.mark.parametrize(
    ("fields", "nbytes"),
    [
        ({"spans": {"x": [2**30 + 1]}}, 2**32 + 4),
        ({"spans": {"x": [2**29]}, "tables": {"y": [2**29], "z": [1]}}, 2**32 + 4),
    ],
)
def test_an_entry_past_4_gib_is_told(fields, nbytes):
    with pytest.raises(DamagedEntryError) as caught:
        read(single(**fields))
    rule = "in its manifest, an entry must hold at most 4294967296 bytes"
    assert (caught.value.rule, caught.value.found) == (rule, nbytes)


@pytest.mark.parametrize("field", ["spec", "attrs"])
@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "is None of type NoneType"),
        (10**18, "must have 18 digits at most"),
        (-(10**18), "must have 18 digits at most"),
    ],
)
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_free_json_is_checked_in_each_entry(field, value, found, name):
    content = manifest()
    content["entries"]["abc".index(name)][field]["deep"] = [0, value]
    with pytest.raises(DamagedEntryError) as caught:
        read(text_of(content))
    error = caught.value
    assert error.rule == "in its manifest, spec and attrs must hold canonical JSON"
    assert f"manifest.entries.{name}.{field}.deep[1] {found}" in str(error.found)
    assert isinstance(error.__cause__, TypeError if value is None else ValueError)


@pytest.mark.parametrize("field", ["spec", "attrs"])
@pytest.mark.parametrize(("lists", "is_taken"), [(28, True), (29, False), (31, False), (32, False)])
def test_free_json_is_as_deep_where_it_is_read_as_where_it_is_written(field, lists, is_taken):
    """32 levels, of which the manifest's own are three and the field itself is the fourth."""
    value = {"n": json.loads("[" * lists + "]" * lists)}
    fields = {"spec": {}, "attrs": {}, field: value}
    made = cache.EntryData(name="a", **fields)
    if is_taken:
        assert getattr(read(single(**fields)).entries["a"], field) == value
        assert getattr(assemble([made]).version.entries["a"], field) == value
    else:
        with pytest.raises(DamagedEntryError, match="JSON is nested deeper than 32 levels"):
            read(single(**fields))
        with pytest.raises(cache.errors.InvalidEntryError) as caught:
            assemble([made])
        assert str(caught.value) == f"entry 'a': {field}: JSON is nested deeper than 32 levels"


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        (b'"n":1', b'"n": 1'),
        (b'"n":1', b'"n":1,"n":1'),
        (b'"n":1', b'"z":1,"n":1'),
        (b'"n":1', b'"n":1.0'),
        (b'"n":1', b'"n":NaN'),
        (b'"n":1', b'"n":01'),
        (b'"n":1', '"n":"\u00e4"'.encode()),
        (b'"sections":{"spans":8,"tables":7}}', b'"sections":{"spans":8,"tables":7}} '),
    ],
)
def test_a_manifest_stands_in_canonical_form(was, becomes):
    text = text_of(manifest())
    assert text.count(was) > 0
    for place in {text.index(was), text.rindex(was)}:
        changed = text[:place] + becomes + text[place + len(was) :]
        with pytest.raises(DamagedEntryError) as caught:
            read(changed)
        assert caught.value.rule == "its manifest must be canonical JSON"
        assert caught.value.found == str(caught.value.__cause__)


def test_totals_are_told_once_all_counts_are_right():
    seen = []
    read(text_of(manifest()), on_totals=seen.append)
    assert seen == [{"spans": 8, "tables": 7}]
    content = copy.deepcopy(manifest())
    content["sections"]["tables"] = 6
    with pytest.raises(DamagedEntryError, match="as long as"):
        read(text_of(content), on_totals=seen.append)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("format_version", 2, 2),
        ("format_version", 0, 0),
        ("format_version", True, True),
        ("format_version", "1", "1"),
        ("format_version", ..., None),
        ("format", "other", "other"),
        ("format", ..., None),
    ],
)
def test_a_manifest_of_another_format_is_told_before_its_rules(field, value, found):
    content = manifest() | {"entries": "of another kind"}
    at(field)(content, value)
    with pytest.raises(FormatVersionError) as caught:
        read(text_of(content))
    assert (caught.value.file, caught.value.supported) == ("the/file", 1)
    assert caught.value.found == found
    assert type(caught.value.found) is type(found)


def test_an_id_that_does_not_fit_is_told_with_both():
    text = text_of(manifest())
    with pytest.raises(DamagedEntryError) as caught:
        parse_version(document_of(text), "1" * 64, "the/file")
    error = caught.value
    assert error.rule == "the SHA-256 of its manifest must be its id"
    assert (error.expected, error.found) == ("1" * 64, hashlib.sha256(text).hexdigest())


def test_a_diff_is_sorted_and_goes_by_content_alone():
    def version(**content):
        made = [
            cache.EntryData(name=name, spec={}, spans={"x": np.array(values, np.int32)})
            for name, values in content.items()
        ]
        return assemble(made).version

    old = version(a=[1], b=[2], c=[3], y=[4], z=[5])
    new = version(b=[2], c=[4], d=[6], e=[7, 7], y=[5], z=[5])
    assert cache.Diff.between(old, new) == cache.Diff(("d", "e"), ("a",), ("c", "y"))
    assert cache.Diff.between(new, old) == cache.Diff(("a",), ("d", "e"), ("c", "y"))
