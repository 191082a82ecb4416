import struct

import google_crc32c
import numpy as np
import pytest

from cache import chunk
from cache.chunk import (
    MAX_CHUNK_VALUES,
    ChunkGrid,
    check_chunk,
    decode_chunk,
    encode_chunk,
    max_chunk_bytes,
)
from cache.errors import DamagedEntryError, FormatVersionError
from cache.format import is_version_id, manifest_of, parse_root, root_document, version_document

ID = "ab" * 32


@pytest.mark.parametrize(
    "text", [ID[:-1], ID + "a", ID + "\n", "\n" + ID, ID.upper(), "g" + ID[1:], "", "٣" + ID[1:]]
)
def test_an_id_is_64_lower_case_digits_and_nothing_else(text):
    assert is_version_id(ID)
    assert not is_version_id(text)


def with_checksum(frame):
    return bytes(frame) + google_crc32c.value(bytes(frame)).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("total", "count", "length"),
    [
        (0, 0, 1),
        (1, 1, 1),
        (1000, 1, 1000),
        (MAX_CHUNK_VALUES, 1, MAX_CHUNK_VALUES),
        (MAX_CHUNK_VALUES + 1, 2, MAX_CHUNK_VALUES // 2 + 1),
        (10 * MAX_CHUNK_VALUES - 7, 10, MAX_CHUNK_VALUES),
    ],
)
def test_the_grid_cuts_equal_chunks_of_at_most_64_mib(total, count, length):
    grid = ChunkGrid(total)
    assert (grid.count, grid.length) == (count, length)
    assert grid.count * grid.length >= total
    assert 4 * grid.length <= 64 << 20


@pytest.mark.parametrize("length", [1, 3, 4, 5, 31, 32, 33, 1000, 100_000])
@pytest.mark.parametrize("kind", ["zeros", "ramp", "noise"])
def test_chunks_decode_to_what_was_encoded(length, kind):
    rng = np.random.default_rng(length)
    values = {
        "zeros": np.zeros(length, np.int32),
        "ramp": np.arange(length, dtype=np.int32),
        "noise": rng.integers(-(2**31), 2**31, length, dtype=np.int64).astype(np.int32),
    }[kind]
    data = encode_chunk(values)
    assert len(data) <= max_chunk_bytes(length)
    found = decode_chunk(data, length, "f")
    np.testing.assert_array_equal(found, values)
    assert found.dtype == np.int32
    assert not found.flags.writeable


def test_a_chunk_that_claims_gigabytes_is_refused_before_it_is_decoded(monkeypatch):
    """103 kB that claim 1.9 GB, under a checksum that fits."""

    def decoder(*_arguments):
        raise AssertionError("the decoder must not be called")

    monkeypatch.setattr(chunk.blosc, "decompress", decoder)
    frame = bytearray(103_000)
    struct.pack_into("<BBBBIII", frame, 0, 2, 1, 0x91, 4, 1_900_000_000, 1 << 20, len(frame))
    with pytest.raises(DamagedEntryError, match=r"decoded bytes \(expected 4096, found 1900000000"):
        decode_chunk(with_checksum(frame), 1024, "f")


@pytest.mark.parametrize(
    ("offset", "form", "value", "rule"),
    [
        (0, "<B", 3, "Blosc format"),
        (2, "<B", 0x11, "codec"),
        (2, "<B", 0x95, "filter"),
        (2, "<B", 0x90, "filter"),
        (3, "<B", 1, "value bytes"),
        (4, "<I", 4004, "decoded bytes"),
        (8, "<I", 0, "block must fit"),
        (8, "<I", 2**32 - 1, "block must fit"),
        (8, "<I", 1, "blocks must lie inside"),
        (12, "<I", 17, "encoded bytes"),
        (16, "<I", 0, "blocks must lie inside"),
        (16, "<I", 2**31 - 1, "blocks must lie inside"),
        (16, "<I", 2**32 - 1, "blocks must lie inside"),
        (2, "<B", 0x93, "stored Blosc frame"),
    ],
)
def test_a_hostile_header_is_refused_by_name(offset, form, value, rule):
    frame = bytearray(encode_chunk(np.arange(1000, dtype=np.int32))[:-4])
    struct.pack_into(form, frame, offset, value)
    with pytest.raises(DamagedEntryError, match=rule) as caught:
        check_chunk(with_checksum(frame), 1000, "the/file")
    assert caught.value.file == "the/file"
    assert caught.value.exit_code == 3


