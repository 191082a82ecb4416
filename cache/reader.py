"""Reads one version out of a source: document, chunks, verified entries."""

import difflib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor

from cache.advice import how_to_build
from cache.chunk import IntArray
from cache.entry import Entry
from cache.errors import (
    CacheError,
    DamagedEntryError,
    EntryNotFoundError,
    VersionNotFoundError,
)
from cache.format import (
    MAX_DOCUMENT_BYTES,
    SECTIONS,
    array_document,
    array_key,
    chunk_key,
    version_key,
)
from cache.sections import Sections
from cache.single_flight import Flight
from cache.source import Source, read_part
from cache.version import EntryInfo, Version, parse_version

_MAX_HELPERS = min(4, os.cpu_count() or 1) - 1
"""Most threads that take digests beside the caller's: hashlib leaves the interpreter's lock."""

_BYTES_A_HELPER = 1 << 20
"""Logical bytes for which one more thread pays."""


def read_version(
    source: Source, version_id: str, on_totals: Callable[[Mapping[str, int]], None] | None = None
) -> Version:
    """Read and check the document of a version's group.

    Args:
        source: Where the bytes are.
        version_id: The version's id.
        on_totals: As in ``parse_version``.

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
            f"{source.location} holds no version {version_id}; `versions` lists what it holds, or "
            f"{how_to_build(source.location)}",
        )
    return parse_version(document, version_id, source.name(key), on_totals)


def open_and_load(source: Source, version_id: str) -> "tuple[VersionReader, dict[str, Entry]]":
    """Read a version and all of its entries; chunks are decoded as the manifest is checked.

    Returns:
        The reader, and what its ``load_all`` returns.

    Raises:
        VersionNotFoundError: There is no such version.
        DamagedEntryError: What is stored is not what was published; the file is named.
        FormatVersionError: It is of another format version.
        StoreReadError: A file cannot be read.
    """
    begun: list[Sections] = []
    with _pool() as pool:

        def begin(totals: Mapping[str, int]) -> None:
            begun.append(Sections(source, version_id, totals))
            begun[0].decode_ahead(pool)

        version = read_version(source, version_id, begin)
        reader = VersionReader(source, version, sections=begun[0])
        return reader, reader.load_all(pool)


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, _MAX_HELPERS), "cache")


class VersionReader:
    """Loads the entries of one version; threads share what is loaded."""

    def __init__(
        self,
        source: Source,
        version: Version,
        *,
        sections: Sections | None = None,
        documents_are_checked: bool = False,
    ) -> None:
        self.source = source
        self.version = version
        self._sections = sections or Sections(source, version.id, version.totals)
        self._entries: Flight[str, Entry] = Flight()
        self._documents_are_checked = documents_are_checked
        self._checking = threading.Lock()

    def load(self, name: str) -> Entry:
        """Return an entry whose digest was checked when it was read.

        Raises:
            EntryNotFoundError: The version has no such entry.
            DamagedEntryError: What is stored is not what was published; the file is named.
            VersionRemovedError: The version was removed since it was opened.
            StoreReadError: A file cannot be read.
        """
        info = self.version.entries.get(name)
        if info is None:
            nearest = _nearest(name, self.version)
            raise EntryNotFoundError(name, self.version.id, nearest)
        return self._entries.get(name, lambda: self._read(info))

    def load_all(self, pool: Executor | None = None) -> dict[str, Entry]:
        """Return every entry, verified, in the order of the names.

        Args:
            pool: Where digests are taken beside this thread; None makes one.

        Raises:
            DamagedEntryError: What is stored is not what was published; the file is named.
            VersionRemovedError: The version was removed since it was opened.
            StoreReadError: A file cannot be read.
        """
        if pool is None:
            with _pool() as own:
                return self.load_all(own)
        self.check_documents()
        nbytes = sum(4 * total for total in self.version.totals.values())
        # Drawn from one iterator, so that a thread that is held up holds no share back.
        names = iter(self.version.entries)
        helpers = min(_MAX_HELPERS, len(self.version.entries) - 1, nbytes // _BYTES_A_HELPER)
        shares = [pool.submit(self._load_each, names) for _ in range(helpers)]
        loaded = self._load_each(names)
        for share in shares:
            loaded |= share.result()
        entries = {}
        for name in self.version.entries:
            entry = loaded[name]
            if isinstance(entry, CacheError):
                raise entry
            entries[name] = entry
        return entries

    def check_documents(self) -> None:
        """Check the documents of the sections' arrays, which plain zarr readers go by.

        Raises:
            DamagedEntryError: One is missing or says something else than the manifest.
            VersionRemovedError: The version was removed since it was opened.
            StoreReadError: One cannot be read.
        """
        with self._checking:
            if not self._documents_are_checked:
                for section in SECTIONS:
                    self.check_document(section)
                self._documents_are_checked = True

    def check_document(self, section: str) -> None:
        """Check the document of one section's array.

        Raises:
            DamagedEntryError: It is missing or says something else than the manifest.
            VersionRemovedError: The version was removed since it was opened.
            StoreReadError: It cannot be read.
        """
        key = array_key(self.version.id, section)
        expected = array_document(self.version.totals[section])
        found = read_part(self.source, key, len(expected))
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
            for index in range(self._sections.grids[section].count):
                yield chunk_key(self.version.id, section, index)
        for section in SECTIONS:
            yield array_key(self.version.id, section)
        yield version_key(self.version.id)

    def entry_files(self, info: EntryInfo) -> list[str]:
        """Return the names of the chunk files that hold an entry."""
        return [
            self.source.name(chunk_key(self.version.id, section, index))
            for section in SECTIONS
            for index in self._sections.chunk_range(section, *info.extents[section])
        ]

    def _load_each(self, names: Iterator[str]) -> dict[str, Entry | CacheError]:
        loaded: dict[str, Entry | CacheError] = {}
        for name in names:
            try:
                loaded[name] = self.load(name)
            except CacheError as error:
                loaded[name] = error
                break
        return loaded

    def _read(self, info: EntryInfo) -> Entry:
        self.check_documents()
        digest = hashlib.sha256()
        values: dict[str, IntArray] = {}
        for section in SECTIONS:
            values[section] = self._sections.values(section, *info.extents[section])
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


def _nearest(name: str, version: Version) -> list[str]:
    return difflib.get_close_matches(name, version.entries, n=3, cutoff=0.4)
