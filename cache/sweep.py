"""gc: removes old versions with their sidecars, and what was left beside the store.

All that goes is renamed first, looked at once more, and removed once the lock is free.
"""

import contextlib
import dataclasses
import errno
import os
import secrets
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

from cache.archive import ZIP_ERRORS
from cache.atomic import GONE, move_folder, set_aside, sync_folder, temp_prefix
from cache.errors import StoreWriteError
from cache.format import OLD_SIDECARS, ROOT_KEY, SIDECARS, is_version_id, version_key
from cache.place import INSIDE, NOT_FROM_BESIDE, locked, prefix_of, staged
from cache.source import may_exist
from cache.writer import StoreWriter

_PATIENCE_S = 2.0
"""Seconds to wait for who chooses a version; another gc takes longer."""


@dataclasses.dataclass(frozen=True)
class GcReport:
    """What a gc removed."""

    removed: tuple[str, ...]
    """Ids of versions."""
    swept: tuple[str, ...]
    """Paths beside the store: leftovers of killed processes, and sidecars of versions gone."""
    freed_bytes: int
    left: tuple[str, ...] = ()
    """A sentence for each thing that the system did not let it remove or look into."""


def collect(writer: StoreWriter, keep: int, before: float) -> GcReport:
    """Remove versions, and what belongs to none, that are older than the time ``before``.

    The sidecars of a version that is removed go with it, whatever their age. What cannot be removed
    or looked into, such as another user's, is reported, and the rest goes.

    Args:
        writer: Of the store.
        keep: How many versions to keep, the newest ones; the current one stays in any case.
        before: Seconds since the epoch.

    Returns:
        What was removed.

    Raises:
        StoreWriteError: Another gc or a repair is at work, or the store cannot be written.
        StoreReadError: The store cannot be read.
    """
    sweep = _Sweep(writer, keep, before)
    try:
        with locked(writer.folder, _PATIENCE_S) as is_free:
            if not is_free:
                msg = f"another gc, or a repair, is at {writer.folder}; wait for it"
                raise StoreWriteError(str(writer.folder), msg, errno.EAGAIN)
            sweep.put_back_current()
            sweep.leftovers()
            sweep.versions()
            sweep.sidecars()
    finally:
        sweep.remove()
    return GcReport(tuple(sweep.removed), tuple(sweep.swept), sweep.freed_bytes, tuple(sweep.left))


