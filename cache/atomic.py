"""Files and folders that appear whole or not at all: temp sibling, fsync, rename.

Temporary things stand in a folder that is its maker's alone, beside what they will become. Its name
starts with ``.NAME.tmp-``; what a killed process left is swept by a ``gc`` or by the next one.
"""

import contextlib
import errno
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cache.causes import naming

_CANNOT_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What network file systems say to the sync of a folder."""

TOUCH_S = 60.0
"""Seconds between two touches of a folder that is worked in."""

STALE_S = 3600
"""Seconds after which nobody is at work in a folder that was not touched."""

GONE = "gone-"
"""Follows the prefix in the name of what was set aside and is removed."""


IsLeft = Callable[[BaseException], bool]
"""Returns whether a folder stays after an error of the block that worked in it."""


def never(_: BaseException) -> bool:
    """Leave nothing."""
    return False


def temp_prefix(target: Path) -> str:
    """Return the prefix of the names of temporary siblings of ``target``."""
    return f".{target.name}.tmp-"


@contextlib.contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """Yield a fresh folder beside ``target`` and remove it, with what is left in it, at the end.

    What killed ones have left of the same ``target`` is removed first.

    Args:
        target: What will be renamed into place; its parent must be there.

    Yields:
        The folder; it is on the file system of ``target``, so a rename from it is atomic.

    Raises:
        OSError: The parent cannot be written.
    """
    prefix, now = temp_prefix(target), time.time()
    with contextlib.suppress(OSError):
        for left in target.parent.iterdir():
            if left.name.startswith(prefix) and left.lstat().st_mtime < now - STALE_S:
                discard(left, prefix)
    with own_folder(target.parent, prefix) as folder:
        yield folder


def set_aside(folder: Path, prefix: str) -> Path:
    """Rename a temporary folder, so that its maker, if it is at work, makes another one.

    Args:
        folder: It; one that was set aside before keeps its name.
        prefix: Of its name.

    Returns:
        Its new path.

    Raises:
        OSError: The system refuses, or it is gone.
    """
    if folder.name.startswith(prefix + GONE):
        return folder
    return folder.rename(folder.with_name(prefix + GONE + folder.name.removeprefix(prefix)))


def discard(folder: Path, prefix: str) -> None:
    """Set a temporary folder aside and remove it, as far as the system allows that."""
    with contextlib.suppress(OSError):
        shutil.rmtree(set_aside(folder, prefix), ignore_errors=True)


@contextlib.contextmanager
def own_folder(parent: Path, prefix: str, is_left: IsLeft = never) -> Iterator[Path]:
    """Yield a fresh folder with a name of its own, and remove it at the end.

    It is touched as long as the block works, so that whoever sweeps by age leaves it alone.

    Args:
        parent: Where it is made.
        prefix: Of its name.
        is_left: Whether it stays after this error of the block.

    Raises:
        OSError: ``parent`` cannot be written.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    removed = True
    try:
        with _touched(folder):
            yield folder
    except BaseException as error:
        removed = not is_left(error)
        raise
    finally:
        if removed:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _touched(folder: Path) -> Iterator[None]:
    done = threading.Event()

    def touch() -> None:
        while not done.wait(TOUCH_S):
            with contextlib.suppress(OSError):
                os.utime(folder)

    thread = threading.Thread(target=touch, name="cache-touch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and force it to the disk.

    Raises:
        OSError: The file is there already, or the disk refuses.
    """
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, staging: Path) -> None:
    """Replace ``path`` by a file that holds ``data``, in one atomic step.

    Args:
        path: The file; a reader sees the old or the new bytes, never a mixture.
        data: Its new content.
        staging: A folder of ``staging_folder`` on the same file system.

    Raises:
        OSError: The disk refuses; ``path`` is as it was.
    """
    temp = staging / f"replace-{path.name}"
    with naming(path):
        write_synced(temp, data)
        temp.replace(path)
        sync_folder(path.parent)


def create_file(path: Path, data: bytes, staging: Path) -> bool:
    """Create ``path`` with ``data`` unless it is there, in one atomic step.

    Where the file system has no hard links, a reader may meet the file before its bytes, and of a
    process that is killed right then an empty one is left.

    Returns:
        Whether this call created it.

    Raises:
        OSError: The disk refuses.
    """
    temp = staging / f"create-{path.name}"
    write_synced(temp, data)
    try:
        os.link(temp, path)
    except FileExistsError:
        return False
    except OSError:
        # No links here; whatever else is wrong, the write in place meets as well.
        if not _create_in_place(path, data):
            return False
    finally:
        temp.unlink()
    sync_folder(path.parent)
    return True


def _create_in_place(path: Path, data: bytes) -> bool:
    try:
        file = path.open("xb")
    except FileExistsError:
        return False
    with file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            # Another process may have replaced it meanwhile.
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                path.unlink()
            raise
    return True


def move_folder(source: Path, target: Path) -> bool:
    """Rename a finished folder to ``target`` unless another one is there.

    The files of ``source`` must be synced; its folders are synced here.

    Returns:
        Whether this call moved it; False when a folder with content stands at ``target``.

    Raises:
        OSError: The disk refuses.
    """
    for folder, _, _ in os.walk(source, topdown=False):
        sync_folder(Path(folder))
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    sync_folder(target.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Force a folder's list of names to the disk, where its file system can do that.

    Raises:
        OSError: The disk refuses.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(descriptor)