def test_a_block_must_begin_before_the_last_four_bytes():
    frame = bytearray(encode_chunk(np.arange(1000, dtype=np.int32))[:-4])
    for back in (0, 1, 3):
        struct.pack_into("<I", frame, 16, len(frame) - back)
        with pytest.raises(DamagedEntryError, match="blocks must lie inside"):
            check_chunk(with_checksum(frame), 1000, "f")


@pytest.mark.parametrize("more", [-16, -4, 0, 1, 4])
def test_a_stored_frame_is_as_long_as_its_values(more):
    values = np.arange(1000, dtype="<i4")
    size = 4016 + more
    header = struct.pack("<BBBBIII", 2, 1, 0x93, 4, 4000, 4000, size)
    data = with_checksum((header + values.tobytes() + bytes(16))[:size])
    if more:
        with pytest.raises(DamagedEntryError, match="stored Blosc frame must hold its values"):
            check_chunk(data, 1000, "f")
    else:
        np.testing.assert_array_equal(decode_chunk(data, 1000, "f"), values)


def test_cut_and_flipped_chunks_are_refused():
    data = encode_chunk(np.arange(1000, dtype=np.int32))
    for cut in (0, 3, 16, 19):
        with pytest.raises(DamagedEntryError, match="cut short"):
            check_chunk(data[:cut], 1000, "f")
    for cut in (20, len(data) - 5, len(data) - 1):
        with pytest.raises(DamagedEntryError, match="CRC-32C"):
            check_chunk(data[:cut], 1000, "f")
    with pytest.raises(DamagedEntryError, match="CRC-32C"):
        check_chunk(data + b"\0\0\0", 1000, "f")


def test_the_root_reads_back():
    assert parse_root(root_document(None), "f") is None
    assert parse_root(root_document(ID), "f") == ID


def test_the_root_may_be_spaced_as_another_writer_likes():
    text = root_document(ID).replace(b",", b" ,\n ").replace(b":", b" : ")
    assert parse_root(text, "f") == ID


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"nonsense",
        b"[" * 60_000,
        b'{"attributes":[]}',
        root_document(ID)[:-1],
        root_document(ID).replace(b"zarr_format", b"zarr_formal"),
        root_document(ID).replace(b'"group"', b'"array"'),
        root_document(ID).replace(b":3", b":2"),
        root_document(ID).replace(b"current", b"latest"),
        root_document(ID).replace(ID.encode(), b"../evil"),
        root_document(ID).replace(ID.encode(), ID[:-1].encode()),
        root_document(ID).replace(b'"current"', b'"extra":1,"current"'),
    ],
)
def test_a_damaged_root_is_refused(text):
    with pytest.raises(DamagedEntryError, match="f is damaged"):
        parse_root(text, "f")


def test_a_root_of_version_2_is_refused_naming_both():
    text = root_document(ID).replace(b'"format_version":1', b'"format_version":2')
    with pytest.raises(FormatVersionError, match="format 2, this reader knows format 1") as caught:
        parse_root(text, "f")
    assert (caught.value.found, caught.value.supported) == (2, 1)


@pytest.mark.parametrize("version", [b"true", b'"1"', b"0", b"-1"])
def test_a_format_version_must_be_the_integer(version):
    text = root_document(ID).replace(b'"format_version":1', b'"format_version":' + version)
    with pytest.raises(FormatVersionError, match="this reader knows format 1"):
        parse_root(text, "f")


def test_another_zarr_group_is_no_cache():
    text = b'{"attributes":{"title":"climate"},"node_type":"group","zarr_format":3}'
    with pytest.raises(FormatVersionError, match=r"is no cache .* another program's"):
        parse_root(text, "f")


def test_the_version_document_wraps_the_manifest():
    document = version_document(b'{"a":1}')
    assert document == (b'{"attributes":{"manifest":{"a":1}},"node_type":"group","zarr_format":3}')
    assert manifest_of(document, "f") == b'{"a":1}'
    with pytest.raises(DamagedEntryError, match="canonical document"):
        manifest_of(document + b" ", "f")
