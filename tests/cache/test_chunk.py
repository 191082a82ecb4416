"""The checks of an encoded chunk: what each says, and the last value that it lets through."""

import struct

import google_crc32c
import numpy as np
import pytest

from cache import chunk
from cache.chunk import check_chunk, decode_chunk, encode_chunk, max_chunk_bytes
from cache.errors import DamagedEntryError

HEADER = "its Blosc header must name the "
INSIDE = "its Blosc blocks must lie inside it"


def signed(frame):
    return bytes(frame) + google_crc32c.value(bytes(frame)).to_bytes(4, "little")


def frame(count=1, *, size=None, blocksize=None, nbytes=4000, starts=None, flags=0x91):
    """A frame of 1000 values in ``count`` blocks, whose bodies are zeros."""
    blocksize = -(-nbytes // count) if blocksize is None else blocksize
    size = 16 + 4 * count + 40 if size is None else size
    starts = [16 + 4 * count] * count if starts is None else starts
    head = struct.pack("<BBBBIII", 2, 1, flags, 4, nbytes, blocksize, size)
    data = head + struct.pack(f"<{len(starts)}i", *starts)
    return signed(data + bytes(size - len(data)))


def refusal(data, length=1000):
    with pytest.raises(DamagedEntryError) as caught:
        check_chunk(data, length, "the/file")
    assert caught.value.file == "the/file"
    return caught.value.rule, caught.value.expected, caught.value.found


def patched(offset, form, value):
    data = bytearray(frame()[:-4])
    struct.pack_into(form, data, offset, value)
    return signed(data)


def test_a_frame_that_fits_passes():
    for count in (1, 2, 7, 10):
        check_chunk(frame(count), 1000, "f")


@pytest.mark.parametrize(
    ("offset", "form", "value", "told"),
    [
        (0, "<B", 1, (HEADER + "Blosc format", 2, 1)),
        (0, "<B", 3, (HEADER + "Blosc format", 2, 3)),
        (2, "<B", 0x71, (HEADER + "codec (4 is zstd)", 4, 3)),
        (2, "<B", 0xB1, (HEADER + "codec (4 is zstd)", 4, 5)),
        (2, "<B", 0x90, (HEADER + "filter (1 is byte shuffle)", 1, 0)),
        (2, "<B", 0x94, (HEADER + "filter (1 is byte shuffle)", 1, 4)),
        (2, "<B", 0x95, (HEADER + "filter (1 is byte shuffle)", 1, 5)),
        (3, "<B", 2, (HEADER + "value bytes", 4, 2)),
        (3, "<B", 8, (HEADER + "value bytes", 4, 8)),
        (4, "<I", 3999, (HEADER + "decoded bytes", 4000, 3999)),
        (4, "<I", 4004, (HEADER + "decoded bytes", 4000, 4004)),
        (12, "<I", 59, (HEADER + "encoded bytes", 60, 59)),
        (12, "<I", 61, (HEADER + "encoded bytes", 60, 61)),
        (8, "<I", 0, ("its Blosc block must fit the chunk", "1 to 4000", 0)),
        (8, "<I", 4001, ("its Blosc block must fit the chunk", "1 to 4000", 4001)),
    ],
)
def test_what_a_header_claims_is_compared(offset, form, value, told):
    assert refusal(patched(offset, form, value)) == told


def test_a_flag_that_says_nothing_of_the_values_is_free():
    check_chunk(patched(2, "<B", 0x99), 1000, "f")


@pytest.mark.parametrize("length", [1, 999, 1001])
def test_a_chunk_is_as_long_as_the_manifest_has_it(length):
    assert refusal(frame(), length) == (HEADER + "decoded bytes", 4 * length, 4000)


@pytest.mark.parametrize("size", [0, 4, 19])
def test_what_is_shorter_than_a_header_is_cut(size):
    assert refusal(frame()[:size]) == ("it is cut short", None, f"{size} bytes")


def test_what_is_as_long_as_a_header_is_looked_at():
    rule, _, _ = refusal(frame()[:20])
    assert rule == "its CRC-32C must fit"
    assert refusal(signed(struct.pack("<BBBBIII", 2, 1, 0x91, 4, 4000, 4000, 16))) == (
        INSIDE,
        None,
        1,
    )


def test_both_checksums_are_told():
    data = bytearray(frame())
    stored = int.from_bytes(data[-4:], "little")
    data[30] ^= 1
    computed = google_crc32c.value(bytes(data[:-4]))
    assert refusal(bytes(data)) == ("its CRC-32C must fit", stored, computed)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("at", [0, -1])
def test_each_block_begins_behind_the_list_and_before_the_end(count, at):
    first = 16 + 4 * count
    size = first + 40

    def with_start(start):
        starts = [first + 8] * count
        starts[at] = start
        return frame(count, starts=starts)

    for start in (first, first + 1, size - 5, size - 4):
        check_chunk(with_start(start), 1000, "f")
    for start in (first - 1, 0, -1, -(2**31), size - 3, size, 2**31 - 1):
        assert refusal(with_start(start)) == (INSIDE, None, None)


def test_the_list_of_blocks_lies_inside():
    """Blocks of 400 bytes: ten starts, 56 bytes with the header."""
    starts = [56] * 10
    check_chunk(frame(10, blocksize=400, starts=starts, size=60), 1000, "f")
    # The last block, of one value, counts too.
    assert refusal(frame(10, blocksize=399, starts=[60] * 10, size=59)) == (INSIDE, None, 11)
    assert refusal(frame(10, blocksize=1, starts=starts, size=96)) == (INSIDE, None, 4000)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_stored_frame_of_another_length_is_told(more):
    data = frame(flags=0x93, size=4016 + more)
    told = ("a stored Blosc frame must hold its values", 4000, 4016 + more)
    assert refusal(data) == told
    check_chunk(frame(flags=0x93, size=4016), 1000, "f")


def test_what_the_decoder_refuses_is_typed(monkeypatch):
    data = frame()
    with pytest.raises(DamagedEntryError) as caught:
        decode_chunk(data, 1000, "the/file")
    assert caught.value.rule == "Blosc must decode it"
    assert caught.value.file == "the/file"
    for kind in (RuntimeError, ValueError):
        cause = kind("refused")

        def refuse(*_arguments, cause=cause):
            raise cause

        monkeypatch.setattr(chunk.blosc, "decompress", refuse)
        with pytest.raises(DamagedEntryError) as caught:
            decode_chunk(data, 1000, "the/file")
        assert (caught.value.found, caught.value.__cause__) == ("refused", cause)


@pytest.mark.parametrize("form", ["<i4", ">i4"])
def test_values_are_stored_with_their_lowest_byte_first(form):
    values = np.array([1, -2, 2**31 - 1, -(2**31)], form)
    assert decode_chunk(encode_chunk(values), 4, "f").tolist() == values.tolist()


def test_the_longest_chunk_is_one_that_cannot_be_compressed():
    noise = np.random.default_rng(0).integers(-(2**31), 2**31, 10_000).astype(np.int32)
    assert len(encode_chunk(noise)) == max_chunk_bytes(10_000) == 40_000 + 16 + 4
    assert max_chunk_bytes(0) == 20
