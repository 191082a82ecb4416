"""A store of versions: open, list, load, publish, choose, remove, compare, verify."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from cache.address import is_url
from cache.advice import how_to_build
from cache.atomic import STALE_S
from cache.entry import Entry, EntryData
from cache.errors import (
    CacheError,
    StoreWriteError,
    VersionNotFoundError,
)
from cache.format import OLD_SIDECARS, SIDECARS, is_version_id
from cache.place import followed
from cache.reader import VersionReader, open_and_load, read_version
from cache.source import FolderSource, Source
from cache.sweep import GcReport, collect
from cache.unpublished import assemble
from cache.verify import Finding, findings_of, lost_current
from cache.version import Diff, Version, VersionInfo
from cache.writer import StoreWriter

MIN_PREFIX = 4
"""Fewest digits by which a version may be named."""

GC_MIN_AGE_S = STALE_S
"""Seconds for which ``gc`` leaves a version or a leftover alone: somebody may be at it."""


class Store:
    """Versions of named integer arrays; made by ``open_store``.

    ``current`` is read once, when the store is opened, so that a program that goes on loading
    while another one publishes stays with one version; this store's own ``publish`` and ``use``
    move it.
    """

    def __init__(self, source: Source, current: str | None, *, writable: bool) -> None:
        self.source = source
        self._current = current
        self._writable = writable
        self._readers: dict[str, VersionReader] = {}

    @property
    def location(self) -> str:
        """The folder, zip or URL."""
        return self.source.location

    @property
    def current(self) -> str | None:
        """The id of the version that is loaded when none is named, None in a new store."""
        return self._current

    def versions(self) -> list[VersionInfo]:
        """Return a line for each version; the newest first in a folder, sorted by id elsewhere.

        Raises:
            NotListableError: The store cannot list.
            StoreReadError: It cannot be read.
        """
        lines = []
        for version_id in self.source.version_ids():
            size = sum(self.source.file_sizes(version_id).values())
            try:
                entries, damage = len(self._reader(version_id).version.entries), ""
            except VersionNotFoundError:
                continue
            except CacheError as error:
                entries, damage = 0, str(error)
            is_current = version_id == self._current
            lines.append(VersionInfo(version_id, entries, size, is_current, damage))
        if self._current is not None and not any(line.is_current for line in lines):
            # Unless a gc came between the two looks at the store.
            lost = lost_current(self.source)
            if lost is not None and lost.found == self._current:
                lines.append(VersionInfo(self._current, 0, 0, True, str(lost)))
        return lines

    def version(self, id_or_prefix: str | None = None) -> Version:
        """Return a version's manifest.

        Args:
            id_or_prefix: An id, its first digits (four or more), or None for the current version.

        Raises:
            VersionNotFoundError: None or several are meant.
            NotListableError: A prefix was given and the store cannot list.
            DamagedEntryError: The manifest is not what was published.
            FormatVersionError: It is of another format version.
        """
        return self._reader(self.resolve(id_or_prefix)).version

    def resolve(self, id_or_prefix: str | None = None) -> str:
        """Return the id that ``version`` would read; a full id is not looked up.

        Raises:
            VersionNotFoundError: None or several are meant.
            NotListableError: A prefix was given and the store cannot list.
        """
        if id_or_prefix is None:
            if self._current is None:
                how = how_to_build(self.location)
                msg = f"{self.location} has no current version; `use` one, or {how}"
                raise VersionNotFoundError("current", msg)
            return self._current
        if is_version_id(id_or_prefix):
            return id_or_prefix
        known = self.source.version_ids()
        found = [version for version in known if version.startswith(id_or_prefix)]
        if len(found) != 1 or len(id_or_prefix) < MIN_PREFIX:
            rule = f"{len(found)} versions start with {id_or_prefix!r}"
            if len(id_or_prefix) < MIN_PREFIX:
                rule = f"a version is named by {MIN_PREFIX} digits or more, found {id_or_prefix!r}"
            shown = ", ".join(version[:12] for version in known) or "none"
            msg = f"{rule}; {self.location} holds: {shown}"
            raise VersionNotFoundError(id_or_prefix, msg, known)
        return found[0]

    def load(self, name: str, version: str | None = None) -> Entry:
        """Return a verified entry; all threads share one reading of it.

        Args:
            name: The entry's name.
            version: As in ``version``.

        Returns:
            The entry; its arrays are read-only views.

        Raises:
            EntryNotFoundError: The version has no such entry.
            VersionNotFoundError: There is no such version, or it was removed meanwhile.
            DamagedEntryError: What is stored is not what was published; the file is named.
            FormatVersionError: The version is of another format version.
            StoreReadError: A file cannot be read.
        """
        return self._reader(self.resolve(version)).load(name)

    def load_all(self, version: str | None = None) -> dict[str, Entry]:
        """Return all entries of a version, verified, in the order of their names.

        Args:
            version: As in ``version``.

        Returns:
            The entries by name.

        Raises:
            VersionNotFoundError: There is no such version, or it was removed meanwhile.
            DamagedEntryError: What is stored is not what was published; the file is named.
            FormatVersionError: The version is of another format version.
            StoreReadError: A file cannot be read.
        """
        version_id = self.resolve(version)
        reader = self._readers.get(version_id)
        if reader is None:
            fresh, entries = open_and_load(self.source, version_id)
            reader = self._readers.setdefault(version_id, fresh)
            if reader is fresh:
                return entries
        return reader.load_all()

    def publish(
        self,
        entries: Iterable[EntryData],
        *,
        make_current: bool = True,
        on_damage: Callable[[CacheError], None] | None = None,
    ) -> str:
        """Write a version, whole or not at all.

        Args:
            entries: All of the version's entries, in any order.
            make_current: Whether it becomes the version that is loaded when none is named.
            on_damage: Called with what is wrong when the version is there already and is damaged,
                before it is replaced; None refuses that.

        Returns:
            The version's id. Equal content has an equal id and is not written twice.

        Raises:
            InvalidEntryError: An entry breaks a rule of the format.
            StoreWriteError: The store is read-only, or the disk refuses; nothing is left behind.
            DamagedEntryError: The version is there already and is damaged, and ``on_damage`` is
                None; the folder to delete is named.
            StoreReadError: The same of a version that cannot be read.
        """
        new = assemble(entries)
        self.writer().publish(new, make_current=make_current, on_damage=on_damage)
        # Its reader may hold chunks of a damaged version that was replaced.
        self._readers.pop(new.version.id, None)
        if make_current:
            self._current = new.version.id
        return new.version.id

    def use(self, id_or_prefix: str) -> str:
        """Make a published version the current one.

        Returns:
            Its id.

        Raises:
            VersionNotFoundError: There is no such version.
            DamagedEntryError: Its manifest is damaged.
            StoreWriteError: The store is read-only, or the disk refuses.
        """
        version = read_version(self.source, self.resolve(id_or_prefix))
        self.writer().finish(version.id)
        self._current = version.id
        return version.id

    def gc(self, keep: int, *, min_age_s: int = GC_MIN_AGE_S) -> GcReport:
        """Remove old versions, their sidecars, and what killed processes left beside the store.

        Args:
            keep: How many versions to keep, the newest ones; the current one stays in any case.
            min_age_s: Seconds; younger versions, leftovers and sidecars of no version stay.

        Returns:
            What was removed.

        Raises:
            StoreWriteError: The store is read-only, another gc runs, or the disk refuses.
            StoreReadError: The store cannot be read.
            ValueError: ``keep`` is below 1.
        """
        if keep < 1:
            msg = f"keep must be 1 or more, found {keep}"
            raise ValueError(msg)
        report = collect(self.writer(), keep, time.time() - min_age_s)
        for version in report.removed:
            self._readers.pop(version, None)
        return report

    def diff(self, a: str | None, b: str | None) -> Diff:
        """Return the entries that version ``b`` adds to, lacks of, or changes in version ``a``.

        Raises:
            VersionNotFoundError: There is no such version.
            DamagedEntryError: A manifest is damaged.
        """
        return Diff.between(self.version(a), self.version(b))

    def verify(self, version: str | None = None) -> list[Finding]:
        """Read everything again from the disk and check every digest.

        Args:
            version: As in ``version``; None stands for all versions, or for the current one
                where the store cannot list.

        Returns:
            What differs, each with its file; empty when all is as it was published.

        Raises:
            VersionNotFoundError: There is no such version.
            StoreReadError: A file cannot be read.
        """
        wanted = None if version is None else self.resolve(version)
        return findings_of(self.source, wanted)

    def strangers(self) -> list[str]:
        """Return the paths of what stands in the store and does not belong there.

        No reader looks at it, so that it is no damage; none is found where the store cannot list.

        Raises:
            StoreReadError: The store cannot be read.
        """
        return self.source.strangers()

    def sidecar_dir(self, version_id: str) -> Path:
        """Return the folder to write what is known of a version but no part of it.

        Certificates and artifacts stand there, beside the store; they never change the id. The
        folder need not exist.

        Raises:
            StoreWriteError: The store is behind a URL and has no folder beside it.
        """
        return self._beside() / SIDECARS / version_id

    def find_sidecar(self, version_id: str, name: str) -> Path:
        """Return a file of ``sidecar_dir`` to read; one that an earlier release wrote, if need be.

        The file need not exist.

        Raises:
            StoreWriteError: The store is behind a URL and has no folder beside it.
        """
        new, old = (self._beside() / top / version_id / name for top in (SIDECARS, OLD_SIDECARS))
        return old if old.exists() and not new.exists() else new

    def _beside(self) -> Path:
        if is_url(self.location):
            msg = f"{self.location} has no folder beside it; pull it first"
            raise StoreWriteError(self.location, msg)
        return followed(Path(self.location)).absolute().parent

    def reader(self, id_or_prefix: str | None = None) -> VersionReader:
        """Return the reader of a version, for shipping its files.

        Raises:
            VersionNotFoundError: There is no such version.
            DamagedEntryError: Its manifest is damaged.
        """
        return self._reader(self.resolve(id_or_prefix))

    def check_writable(self) -> None:
        """Try what a publish does at its end, before work that would be in vain.

        Raises:
            StoreWriteError: The store is read-only, or the disk refuses.
        """
        self.writer().check()

    def writer(self) -> StoreWriter:
        """Return what writes into the store's folder.

        Raises:
            StoreWriteError: The store was opened for reading, or is a zip or behind a URL.
        """
        if not isinstance(self.source, FolderSource):
            msg = f"{self.location} is read-only: unpack or pull it into a .zarr folder first"
            raise StoreWriteError(self.location, msg)
        if not self._writable:
            msg = f"{self.location} was opened for reading: open it with writable=True"
            raise StoreWriteError(self.location, msg)
        return StoreWriter(self.source)

    def _reader(self, version_id: str) -> VersionReader:
        reader = self._readers.get(version_id)
        if reader is None:
            fresh = VersionReader(self.source, read_version(self.source, version_id))
            # setdefault keeps the first of two threads' readers, so that they share its entries.
            reader = self._readers.setdefault(version_id, fresh)
        return reader
