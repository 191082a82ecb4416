"""One process at a time changes the files of a folder."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

ATTEMPTS = 100
"""Times that a folder is made which another process removes."""


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[bool]:
    """Make a folder where it is missing, wait until no other process has its lock, and take it.

    The lock is on the folder itself, so nothing is left of it, and it ends with the process. Of a
    link that leads nowhere yet, what it names is made.

    Yields:
        Whether there is a lock; some network file systems have none for folders.

    Raises:
        OSError: The folder cannot be made or opened.
    """
    descriptor, is_locked = _lock(folder)
    try:
        yield is_locked
    finally:
        os.close(descriptor)


def _lock(folder: Path) -> tuple[int, bool]:
    for _ in range(ATTEMPTS):
        Path(os.path.realpath(folder)).mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            is_locked = _flock(descriptor)
            # Who had the lock may have removed the folder, and another made a new one.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), folder.stat()):
                    return descriptor, is_locked
            os.close(descriptor)
    raise FileNotFoundError(errno.ENOENT, "it is removed again and again", str(folder))


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return False
    return True
