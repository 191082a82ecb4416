"""Writes into a store's folder: publish a version, choose the current one."""

import concurrent.futures
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from cache.atomic import (
    create_file,
    move_folder,
    replace_file,
    staging_folder,
    write_synced,
)
from cache.errors import (
    CacheError,
    DamagedEntryError,
    StoreReadError,
    StoreWriteError,
    VersionNotFoundError,
)
from cache.layout import (
    FILL_VALUE,
    MAX_ROOT_BYTES,
    ROOT_KEY,
    SECTIONS,
    ChunkGrid,
    IntArray,
    array_document,
    array_key,
    chunk_key,
    encode_chunk,
    parse_root,
    root_document,
    version_key,
)
from cache.source import FolderSource
from cache.verify import findings_of
from cache.version import Draft

_ATTEMPTS = 3


class StoreWriter:
    """Changes a store's folder; every change is one rename, so that no lock is needed."""

    def __init__(self, source: FolderSource) -> None:
        self.source = source
        self.folder = source.folder
        self._installed: str | None = None
        self._chosen: str | None = None

    def publish(
        self,
        draft: Draft,
        *,
        make_current: bool,
        on_damage: Callable[[CacheError], None] | None = None,
    ) -> None:
        """Write a drafted version beside the store and rename it into place.

        A damaged version of the same id is replaced by two renames once the good one is on the
        disk: a reader sees the damaged one, none for a moment, then the good one.

        Args:
            draft: The version.
            make_current: Whether readers see it from now on.
            on_damage: Called with what is wrong before a damaged version is replaced; None refuses.

        Raises:
            StoreWriteError: The disk refuses; nothing is left behind.
            DamagedEntryError: The version is there already and is damaged, on_damage is None.
            StoreReadError: The same of a version that cannot be read.
        """
        with self.staging() as staging:
            for _ in range(_ATTEMPTS):
                self._place(draft, staging, on_damage)
                if make_current:
                    self._set_current(draft.version.id, staging)
                else:
                    create_file(self.folder / ROOT_KEY, root_document(None), staging)
                # A gc may have taken an old version of the same id meanwhile: write it again.
                if self._exists(draft.version.id):
                    return
        raise StoreWriteError(
            str(self.folder), f"version {draft.version.id} vanishes as it is published: stop the gc"
        )

    def make_current(self, version: str) -> None:
        """Replace the root's document.

        Raises:
            VersionNotFoundError: The version was removed meanwhile.
            StoreWriteError: The disk refuses.
        """
        with self.staging() as staging:
            before = self.stored_current()
            self._set_current(version, staging)
            if not self._exists(version):
                replace_file(self.folder / ROOT_KEY, root_document(before), staging)
                raise VersionNotFoundError(version, f"version {version} was removed by a gc")

    def stored_current(self) -> str | None:
        """Return the current version's id as the root names it now.

        Raises:
            DamagedEntryError: The root is damaged.
        """
        document = self.source.read(ROOT_KEY, MAX_ROOT_BYTES)
        return None if document is None else parse_root(document, self.source.name(ROOT_KEY))

    def install(self, folder: Path, version: str) -> None:
        """Rename a finished, verified and synced version folder into the store.

        Raises:
            OSError: The disk refuses.
        """
        self.folder.mkdir(exist_ok=True)
        for _ in range(_ATTEMPTS):
            if self._exists(version):
                return
            if move_folder(folder, self.folder / version):
                self._installed = version
                return
            # A copy by other means was cut off before its document came: it is no version.
            remnant = folder.parent / f"remnant-{time.time_ns()}"
            with contextlib.suppress(FileNotFoundError):
                (self.folder / version).rename(remnant)

    def finish(self, version: str, *, make_current: bool) -> int:
        """Make an installed version current, or see to it that the store has a root.

        Returns:
            Bytes of the root's document if it was written, 0 if it was there already and right.

        Raises:
            VersionNotFoundError: The version was removed meanwhile.
            StoreWriteError: The disk refuses.
        """
        document = root_document(version if make_current else None)
        if not make_current:
            with self.staging() as staging:
                written = create_file(self.folder / ROOT_KEY, document, staging)
            return len(document) if written else 0
        if self.source.read(ROOT_KEY, MAX_ROOT_BYTES) == document:
            return 0
        self.make_current(version)
        return len(document)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Give a staging folder; an error of the system leaves the store as it was.

        Raises:
            StoreWriteError: The disk refuses.
        """
        with self.typed_errors(), staging_folder(self.folder) as staging:
            yield staging

    @contextlib.contextmanager
    def typed_errors(self) -> Iterator[None]:
        """Make the folder above the store; turn the system's errors into the cache's.

        Raises:
            StoreWriteError: The disk refuses; it says what stands now, and an empty store that was
                begun is taken away.
        """
        was_there = self.folder.exists()
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            if not was_there:
                with contextlib.suppress(OSError):
                    self.folder.rmdir()
            if isinstance(error, CacheError):
                raise
            file = error.filename or str(self.folder)
            raise StoreWriteError.caused_by(file, error, self._state()) from error

    def _state(self) -> str:
        """Return what a write that failed has changed."""
        with contextlib.suppress(CacheError):
            if self._chosen is not None and self.stored_current() == self._chosen:
                return f"version {self._chosen[:12]} is current all the same"
        if self._installed is not None:
            return f"version {self._installed[:12]} was installed, and is not current"
        return "nothing was changed"

    def _exists(self, version: str) -> bool:
        return (self.folder / version_key(version)).is_file()

    def damage(self, version: str) -> DamagedEntryError | StoreReadError | None:
        """Return the first thing that is wrong with a version that is there, None when it is sound.

        Raises:
            VersionNotFoundError: It was removed meanwhile.
        """
        try:
            findings = findings_of(self.source, version)
        except StoreReadError as error:
            return error
        if not findings:
            return None
        first, place = findings[0], self.folder / version
        remedy = f"Delete the folder {place}, then build, pull or unpack it again"
        return DamagedEntryError(first.file, first.rule, entry=first.entry, remedy=remedy)

    def _place(
        self, draft: Draft, staging: Path, on_damage: Callable[[CacheError], None] | None
    ) -> None:
        version = draft.version.id
        there = self._exists(version)
        if there:
            # A gc may take it as it is checked: then it is written again.
            with contextlib.suppress(VersionNotFoundError):
                damage = self.damage(version)
                if damage is None:
                    # It is wanted again: a gc counts its age from now.
                    with contextlib.suppress(FileNotFoundError):
                        os.utime(self.folder / version)
                    return
                if on_damage is None:
                    raise damage
                on_damage(damage)
        write_version(draft, staging)
        if there:
            with contextlib.suppress(FileNotFoundError):
                (self.folder / version).rename(staging / f"damaged-{time.time_ns()}")
        self.install(staging / version, version)

    def _set_current(self, version: str, staging: Path) -> None:
        self._chosen = version
        replace_file(self.folder / ROOT_KEY, root_document(version), staging)


def write_version(draft: Draft, folder: Path) -> None:
    """Write a version's files below ``folder``, each synced, its own document last.

    Raises:
        OSError: The disk refuses.
    """
    version = draft.version
    # A thread that is not the main one makes Blosc use one thread: equal content, equal bytes.
    with concurrent.futures.ThreadPoolExecutor(len(SECTIONS)) as pool:
        for section in SECTIONS:
            grid = ChunkGrid(version.totals[section])
            (folder / version.id / section / "c").mkdir(parents=True)
            chunks = _chunks(draft.values[section], grid)
            # One at a time, so that a version larger than memory's half is not copied whole.
            for index, chunk in enumerate(chunks):
                data = pool.submit(encode_chunk, chunk).result()
                write_synced(folder / chunk_key(version.id, section, index), data)
            write_synced(
                folder / array_key(version.id, section), array_document(version.totals[section])
            )
    write_synced(folder / version_key(version.id), version.document)


def _chunks(parts: tuple[IntArray, ...], grid: ChunkGrid) -> Iterator[IntArray]:
    """Cut arrays that follow one another into the grid's chunks, the last one padded."""
    chunk = np.full(grid.length, FILL_VALUE, np.int32)
    filled = 0
    for part in parts:
        done = 0
        while done < part.size:
            taken = min(part.size - done, grid.length - filled)
            chunk[filled : filled + taken] = part[done : done + taken]
            done += taken
            filled += taken
            if filled == grid.length:
                yield chunk
                chunk = np.full(grid.length, FILL_VALUE, np.int32)
                filled = 0
    if filled:
        yield chunk
