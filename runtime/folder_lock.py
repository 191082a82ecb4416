"""One process at a time changes the files of a folder."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[bool]:
    """Wait until no other process has this folder's lock, and take it.

    The lock is on the folder itself, so nothing is left of it, and it ends with the process.

    Yields:
        Whether there is a lock; some network file systems have none for folders.

    Raises:
        OSError: The folder is not there or cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            is_locked = False
        else:
            is_locked = True
        yield is_locked
    finally:
        os.close(descriptor)