class _Sweep:
    """One gc at work."""

    def __init__(self, writer: StoreWriter, keep: int, before: float) -> None:
        self.writer = writer
        self.folder = writer.folder
        self.sidecar_tops = [writer.folder.parent / top for top in (SIDECARS, OLD_SIDECARS)]
        self.keep = keep
        self.before = before
        self.removed: list[str] = []
        self.swept: list[str] = []
        self.left: list[str] = []
        self.freed_bytes = 0
        self._aside: dict[Path, str] = {}
        """What is to be removed, and as what it is reported; empty where something else is."""

    def put_back_current(self) -> None:
        """Put the current version back, which a gc that was killed had in hand."""
        current = self.writer.stored_current()
        if current is not None and not may_exist(self.folder / version_key(current)):
            for gone in self._staged(GONE + current):
                if may_exist(gone / ROOT_KEY):
                    with self._going_on(gone):
                        move_folder(gone, self.folder / current)

    def leftovers(self) -> None:
        """Set aside what killed processes left."""
        for path in self._staged():
            if not self._is_old(path):
                continue
            with self._going_on(path):
                gone = set_aside(path, prefix_of(path, self.folder))
                if self._is_old(gone, but_for_its_name=True):
                    self._aside[gone] = str(path)
                else:
                    # Its maker touched it in between.
                    gone.rename(path)

    def versions(self) -> None:
        """Set old versions aside, but for the current one and the newest."""
        current = self.writer.stored_current()
        old = [version for version in self.writer.source.version_ids() if version != current]
        room = self.keep - (1 if current is not None else 0)
        for version in old[max(room, 0) :]:
            place = self.folder / version
            if not self._is_old(place):
                continue
            with self._going_on(place):
                gone = self._take(place)
                stays = True
                try:
                    # A `use` or a publish may have come in between.
                    young = not self._is_old(gone, but_for_its_name=True)
                    stays = young or self.writer.stored_current() == version
                finally:
                    if stays:
                        self._put_back(gone, place)
                    else:
                        self.removed.append(version)
                        self._aside[gone] = ""

    def sidecars(self) -> None:
        """Set sidecar folders aside whose version is nowhere: those just removed, and old ones."""
        places: list[Path] = []
        for top in self.sidecar_tops:
            with self._going_on(top), os.scandir(top) as items:
                places += sorted(
                    Path(item.path)
                    for item in items
                    if is_version_id(item.name)
                    and item.is_dir(follow_symlinks=False)
                    and (item.name in self.removed or self._is_old(Path(item.path)))
                )
        ids = {place.name for place in places}
        standing = self._standing(ids)
        # Unless the second look succeeds, all are put back.
        back = ids
        taken: dict[Path, Path] = {}
        try:
            for place in places:
                if place.name not in standing:
                    with self._going_on(place):
                        taken[place] = self._take(place)
            # A publish may have come in between.
            back = self._standing(ids)
        finally:
            for place, gone in taken.items():
                if place.name in back:
                    self._put_back(gone, place)
                else:
                    self._aside[gone] = str(place)

    def remove(self) -> None:
        """Remove what was set aside, once its new names are on the disk."""
        tops = (self.folder, self.folder.parent, *self.sidecar_tops)
        for folder in tops if self._aside else ():
            with self._going_on(folder):
                sync_folder(folder)
        for gone, name in self._aside.items():
            with self._going_on(gone):
                size = _tree_bytes(gone)
                if gone.is_dir() and not gone.is_symlink():
                    shutil.rmtree(gone)
                else:
                    gone.unlink()
                self.freed_bytes += size
                self.swept += [name] if name else []

    def _take(self, path: Path) -> Path:
        """Rename a folder to where nobody looks for it; this needs no room on the disk."""
        label = f"{GONE}{path.name}-{secrets.token_hex(4)}"
        beside = self.folder.parent / f"{temp_prefix(self.folder)}{label}"
        try:
            return path.rename(beside)
        except OSError as error:
            # What may be written beside, but not moved there, is another user's.
            is_his = error.errno in (errno.EACCES, errno.EPERM) and os.access(
                beside.parent, os.W_OK
            )
            if path.parent != self.folder or is_his or error.errno not in NOT_FROM_BESIDE:
                raise
            return path.rename(self.folder / f"{INSIDE}{label}")

    def _put_back(self, gone: Path, place: Path) -> None:
        # Where it was written anew meanwhile, that one stays.
        if not move_folder(gone, place):
            self._aside[gone] = ""

    def _standing(self, ids: set[str]) -> set[str]:
        """Return those of ``ids`` that the store, another one or a zip beside it holds or may hold.

        All of them share one folder of sidecars. What cannot be looked into may hold any.
        """
        if not ids:
            return ids
        found = ids.intersection(self.writer.source.version_ids())
        try:
            beside = list(self.folder.parent.iterdir())
        except OSError as error:
            self._note(f"{self.folder.parent} cannot be listed, so all sidecars stay", error)
            return ids
        for path in beside:
            # A temporary folder counts too: what a publish or a pull is at will be a version.
            if f".tmp-{GONE}" not in path.name:
                found.update(version for version in ids if may_exist(path / version_key(version)))
            if path.name.endswith(".zip"):
                try:
                    if path.is_file():
                        with zipfile.ZipFile(path) as packed:
                            names = set(packed.namelist())
                        found.update(version for version in ids if version_key(version) in names)
                except FileNotFoundError:
                    continue
                except (*ZIP_ERRORS, OSError) as error:
                    # Another program's, damaged, or still being copied to here.
                    self._note(f"{path} cannot be looked into, so all sidecars stay", error)
                    return ids
        return found

    def _staged(self, label: str = "") -> list[Path]:
        try:
            return staged(self.folder, label)
        except OSError as error:
            self._note(f"{self.folder.parent} cannot be listed, so leftovers stay", error)
            return []

    @contextlib.contextmanager
    def _going_on(self, path: Path) -> Iterator[None]:
        """Note what the system refuses; what is gone already is no error."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            if error.errno == errno.EROFS and path.parent == self.folder:
                raise StoreWriteError.caused_by(str(path), error) from error
            self._note(f"{path} stays", error)

    def _note(self, what: str, error: Exception) -> None:
        note = f"{what}: {getattr(error, 'strerror', None) or error}"
        if note not in self.left:
            self.left.append(note)

    def _is_old(self, path: Path, *, but_for_its_name: bool = False) -> bool:
        try:
            found = path.lstat()
        except FileNotFoundError:
            return False
        # What a gc has set aside has the age of its new name: another gc may have it in hand.
        is_named = f".tmp-{GONE}" in path.name and not but_for_its_name
        return max(found.st_mtime, found.st_ctime if is_named else 0.0) < self.before


def _tree_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
