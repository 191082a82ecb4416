"""Where a store stands: links followed, staging on its own file system, and the lock of repairs."""

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cache.atomic import IsLeft, never, own_folder, temp_prefix

INSIDE = ".tmp-"
"""How a staging folder is called that stands within a store, which is a mount point."""

NOT_FROM_BESIDE = (errno.EXDEV, errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS)
"""What the system says where nothing can be renamed into the store from beside it."""

PATIENCE_S = 10.0
"""Seconds for which a writer waits for the store's lock."""

_POLL_S = 0.01


def followed(path: Path) -> Path:
    """Return where a link leads, whether or not something stands there; any other path as it is."""
    with contextlib.suppress(OSError):
        if path.is_symlink():
            return Path(os.path.realpath(path))
    return path


@contextlib.contextmanager
def stage(folder: Path, label: str = "", is_left: IsLeft = never) -> Iterator[Path]:
    """Yield a folder from which versions are renamed into a store, which was tried; then remove it.

    It stands beside the store, where no reader of it looks. Only where nothing can be renamed from
    there (the store is a mount point, or the folder around it cannot be written) it stands inside.

    Args:
        folder: The store; it need not be there, what is around it must.
        label: Follows the prefix in the name.
        is_left: As in ``own_folder``.

    Raises:
        OSError: The store cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            staging = stack.enter_context(
                own_folder(folder.parent, temp_prefix(folder) + label, is_left)
            )
            inside = not _reaches(staging, folder)
        except OSError as error:
            if error.errno not in NOT_FROM_BESIDE or not folder.is_dir():
                raise
            inside = True
        if inside:
            stack.close()
            staging = stack.enter_context(own_folder(folder, INSIDE + label, is_left))
        yield staging


def _reaches(staging: Path, folder: Path) -> bool:
    """Try to rename a folder from ``staging`` into ``folder``."""
    probe, there = staging / "probe", folder / f"{INSIDE}{staging.name.rsplit('-', 1)[-1]}"
    try:
        probe.mkdir()
        probe.rename(there)
    except FileNotFoundError:
        # There is no store yet, which will stand on the file system of what is around it. Or the
        # staging folder was taken away, as who works in it will find out.
        return True
    except OSError as error:
        if error.errno in NOT_FROM_BESIDE:
            return False
        raise OSError(error.errno, error.strerror, str(folder)) from error
    with contextlib.suppress(FileNotFoundError):
        there.rmdir()
    return True


def staged(folder: Path, label: str = "") -> list[Path]:
    """Return what stands where ``stage`` stages, sorted; its makers may be at work or gone.

    Raises:
        OSError: The folder around the store cannot be listed.
    """
    prefix = temp_prefix(folder) + label
    # Path.glob would find nothing, silently, in a folder that may not be listed.
    found = [path for path in folder.parent.iterdir() if path.name.startswith(prefix)]
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found += [path for path in folder.iterdir() if path.name.startswith(INSIDE + label)]
    return sorted(found)


def prefix_of(staging: Path, folder: Path) -> str:
    """Return the prefix of the name of one of ``staged``."""
    return temp_prefix(folder) if staging.parent == folder.parent else INSIDE


@contextlib.contextmanager
def locked(folder: Path, patience_s: float | None = None) -> Iterator[bool]:
    """Hold the store's lock, which all take who choose, replace or remove a version.

    A process that was stopped holds it, too; who goes on without it, as on a file system without
    locks, looks once more at what it does.

    Args:
        folder: The store.
        patience_s: Seconds to wait for another one; PATIENCE_S by default.

    Yields:
        False when another process holds it all the time; where the file system has no locks, or the
        store may not be read, True.
    """
    import fcntl  # POSIX only, as is the system lock; loading a cache needs neither

    deadline = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
    with contextlib.ExitStack() as stack:
        is_free = True
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            while not (is_free := _lock(fcntl, descriptor)) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        except OSError:
            pass
        yield is_free


def _lock(fcntl: Any, descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
