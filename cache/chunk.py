"""Chunks of a cache's arrays: how they are cut and encoded, and what is checked before decoding.

A chunk is Blosc (zstd, byte shuffle) then CRC-32C, both in the zarr v3 core. numcodecs does the
work; going through zarr would cost 1.5 ms an array, and its parsers would meet foreign bytes.
"""

import dataclasses
import struct

import google_crc32c
import numpy as np
from numcodecs import blosc
from numpy.typing import NDArray

from cache.errors import DamagedEntryError

MAX_CHUNK_VALUES = 1 << 24
"""Most int32 values of a chunk: 64 MiB."""

FILL_VALUE = -1
"""What a plain zarr reader returns for a missing chunk: no count, index or span is negative."""

CODEC_LEVEL = 5
"""Of zstd."""

IntArray = NDArray[np.int32]

_BLOSC_HEADER = struct.Struct("<BBBBIII")
_BLOSC_ZSTD = 4
_CRC_BYTES = 4


@dataclasses.dataclass(frozen=True)
class ChunkGrid:
    """How a flat array of ``total`` int32 values is cut into equal chunks of at most 64 MiB."""

    total: int

    @property
    def count(self) -> int:
        """Chunks; none for an empty array."""
        return -(-self.total // MAX_CHUNK_VALUES)

    @property
    def length(self) -> int:
        """Values of each chunk; the last one is padded with the fill value."""
        return -(-self.total // self.count) if self.total else 1


def max_chunk_bytes(length: int) -> int:
    """Return the longest encoded form of a chunk of ``length`` values."""
    return 4 * length + _BLOSC_HEADER.size + _CRC_BYTES


def encode_chunk(values: IntArray) -> bytes:
    """Compress a whole chunk, int32 ``[length]``, and append its CRC-32C.

    Called in a thread that is not the main one, Blosc uses one thread and equal values give equal
    bytes; digests do not depend on that.
    """
    values = values.astype("<i4", copy=False)
    data: bytes = blosc.compress(values, b"zstd", CODEC_LEVEL, 1)
    checksum: int = google_crc32c.value(data)
    return data + checksum.to_bytes(_CRC_BYTES, "little")


def check_chunk(data: bytes, length: int, file: str) -> None:
    """Check an encoded chunk's CRC-32C and Blosc header against what the manifest claims.

    Raises:
        DamagedEntryError: Before anything is decoded or allocated.
    """
    if len(data) < _BLOSC_HEADER.size + _CRC_BYTES:
        raise DamagedEntryError(file, "it is cut short", found=f"{len(data)} bytes")
    stored = int.from_bytes(data[-_CRC_BYTES:], "little")
    computed = google_crc32c.value(data[:-_CRC_BYTES])
    if stored != computed:
        raise DamagedEntryError(file, "its CRC-32C must fit", expected=stored, found=computed)
    version, _, flags, typesize, nbytes, blocksize, cbytes = _BLOSC_HEADER.unpack_from(data)
    claims = {
        "Blosc format": (2, version),
        "codec (4 is zstd)": (_BLOSC_ZSTD, flags >> 5),
        "filter (1 is byte shuffle)": (1, flags & 0b101),
        "value bytes": (4, typesize),
        "decoded bytes": (4 * length, nbytes),
        "encoded bytes": (len(data) - _CRC_BYTES, cbytes),
    }
    for what, (expected, found) in claims.items():
        if expected != found:
            raise DamagedEntryError(
                file, f"its Blosc header must name the {what}", expected=expected, found=found
            )
    if not 0 < blocksize <= nbytes:
        raise DamagedEntryError(
            file, "its Blosc block must fit the chunk", expected=f"1 to {nbytes}", found=blocksize
        )
    if flags & 0b10:
        # Bit 1: the values are stored as they are, behind the header.
        if cbytes != nbytes + _BLOSC_HEADER.size:
            raise DamagedEntryError(
                file, "a stored Blosc frame must hold its values", expected=nbytes, found=cbytes
            )
        return
    blocks = -(-nbytes // blocksize)
    first = _BLOSC_HEADER.size + 4 * blocks
    if first > cbytes:
        raise DamagedEntryError(file, "its Blosc blocks must lie inside it", found=blocks)
    starts = np.frombuffer(data, "<i4", blocks, _BLOSC_HEADER.size)
    if int(starts.min()) < first or int(starts.max()) > cbytes - 4:
        raise DamagedEntryError(file, "its Blosc blocks must lie inside it")


def decode_chunk(data: bytes, length: int, file: str) -> IntArray:
    """Check and decompress a chunk.

    Args:
        data: The encoded chunk.
        length: Values that the manifest claims for it.
        file: What to name in an error.

    Returns:
        Read-only int32 ``[length]``.

    Raises:
        DamagedEntryError: A check or the decoder refuses it.
    """
    check_chunk(data, length, file)
    values = np.empty(length, "<i4")
    try:
        blosc.decompress(memoryview(data)[:-_CRC_BYTES], values)
    except (RuntimeError, ValueError) as error:
        raise DamagedEntryError(file, "Blosc must decode it", found=str(error)) from error
    values.flags.writeable = False
    return values
