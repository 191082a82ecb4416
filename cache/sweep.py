"""gc: removes old versions with their sidecars, and what was left beside the store."""

import contextlib
import dataclasses
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from cache.archive import ZipSource
from cache.atomic import staging_folder, temp_prefix
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
    """
    with _typed_errors(writer.folder), _gc_lock(writer.folder):
        leftovers = [
            path
            for path in sorted(writer.folder.parent.glob(f"{temp_prefix(writer.folder)}*"))
            if _is_older(path, before)
        ]
        freed = _remove(leftovers)
        removed, nbytes = _remove_versions(writer, keep, before)
        sidecars = _sidecars_of_none(writer.folder, removed, before)
        freed += nbytes + _remove(sidecars)
    return GcReport(tuple(removed), tuple(map(str, [*leftovers, *sidecars])), freed)


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
            if place.stat().st_mtime >= before:
                continue
            size = _tree_bytes(place)
            place.rename(staging / version)
            if writer.stored_current() == version:
                # A `use` came in between; put it back.
                (staging / version).rename(place)
                continue
            removed.append(version)
            freed += size
    return removed, freed


def _sidecars_of_none(folder: Path, removed: list[str], before: float) -> list[Path]:
    """Return the sidecar folders whose version is nowhere: those just removed, and old ones.

    All stores and packed zips of one folder share its sidecars, so that each of them is asked.
    """
    parent = folder.parent
    gone = [
        path
        for path in sorted((parent / SIDECARS).glob("*"))
        if is_version_id(path.name)
        and (path.name in removed or _is_older(path, before))
        and stat.S_ISDIR(path.lstat().st_mode)
        # A temporary folder counts too: what a publish or a pull is at will be a version.
        and not any(parent.glob(f"*/{version_key(path.name)}"))
    ]
    packed: set[str] = set()
    for path in parent.glob("*.zip") if gone else ():
        # A zip that does not open as a cache has no use for sidecars.
        with contextlib.suppress(CacheError), contextlib.closing(ZipSource(path)) as source:
            packed.update(source.version_ids())
    return [path for path in gone if path.name not in packed]


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
            f"before stays removed. See that the folder may be written, then run it again",
            error.errno,
        ) from error


@contextlib.contextmanager
def _gc_lock(folder: Path) -> Iterator[None]:
    import fcntl  # POSIX only, as is the system lock; loading a cache needs neither

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise StoreWriteError(
            str(folder), f"another gc is at {folder}; wait for it", errno.EAGAIN
        ) from error
    finally:
        os.close(descriptor)
