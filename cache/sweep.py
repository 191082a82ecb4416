"""gc: removes old versions with their sidecars, and what was left beside the store."""

import contextlib
import dataclasses
import errno
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

from cache.atomic import move_folder, staging_folder, temp_prefix
from cache.errors import CacheError, StoreWriteError
from cache.layout import SIDECARS, is_version_id, version_key
from cache.writer import StoreWriter


@dataclasses.dataclass(frozen=True)
class GcReport:
    """What a gc removed."""

    removed: tuple[str, ...]
    """Ids of versions."""
    swept: tuple[str, ...]
    """Paths beside the store: leftovers of killed processes, and sidecars of versions gone."""
    freed_bytes: int


def collect(writer: StoreWriter, keep: int, before: float) -> GcReport:
    """Remove versions, and what belongs to none, that are older than the time ``before``.

    The sidecars of a version that is removed go with it, whatever their age.

    Args:
        writer: Of the store.
        keep: How many versions to keep, the newest ones; the current one stays in any case.
        before: Seconds since the epoch.

    Returns:
        What was removed.

    Raises:
        StoreWriteError: Another gc runs, or the disk refuses.
        StoreReadError: The store cannot be read.
    """
    with _typed_errors(writer.folder), _gc_lock(writer.folder):
        parent, prefix = writer.folder.parent, temp_prefix(writer.folder)
        # Path.glob would find nothing, silently, in a folder that may not be listed.
        found = [path for path in sorted(parent.iterdir()) if path.name.startswith(prefix)]
        leftovers = [path for path in found if _is_older(path, before)]
        freed = _remove(leftovers)
        removed, nbytes = _remove_versions(writer, keep, before)
        sidecars, sidecar_bytes = _remove_sidecars(writer, removed, before)
    swept = tuple(map(str, [*leftovers, *sidecars]))
    return GcReport(tuple(removed), swept, freed + nbytes + sidecar_bytes)


def _remove_versions(writer: StoreWriter, keep: int, before: float) -> tuple[list[str], int]:
    """Return the ids of the versions that were removed, and their bytes."""
    removed: list[str] = []
    freed = 0
    with staging_folder(writer.folder) as staging:
        current = writer.stored_current()
        old = [version for version in writer.source.version_ids() if version != current]
        room = keep - (1 if current is not None else 0)
        for version in old[max(room, 0) :]:
            place = writer.folder / version
            if not _is_older(place, before):
                continue
            try:
                size = _tree_bytes(place)
                place.rename(staging / version)
            except FileNotFoundError:
                # Another gc took it, where the file system has no locks.
                continue
            if writer.stored_current() == version:
                # A `use` came in between; put it back.
                (staging / version).rename(place)
                continue
            removed.append(version)
            freed += size
    return removed, freed


def _remove_sidecars(
    writer: StoreWriter, removed: list[str], before: float
) -> tuple[list[Path], int]:
    """Remove sidecar folders whose version is nowhere: those just removed, and old ones.

    Returns:
        The folders, and the bytes of their files.
    """
    attest = writer.folder.parent / SIDECARS
    ids: set[str] = set()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(attest) as items:
        ids.update(
            item.name
            for item in items
            if is_version_id(item.name)
            and item.is_dir(follow_symlinks=False)
            and (item.name in removed or _is_older(Path(item.path), before))
        )
    gone = ids - _standing(writer, ids)
    with staging_folder(writer.folder) as staging:
        back = gone
        try:
            for version in gone:
                # Another store's gc may take it first.
                with contextlib.suppress(FileNotFoundError):
                    (attest / version).rename(staging / version)
            # A publish may have come in between.
            back = _standing(writer, gone)
        finally:
            for version in back:
                # Where a folder was written anew meanwhile, that one stays.
                with contextlib.suppress(FileNotFoundError):
                    move_folder(staging / version, attest / version)
        taken = sorted(path.name for path in staging.iterdir() if path.name not in back)
        return [attest / version for version in taken], _tree_bytes(staging)


def _standing(writer: StoreWriter, ids: set[str]) -> set[str]:
    """Return those of ``ids`` that the store, or another one or a zip beside it, holds or may hold.

    All of them share one folder of sidecars. What cannot be looked into may hold any.
    """
    if not ids:
        return ids
    found = ids.intersection(writer.source.version_ids())
    with os.scandir(writer.folder.parent) as items:
        for item in items:
            # A temporary folder counts too: what a publish or a pull is at will be a version.
            found.update(
                version for version in ids if _may_exist(Path(item.path, version_key(version)))
            )
            if item.name.endswith(".zip"):
                try:
                    if item.is_file():
                        with zipfile.ZipFile(item.path) as packed:
                            names = set(packed.namelist())
                        found.update(version for version in ids if version_key(version) in names)
                except FileNotFoundError:
                    continue
                except (zipfile.BadZipFile, OSError):
                    # Damaged, or still being copied to here.
                    return ids
    return found


def _may_exist(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


def _remove(folders: list[Path]) -> int:
    """Remove folders and return the bytes of their files; one that vanished is no error."""
    freed = 0
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            freed += _tree_bytes(folder)
            shutil.rmtree(folder)
    return freed


def _is_older(path: Path, before: float) -> bool:
    try:
        return path.lstat().st_mtime < before
    except FileNotFoundError:
        return False


def _tree_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


@contextlib.contextmanager
def _typed_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except CacheError:
        raise
    except OSError as error:
        name = error.filename or str(folder)
        raise StoreWriteError(
            name,
            f"gc cannot remove from {folder}: {name}: {error.strerror or error}; what it removed "
            f"before stays removed. See that the folder may be read and written, then run it "
            f"again",
            error.errno,
        ) from error


@contextlib.contextmanager
def _gc_lock(folder: Path) -> Iterator[None]:
    import fcntl  # POSIX only, as is the system lock; loading a cache needs neither

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreWriteError(
                str(folder), f"another gc is at {folder}; wait for it", errno.EAGAIN
            ) from error
        except OSError:
            # The file system has no locks. Two at once then share the work: each takes a version
            # by a rename.
            pass
        yield
    finally:
        os.close(descriptor)
