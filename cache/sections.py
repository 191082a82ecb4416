"""The two flat arrays of a version: reads, decodes and keeps their chunks."""

from collections.abc import Mapping
from concurrent.futures import Executor

import numpy as np

from cache.chunk import MAX_CHUNK_VALUES, ChunkGrid, IntArray, decode_chunk, max_chunk_bytes
from cache.errors import CacheError, DamagedEntryError
from cache.format import SECTIONS, chunk_key
from cache.single_flight import Flight
from cache.source import Source, read_part


class Sections:
    """Values of a version's sections; threads share what is decoded."""

    def __init__(self, source: Source, version_id: str, totals: Mapping[str, int]) -> None:
        self.source = source
        self.version_id = version_id
        self.grids = {section: ChunkGrid(total) for section, total in totals.items()}
        self._lengths = {section: grid.length for section, grid in self.grids.items()}
        self._chunks: Flight[tuple[str, int], IntArray] = Flight()
        # One chunk a section stays decoded, so that entries read in turn decode it once.
        self._latest: dict[str, tuple[int, IntArray]] = {}

    def decode_ahead(self, pool: Executor) -> None:
        """Read the first chunk of each section, and decode it in ``pool``.

        What is wrong is left to ``values``, which meets it again and reports it.
        """
        for section in SECTIONS:
            if self.grids[section].count:
                try:
                    data = self._read(section, 0)
                except CacheError:
                    return
                pool.submit(self._ahead, section, data)

    def values(self, section: str, start: int, stop: int) -> IntArray:
        """Return the values ``start`` to ``stop`` of a section, read-only.

        Raises:
            DamagedEntryError: A chunk is missing, or a check or the decoder refuses it.
            VersionRemovedError: The version was removed meanwhile.
            StoreReadError: A file cannot be read.
        """
        length = self._lengths[section]
        chunks = self.chunk_range(section, start, stop)
        if len(chunks) == 1:
            base = chunks[0] * length
            return self._chunk(section, chunks[0])[start - base : stop - base]
        values = np.empty(stop - start, "<i4")
        for index in chunks:
            base = index * length
            low, high = max(start, base), min(stop, base + length)
            values[low - start : high - start] = self._chunk(section, index)[
                low - base : high - base
            ]
        values.flags.writeable = False
        return values

    def chunk_range(self, section: str, start: int, stop: int) -> range:
        """Return the indices of the chunks that hold the values ``start`` to ``stop``."""
        length = self._lengths[section]
        return range(start // length, -(-stop // length)) if stop > start else range(0)

    def _chunk(self, section: str, index: int) -> IntArray:
        latest = self._latest.get(section)
        if latest is not None and latest[0] == index:
            return latest[1]
        chunk = self._chunks.get(
            (section, index), lambda: self._decode(section, index, self._read(section, index))
        )
        self._latest[section] = (index, chunk)
        return chunk

    def _ahead(self, section: str, data: bytes) -> None:
        try:
            chunk = self._chunks.get((section, 0), lambda: self._decode(section, 0, data))
        except DamagedEntryError:
            return
        self._latest.setdefault(section, (0, chunk))

    def _read(self, section: str, index: int) -> bytes:
        length = self._lengths[section]
        assert length <= MAX_CHUNK_VALUES, "the grid cuts chunks of at most 64 MiB"
        key = chunk_key(self.version_id, section, index)
        return read_part(self.source, key, max_chunk_bytes(length))

    def _decode(self, section: str, index: int, data: bytes) -> IntArray:
        key = chunk_key(self.version_id, section, index)
        return decode_chunk(data, self._lengths[section], self.source.name(key))
