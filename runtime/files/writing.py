"""One way to write a file, whole or not at all, and to force what others wrote to the disk."""

import os
from pathlib import Path

from cache.atomic import replace_file, staging_folder
from cache.causes import naming


def write_file(path: Path, data: bytes) -> None:
    """Write or replace a file in one atomic step; it is on the disk when this returns.

    Raises:
        OSError: The disk refuses; what was there stays.
    """
    with naming(path), staging_folder(path) as staging:
        replace_file(path, data, staging)


def sync_file(path: Path) -> None:
    """Force a file that a library wrote to the disk.

    Raises:
        OSError: The disk refuses.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
