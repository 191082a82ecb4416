"""The root of a cache: what it may hold, and what is told and advised of one that is damaged."""

import json

import pytest

from cache.chunk import FILL_VALUE, MAX_CHUNK_VALUES
from cache.errors import DamagedEntryError, FormatVersionError
from cache.format import (
    MAX_DOCUMENT_BYTES,
    MAX_ROOT_BYTES,
    MAX_SECTION_VALUES,
    array_document,
    array_key,
    check_format,
    chunk_key,
    manifest_of,
    parse_root,
    root_document,
    version_document,
    version_key,
)

ID = "0123456789abcdef" * 4
REMEDY = "Delete this one file, then pull, unpack or build: the versions beside it stay"
CURRENT = "current must be 64 hexadecimal digits"
NOTHING_ELSE = "it must hold the format's name and version, and current, and nothing else"
GROUP = "it must be the document of a zarr group with attributes"


def root(**changes):
    attributes = {"format": "flex-mask-cache", "format_version": 1, "current": ID}
    document = {"attributes": attributes, "node_type": "group", "zarr_format": 3}
    for key, value in changes.items():
        place = (
            document if key in ("node_type", "zarr_format", "extra", "attributes") else attributes
        )
        place[key] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("data", "rule", "found"),
    [
        (b"", "it must be a JSON document", None),
        (b"{", "it must be a JSON document", None),
        (b"\xff", "it must be a JSON document", None),
        (root(extra=1.5), "it must be a JSON document", "JSON holds '1.5'; integers only"),
        (b"[]", GROUP, None),
        (b"7", GROUP, None),
        (b"{}", GROUP, None),
        (root(attributes=[]), GROUP, None),
        (root(attributes=None), GROUP, None),
        (root(current=ID[:-1]), CURRENT, repr(ID[:-1])),
        (root(current=ID + "0"), CURRENT, repr(ID + "0")),
        (root(current=ID.upper()), CURRENT, repr(ID.upper())),
        (root(current=7), CURRENT, "7"),
        (root(current=[ID]), CURRENT, repr([ID])),
        (root(node_type="array"), NOTHING_ELSE, None),
        (root(zarr_format=2), NOTHING_ELSE, None),
        (root(extra=1), NOTHING_ELSE, None),
        (root(extra=None), NOTHING_ELSE, None),
        (root(extra=10**18), NOTHING_ELSE, None),
        (root(more=1), NOTHING_ELSE, None),
        # A null is no id, and nothing that is written.
        (root(current=None), NOTHING_ELSE, None),
    ],
)
def test_a_damaged_root_is_told_and_may_be_deleted_alone(data, rule, found):
    with pytest.raises(DamagedEntryError) as caught:
        parse_root(data, "m.zarr/zarr.json")
    error = caught.value
    assert (error.file, error.rule) == ("m.zarr/zarr.json", rule)
    if found is not None or rule in (GROUP, NOTHING_ELSE):
        assert error.found == found
    else:
        assert error.found == str(error.__cause__)
    assert str(error).endswith(f"; it is not used. {REMEDY}")


def test_a_root_is_read_however_it_is_spaced_and_ordered():
    for current in (ID, None):
        document = json.loads(root_document(current))
        turned = {key: document[key] for key in reversed(document)}
        turned["attributes"] = dict(reversed(document["attributes"].items()))
        for text in (json.dumps(turned), json.dumps(turned, indent=4), f" {json.dumps(turned)}\n"):
            assert parse_root(text.encode(), "f") == current


def test_the_root_is_written_as_the_format_has_it():
    assert root_document(None) == (
        b'{"attributes":{"format":"flex-mask-cache","format_version":1},'
        b'"node_type":"group","zarr_format":3}'
    )
    assert root_document(ID) == (
        b'{"attributes":{"current":"' + ID.encode() + b'","format":"flex-mask-cache",'
        b'"format_version":1},"node_type":"group","zarr_format":3}'
    )


