"""Writes into a store's folder: publish a version, choose the current one."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from cache.atomic import (
    IsLeft,
    create_file,
    move_folder,
    never,
    replace_file,
)
from cache.errors import (
    CacheError,
    DamagedEntryError,
    StoreReadError,
    StoreWriteError,
    VersionNotFoundError,
)
from cache.format import MAX_ROOT_BYTES, ROOT_KEY, parse_root, root_document, version_key
from cache.place import INSIDE, locked, stage
from cache.source import FolderSource, may_exist
from cache.unpublished import UnpublishedVersion, write_version
from cache.verify import findings_of

_ATTEMPTS = 10
"""How often what another process took away meanwhile is made again."""

T = TypeVar("T")
OnDamage = Callable[[CacheError], None]


class StoreWriter:
    """Changes a store's folder; a version comes and goes by one rename.

    Who adds a version takes no lock: it works in a folder of its own, and where another one was
    first it looks at what is there now. Who chooses, replaces or removes one takes the store's lock
    and looks once more. What is taken from under a writer's hands is made again.
    """

    def __init__(self, source: FolderSource) -> None:
        self.source = source
        self.folder = source.folder
        self._installed: str | None = None
        self._chosen: str | None = None

    def publish(
        self,
        new: UnpublishedVersion,
        *,
        make_current: bool,
        on_damage: OnDamage | None = None,
    ) -> None:
        """Write a version where nobody sees it and rename it into place.

        A damaged version of the same id is replaced by two renames once the good one is on the
        disk: a reader sees the damaged one, none for a moment, then the good one.

        Args:
            new: The version.
            make_current: Whether readers see it from now on.
            on_damage: Called with what is wrong before a damaged version is replaced; None refuses.

        Raises:
            StoreWriteError: The disk refuses; nothing is left behind.
            DamagedEntryError: The version is there already and is damaged, on_damage is None.
            StoreReadError: The same of a version that cannot be read.
        """
        version = new.version.id

        def place(staging: Path) -> int | None:
            if not self.stands(version, replaceable=on_damage is not None):
                write_version(new, staging)
                self.install(staging / version, version, on_damage)
            return self.choose(version, staging, make_current=make_current)

        self.attempt(place)

    def attempt(
        self, work: Callable[[Path], T | None], label: str = "", is_left: IsLeft = never
    ) -> T:
        """Do a piece of work in a staging folder, again when it is taken away meanwhile.

        Args:
            work: Called with the folder; None says that the version that it made is gone.
            label: As in ``stage``.
            is_left: As in ``own_folder``.

        Raises:
            StoreWriteError: The disk refuses, or the work came to nothing too often.
        """
        for _ in range(_ATTEMPTS):
            with self.staging(label, is_left) as staging:
                try:
                    done = work(staging)
                except (CacheError, OSError):
                    if staging.exists():
                        raise
                else:
                    if done is not None:
                        return done
        what = "what is made there vanishes; stop what removes it, such as a gc"
        raise StoreWriteError(str(self.folder), f"cannot write {self.folder}: {what}")

    def finish(self, version: str, *, make_current: bool = True) -> int:
        """Make a version current, or see to it that the store has a root; writes if it must.

        Returns:
            Bytes of the root's document if it was written, 0 if it was there already and right.

        Raises:
            VersionNotFoundError: The version was removed meanwhile.
            StoreWriteError: The disk refuses.
        """
        root = self._root()
        is_right = root == root_document(version) if make_current else root is not None
        if is_right and self._touch(version):
            return 0
        with self.staging() as staging:
            written = self.choose(version, staging, make_current=make_current)
        if written is None:
            raise VersionNotFoundError(version, f"version {version} was removed by a gc")
        return written

    def choose(self, version: str, staging: Path, *, make_current: bool) -> int | None:
        """Do what ``finish`` does in a staging folder.

        Returns:
            As ``finish``; None when the version is gone, and then the root is as it was.

        Raises:
            OSError: The disk refuses.
        """
        path = self.folder / ROOT_KEY
        document = root_document(version if make_current else None)
        with locked(self.folder):
            before = self._root()
            # Young, so that no gc takes it from here on; the lock holds off one that has looked.
            if not self._touch(version):
                return None
            if not make_current:
                written = before is None and create_file(path, document, staging)
            elif written := before != document:
                self._chosen = version
                replace_file(path, document, staging)
            if self._exists(version):
                return len(document) if written else 0
            if make_current and written and self._root() == document:
                replace_file(path, before or root_document(None), staging)
        return None

    def stored_current(self) -> str | None:
        """Return the current version's id as the root names it now.

        Raises:
            DamagedEntryError: The root is damaged.
        """
        document = self._root()
        return None if document is None else parse_root(document, self.source.name(ROOT_KEY))

    def stands(self, version: str, *, replaceable: bool = False) -> bool:
        """Return whether a sound version is there; a gc counts its age from now.

        Args:
            version: An id.
            replaceable: Whether a damaged one is as good as none.

        Raises:
            DamagedEntryError: It is there and damaged.
            StoreReadError: It is there and cannot be read.
        """
        # What is damaged may be replaced just now: whoever does that has the lock.
        for lock in (contextlib.nullcontext(), locked(self.folder)):
            if not self._exists(version):
                return False
            with lock:
                damage = self._damage(version)
            if damage is None:
                return self._touch(version)
        if replaceable:
            return False
        assert damage is not None
        raise damage

    def install(self, folder: Path, version: str, on_damage: OnDamage | None = None) -> None:
        """Rename a finished, verified and synced version folder into the store, or find it there.

        Args:
            folder: In a staging folder; it stays there when another process was first.
            version: Its id.
            on_damage: As in ``publish``.

        Raises:
            DamagedEntryError: A damaged version is there and ``on_damage`` is None.
            StoreReadError: The same of a version that cannot be read.
            OSError: The disk refuses.
        """
        place = self.folder / version
        for attempt in range(_ATTEMPTS):
            self.folder.mkdir(exist_ok=True)
            try:
                if move_folder(folder, place):
                    self._installed = version
                    return
                with locked(self.folder):
                    there = self._exists(version)
                    damage = self._damage(version) if there else None
                    if there and damage is None and self._touch(version):
                        return
                    if damage is not None:
                        if on_damage is None:
                            raise damage
                        on_damage(damage)
                    aside = folder.parent / f"aside-{attempt}"
                    place.rename(aside)
                    if damage is None and (aside / ROOT_KEY).exists():
                        # Where there are no locks it may have come since it was looked at.
                        move_folder(aside, place)
            except FileNotFoundError:
                # What was in the way is gone; or who began the store and failed took it away.
                if not folder.exists():
                    raise

    @contextlib.contextmanager
    def staging(self, label: str = "", is_left: IsLeft = never) -> Iterator[Path]:
        """Yield a staging folder; an error of the system leaves the store as it was.

        Raises:
            StoreWriteError: The disk refuses.
        """
        with self._typed_errors():
            self._check_link()
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with stage(self.folder, label, is_left) as staging:
                yield staging

    def check(self) -> None:
        """Try what a write begins with, and leave no trace.

        Raises:
            StoreWriteError: The disk refuses.
        """
        with self._typed_errors():
            self._check_link()
            parents = (path for path in self.folder.parents if path.exists())
            with stage(self.folder if self.folder.exists() else next(parents) / self.folder.name):
                pass

    def _check_link(self) -> None:
        location, folder = self.source.location, self.folder
        if folder != Path(location) and not folder.parent.is_dir():
            raise StoreWriteError(
                location,
                f"{location} is a link to {folder}, and {folder.parent} is no folder: mount its "
                f"disk or make the folder, then run it again",
                errno.ENOENT,
            )

    @contextlib.contextmanager
    def _typed_errors(self) -> Iterator[None]:
        """Turn the system's errors into the cache's; an empty store that was begun is taken away.

        Raises:
            StoreWriteError: The disk refuses; it says what stands now.
        """
        was_there = self.folder.exists()
        try:
            yield
        except OSError as error:
            if not was_there:
                with contextlib.suppress(OSError):
                    self.folder.rmdir()
            if isinstance(error, CacheError):
                raise
            file = str(error.filename or self.folder)
            if INSIDE in file:
                # The name of a staging folder says nothing to anybody.
                file = str(self.folder)
            raise StoreWriteError.caused_by(file, error, self._state()) from error

    def _state(self) -> str:
        """Return what a write that failed has changed."""
        with contextlib.suppress(CacheError):
            if self._chosen is not None and self.stored_current() == self._chosen:
                return f"version {self._chosen[:12]} is current all the same"
        if self._installed is not None:
            return f"version {self._installed[:12]} was installed, and is not current"
        return "nothing was changed"

    def _root(self) -> bytes | None:
        return self.source.read(ROOT_KEY, MAX_ROOT_BYTES)

    def _exists(self, version: str) -> bool:
        return may_exist(self.folder / version_key(version))

    def _touch(self, version: str) -> bool:
        """Make a version young; False when it is not there."""
        try:
            os.utime(self.folder / version)
        except FileNotFoundError:
            return False
        except OSError:
            # Another user's keeps its age.
            pass
        return True

    def _damage(self, version: str) -> DamagedEntryError | StoreReadError | None:
        """Return the first thing that is wrong with a version; None when it is sound, or gone."""
        try:
            findings = findings_of(self.source, version)
        except VersionNotFoundError:
            return None
        except StoreReadError as error:
            return error
        if not findings:
            return None
        first, place = findings[0], self.folder / version
        remedy = f"Delete the folder {place}, then build, pull or unpack it again"
        return DamagedEntryError(first.file, first.rule, entry=first.entry, remedy=remedy)
