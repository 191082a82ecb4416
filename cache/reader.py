"""Reads one version out of a source: document, chunks, verified entries."""

import difflib
import hashlib
from collections.abc import Iterator

import numpy as np

from cache.entry import Entry
from cache.errors import (
    HOW_TO_BUILD,
    DamagedEntryError,
    EntryNotFoundError,
    VersionNotFoundError,
)
from cache.flight import Flight
from cache.layout import (
    MAX_CHUNK_VALUES,
    MAX_DOCUMENT_BYTES,
    SECTIONS,
    ChunkGrid,
    IntArray,
    array_document,
    array_key,
    chunk_key,
    decode_chunk,
    max_chunk_bytes,
    version_key,
)
from cache.source import Source
from cache.version import EntryInfo, Version, parse_version


def read_version(source: Source, version_id: str) -> Version:
    """Read and check the document of a version's group.

    Raises:
        VersionNotFoundError: There is none.
        DamagedEntryError: It is not what was published under that id.
        FormatVersionError: It is of another format version.
        StoreReadError: It cannot be read.
    """
    key = version_key(version_id)
    document = source.read(key, MAX_DOCUMENT_BYTES)
    if document is None:
        raise VersionNotFoundError(
            version_id,
            f"{source.location} holds no version {version_id}; `versions` lists what it holds, "
            f"{HOW_TO_BUILD}",
        )
    return parse_version(document, version_id, source.name(key))


class VersionReader:
    """Loads the entries of one version; threads share what is loaded."""

    def __init__(
        self, source: Source, version: Version, *, documents_are_checked: bool = False
    ) -> None:
        self.source = source
        self.version = version
        self._lengths = {
            section: ChunkGrid(total).length for section, total in version.totals.items()
        }
        self._entries: Flight[str, Entry] = Flight()
        self._chunks: Flight[tuple[str, int], IntArray] = Flight()
        # One chunk a section stays decoded, so that entries read in turn decode it once.
        self._latest: dict[str, IntArray] = {}
        self._documents_are_checked = documents_are_checked

    def load(self, name: str) -> Entry:
        """Return an entry whose digest was checked when it was read.

        Raises:
            EntryNotFoundError: The version has no such entry.
            DamagedEntryError: What is stored is not what was published; the file is named.
            StoreReadError: A file cannot be read.
        """
        info = self.version.entries.get(name)
        if info is None:
            nearest = _nearest(name, self.version)
            raise EntryNotFoundError(name, self.version.id, nearest)
        return self._entries.get(name, lambda: self._read(info))

    def load_all(self) -> dict[str, Entry]:
        """Return every entry, verified, in the order of the names.

        Raises:
            DamagedEntryError: What is stored is not what was published; the file is named.
            StoreReadError: A file cannot be read.
        """
        return {name: self.load(name) for name in self.version.entries}

    def check_documents(self) -> None:
        """Check the documents of the sections' arrays, which plain zarr readers go by.

        Raises:
            DamagedEntryError: One is missing or says something else than the manifest.
            StoreReadError: One cannot be read.
        """
        if not self._documents_are_checked:
            for section in SECTIONS:
                self.check_document(section)
            self._documents_are_checked = True

    def check_document(self, section: str) -> None:
        """Check the document of one section's array.

        Raises:
            DamagedEntryError: It is missing or says something else than the manifest.
            StoreReadError: It cannot be read.
        """
        key = array_key(self.version.id, section)
        expected = array_document(self.version.totals[section])
        found = self.source.read(key, len(expected))
        if found is None:
            raise DamagedEntryError(self.source.name(key), "the file is missing")
        if found != expected:
            raise DamagedEntryError(
                self.source.name(key),
                "it must be the canonical document of its array",
                expected=expected.decode(),
                found=found.decode(errors="replace"),
            )

    def file_keys(self) -> Iterator[str]:
        """Yield the keys of the version's files: chunks, arrays' documents, its document last."""
        for section in SECTIONS:
            for index in range(ChunkGrid(self.version.totals[section]).count):
                yield chunk_key(self.version.id, section, index)
        for section in SECTIONS:
            yield array_key(self.version.id, section)
        yield version_key(self.version.id)

    def entry_files(self, info: EntryInfo) -> list[str]:
        """Return the names of the chunk files that hold an entry."""
        return [
            self.source.name(chunk_key(self.version.id, section, index))
            for section in SECTIONS
            for index in self._chunk_range(section, *info.extents[section])
        ]

    def _read(self, info: EntryInfo) -> Entry:
        self.check_documents()
        digest = hashlib.sha256()
        values: dict[str, IntArray] = {}
        for section in SECTIONS:
            values[section] = self._values(section, *info.extents[section])
            digest.update(values[section].data)
        if digest.hexdigest() != info.sha256:
            raise DamagedEntryError(
                ", ".join(self.entry_files(info)) or self.source.name(version_key(self.version.id)),
                "the SHA-256 of its values must be the manifest's",
                expected=info.sha256,
                found=digest.hexdigest(),
                entry=info.name,
            )
        return Entry(
            name=info.name,
            version=self.version.id,
            spec=info.spec,
            attrs=info.attrs,
            sha256=info.sha256,
            shapes=info.shapes,
            values=values,
        )

    def _chunk_range(self, section: str, start: int, stop: int) -> range:
        length = self._lengths[section]
        return range(start // length, -(-stop // length)) if stop > start else range(0)

    def _values(self, section: str, start: int, stop: int) -> IntArray:
        length = self._lengths[section]
        chunks = self._chunk_range(section, start, stop)
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

    def _chunk(self, section: str, index: int) -> IntArray:
        chunk = self._chunks.get((section, index), lambda: self._decode(section, index))
        self._latest[section] = chunk
        return chunk

    def _decode(self, section: str, index: int) -> IntArray:
        length = self._lengths[section]
        assert length <= MAX_CHUNK_VALUES, "the grid cuts chunks of at most 64 MiB"
        key = chunk_key(self.version.id, section, index)
        data = self.source.read(key, max_chunk_bytes(length))
        if data is None:
            raise DamagedEntryError(self.source.name(key), "the file is missing")
        return decode_chunk(data, length, self.source.name(key))


def _nearest(name: str, version: Version) -> list[str]:
    return difflib.get_close_matches(name, version.entries, n=3, cutoff=0.4)