OTHERS = "it is no cache (flex-mask-cache), but another program's: name the folder of a cache"
OLDER = "read it with the release that wrote it, or build the cache again"


@pytest.mark.parametrize(
    ("attributes", "found", "remedy"),
    [
        ({}, None, OTHERS),
        ({"format": "other", "format_version": 1}, "other", OTHERS),
        ({"format": "flex-mask-cache "}, "flex-mask-cache ", OTHERS),
        ({"format": "other", "format_version": 2}, "other", OTHERS),
        ({"format": "flex-mask-cache"}, None, OLDER),
        *(
            ({"format": "flex-mask-cache", "format_version": version}, version, OLDER)
            for version in (0, 2, -1, "1", True, [1])
        ),
    ],
)
def test_another_format_is_told_with_what_this_reader_knows(attributes, found, remedy):
    with pytest.raises(FormatVersionError) as caught:
        check_format(attributes, "the/file")
    error = caught.value
    assert str(error) == f"the/file is of format {found!r}, this reader knows format 1: {remedy}"
    assert (error.file, error.supported) == ("the/file", 1)
    assert error.found == found
    assert type(error.found) is type(found)
    document = {"attributes": attributes, "node_type": "group", "zarr_format": 3}
    with pytest.raises(FormatVersionError):
        parse_root(json.dumps(document).encode(), "the/file")


def test_a_version_is_found_by_its_keys():
    assert version_key(ID) == f"{ID}/zarr.json"
    assert array_key(ID, "spans") == f"{ID}/spans/zarr.json"
    assert array_key(ID, "tables") == f"{ID}/tables/zarr.json"
    assert chunk_key(ID, "spans", 0) == f"{ID}/spans/c/0"
    assert chunk_key(ID, "tables", 12) == f"{ID}/tables/c/12"


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{}",
        version_document(b"{}")[:-1],
        version_document(b"{}")[1:],
        b" " + version_document(b"{}"),
        version_document(b"{}") + b"\n",
        version_document(b"{}").replace(b":3", b":2"),
        version_document(b"{}").replace(b"group", b"array"),
        version_document(b"{}").replace(b"manifest", b"manifold"),
    ],
)
def test_a_manifest_is_taken_out_of_its_own_document_alone(document):
    with pytest.raises(DamagedEntryError) as caught:
        manifest_of(document, "the/file")
    assert caught.value.rule == "it must be the canonical document of a version's group"
    assert caught.value.file == "the/file"
    for manifest in (b"{}", b"", b'{"a":1}'):
        assert manifest_of(version_document(manifest), "f") == manifest


def test_the_limits_are_those_of_the_format():
    assert MAX_ROOT_BYTES == 65536
    assert MAX_DOCUMENT_BYTES == 16777216
    assert MAX_SECTION_VALUES == 68719476736
    assert MAX_CHUNK_VALUES == 16777216
    assert FILL_VALUE == -1


@pytest.mark.parametrize(
    ("total", "length"),
    [(0, 1), (1, 1), (1000, 1000), (2**24, 2**24), (2**24 + 1, 2**23 + 1)],
)
def test_the_document_of_an_array_is_as_the_format_has_it(total, length):
    assert json.loads(array_document(total)) == {
        "attributes": {},
        "chunk_grid": {"configuration": {"chunk_shape": [length]}, "name": "regular"},
        "chunk_key_encoding": {"configuration": {"separator": "/"}, "name": "default"},
        "codecs": [
            {"configuration": {"endian": "little"}, "name": "bytes"},
            {
                "configuration": {
                    "blocksize": 0,
                    "clevel": 5,
                    "cname": "zstd",
                    "shuffle": "shuffle",
                    "typesize": 4,
                },
                "name": "blosc",
            },
            {"name": "crc32c"},
        ],
        "data_type": "int32",
        "fill_value": -1,
        "node_type": "array",
        "shape": [total],
        "zarr_format": 3,
    }
    text = json.dumps(json.loads(array_document(total)), sort_keys=True, separators=(",", ":"))
    assert array_document(total) == text.encode()
