"""gc: removes old versions with their sidecars, and what was left beside the store.

All that goes is renamed first, looked at once more, and removed once the lock is free.
"""

import contextlib
import dataclasses
import errno
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

from cache.archive import ZIP_ERRORS
from cache.atomic import move_folder, staging_folder, sync_folder
from cache.errors import StoreWriteError
from cache.layout import SIDECARS, is_version_id, version_key
from cache.place import GONE, locked, set_aside, staged
from cache.source import may_exist
from cache.writer import StoreWriter


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
    with writer.staging(GONE) as staging:
        sweep = _Sweep(writer, keep, before, staging)
        try:
            with locked(writer.folder, wait=False):
                sweep.put_back_current()
                sweep.leftovers()
                sweep.versions()
                sweep.sidecars()
        except BlockingIOError as error:
            msg = f"another gc, or a repair, is at {writer.folder}; wait for it"
            raise StoreWriteError(str(writer.folder), msg, errno.EAGAIN) from error
        sweep.remove()
        return GcReport(
            tuple(sweep.removed), tuple(sweep.swept), sweep.freed_bytes, tuple(sweep.left)
        )


class _Sweep:
    """One gc at work."""

    def __init__(self, writer: StoreWriter, keep: int, before: float, staging: Path) -> None:
        self.writer = writer
        self.folder = writer.folder
        self.keep = keep
        self.before = before
        self.staging = staging
        self.removed: list[str] = []
        self.swept: list[str] = []
        self.left: list[str] = []
        self.freed_bytes = 0
        self._aside: dict[str, Path] = {}
        """What is to be removed and where it was set aside."""

    def put_back_current(self) -> None:
        """Put the current version back, which a gc that was killed had in hand."""
        current = self.writer.stored_current()
        if current is not None and not may_exist(self.folder / version_key(current)):
            for gone in self._staged(GONE):
                if may_exist(gone / version_key(current)):
                    move_folder(gone / current, self.folder / current)

    def leftovers(self) -> None:
        """Set aside what killed processes left."""
        for path in self._staged():
            if path == self.staging or not self._is_old(path):
                continue
            with self._going_on(path):
                gone = set_aside(self.folder, path)
                if self._is_old(gone):
                    self._aside[str(path)] = gone
                else:
                    # Its maker touched it in between.
                    gone.rename(path)

    def versions(self) -> None:
        """Set old versions aside, but for the current one and the newest."""
        current = self.writer.stored_current()
        old = [version for version in self.writer.source.version_ids() if version != current]
        room = self.keep - (1 if current is not None else 0)
        for version in old[max(room, 0) :]:
            place, gone = self.folder / version, self.staging / version
            if not self._is_old(place):
                continue
            with self._going_on(place):
                size = _tree_bytes(place)
                place.rename(gone)
                stays = True
                try:
                    # A `use` or a publish may have come in between.
                    stays = self.writer.stored_current() == version or not self._is_old(gone)
                finally:
                    if stays:
                        # Where it was written anew meanwhile, that one stays.
                        move_folder(gone, place)
                    else:
                        self.removed.append(version)
                        self.freed_bytes += size

    def sidecars(self) -> None:
        """Set sidecar folders aside whose version is nowhere: those just removed, and old ones."""
        attest = self.folder.parent / SIDECARS
        ids: set[str] = set()
        with self._going_on(attest), os.scandir(attest) as items:
            ids.update(
                item.name
                for item in items
                if is_version_id(item.name)
                and item.is_dir(follow_symlinks=False)
                and (item.name in self.removed or self._is_old(Path(item.path)))
            )
        if not (ids := ids - self._standing(ids)):
            return
        with self._going_on(attest), staging_folder(self.folder) as aside:
            back = ids
            try:
                for version in ids:
                    with self._going_on(attest / version):
                        (attest / version).rename(aside / version)
                # A publish may have come in between.
                back = self._standing(ids)
            finally:
                for version in back:
                    # Where a folder was written anew meanwhile, that one stays.
                    with contextlib.suppress(FileNotFoundError):
                        move_folder(aside / version, attest / version)
            sync_folder(attest)
            self.freed_bytes += _tree_bytes(aside)
            gone = sorted(path.name for path in aside.iterdir() if path.name not in back)
            self.swept += [str(attest / version) for version in gone]

    def remove(self) -> None:
        """Remove what was set aside, once its new names are on the disk."""
        if self.removed or self._aside:
            for folder in (self.folder, self.folder.parent):
                with self._going_on(folder):
                    sync_folder(folder)
        for name, gone in self._aside.items():
            with self._going_on(Path(name)):
                size = _tree_bytes(gone)
                if gone.is_dir() and not gone.is_symlink():
                    shutil.rmtree(gone)
                else:
                    gone.unlink()
                self.freed_bytes += size
                self.swept.append(name)

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
            self._note(f"{path} stays", error)

    def _note(self, what: str, error: Exception) -> None:
        note = f"{what}: {getattr(error, 'strerror', None) or error}"
        if note not in self.left:
            self.left.append(note)

    def _is_old(self, path: Path) -> bool:
        try:
            return path.lstat().st_mtime < self.before
        except FileNotFoundError:
            return False


def _tree_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
