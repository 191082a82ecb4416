"""Where the bytes of a cache come from: a folder; archive.py adds the packed zip, remote.py a URL.

A source returns the bytes of a key and no more than the caller allows, so that a file of absurd
size costs nothing. It knows nothing of what the bytes mean.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from cache.errors import (
    DamagedEntryError,
    StoreReadError,
    VersionRemovedError,
)
from cache.format import MAX_DOCUMENT_BYTES, ROOT_KEY, is_version_id, version_key
from cache.place import followed


class Source(Protocol):
    """Reads a cache's files by key, such as ``ID/spans/c/0``."""

    location: str

    def read(self, key: str, limit: int) -> bytes | None:
        """Return a file of at most ``limit`` bytes, or None when there is none.

        Raises:
            DamagedEntryError: It is longer than ``limit``, or no regular file.
            StoreReadError: It cannot be read.
        """

    def name(self, key: str) -> str:
        """Return what to call the file in a message: a path or an address."""

    def version_ids(self) -> list[str]:
        """Return the ids of the versions that are there, the newest first where that is known.

        Raises:
            NotListableError: The store cannot list.
        """

    def file_sizes(self, version: str) -> dict[str, int]:
        """Return the size in bytes of every file below a version, by key.

        Raises:
            NotListableError: The store cannot list.
        """

    def strangers(self) -> list[str]:
        """Return, sorted, the names of what stands in the root and is no part of the format.

        An id without a document is one of them; a store that cannot list reports none.

        Raises:
            StoreReadError: The root cannot be read.
        """


class FolderSource:
    """A ``.zarr`` folder, or a link to one; ``folder`` is where it stands."""

    def __init__(self, location: Path) -> None:
        self.folder = followed(location)
        self.location = str(location)

    def name(self, key: str) -> str:
        """Return the file's path."""
        return str(self.folder / key)

    def read(self, key: str, limit: int) -> bytes | None:
        """Return a file's bytes, or None when there is none."""
        name = self.name(key)
        try:
            # A pipe that waits for its writer must not hang the reader.
            descriptor = os.open(self.folder / key, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreReadError(name, error) from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise DamagedEntryError(name, "it must be a regular file")
            check_size(name, found.st_size, limit)
            return read_bounded(lambda count: os.read(descriptor, count), name, limit)
        except OSError as error:
            raise StoreReadError(name, error) from error
        finally:
            os.close(descriptor)

    def version_ids(self) -> list[str]:
        """Return the ids, the last published first."""
        ages: list[tuple[int, str]] = []
        try:
            with os.scandir(self.folder) as items:
                for item in items:
                    if is_version_id(item.name) and may_exist(Path(item.path, ROOT_KEY)):
                        with contextlib.suppress(FileNotFoundError):
                            ages.append((-item.stat().st_mtime_ns, item.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreReadError(self.location, error) from error
        return [version for _, version in sorted(ages)]

    def file_sizes(self, version: str) -> dict[str, int]:
        """Return the sizes of all files below a version, those of foreign names too."""
        sizes: dict[str, int] = {}
        for folder, _, names in os.walk(self.folder / version):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    sizes[path.relative_to(self.folder).as_posix()] = path.lstat().st_size
        return sizes

    def strangers(self) -> list[str]:
        """Return the paths of files and folders that do not belong here."""
        try:
            names = [path.name for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreReadError(self.location, error) from error
        return strange_names(self, names)


def may_exist(path: Path) -> bool:
    """Return whether something is there, or cannot be looked at: another user's may be."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        return error.errno != errno.ELOOP
    return True


def strange_names(source: Source, names: Iterable[str]) -> list[str]:
    """Return what is called by ``names`` in the root and is no part of the format, sorted."""
    own = {ROOT_KEY, *source.version_ids()}
    return [source.name(name) for name in sorted(names) if name not in own]


def read_part(source: Source, key: str, limit: int) -> bytes:
    """Return a file of a version whose document was read before.

    Raises:
        VersionRemovedError: The document is gone too: the whole version was removed.
        DamagedEntryError: The file is missing from a version that is there, or is too long.
        StoreReadError: It cannot be read.
    """
    data = source.read(key, limit)
    if data is not None:
        return data
    version = key.split("/", 1)[0]
    # A gc moves a version away as one folder, so that its document shows whether this is damage.
    if source.read(version_key(version), MAX_DOCUMENT_BYTES) is None:
        raise VersionRemovedError(version, source.name(key))
    # A publish may have put the version back between the two reads.
    data = source.read(key, limit)
    if data is None:
        raise DamagedEntryError(source.name(key), "the file is missing")
    return data


def check_size(name: str, size: int, limit: int) -> None:
    """Refuse a file that is longer than its reader allows, before it is read.

    Raises:
        DamagedEntryError: ``size`` is above ``limit``.
    """
    if size > limit:
        raise DamagedEntryError(
            name, "it is longer than it can be", expected=f"at most {limit} bytes", found=size
        )


def read_bounded(read: Callable[[int], bytes], name: str, limit: int) -> bytes:
    """Read to the end, and refuse as soon as ``limit`` bytes are passed.

    Args:
        read: Returns up to as many bytes as it is asked for, none at the end.
        name: What to name in an error.
        limit: Most bytes that are taken.

    Raises:
        DamagedEntryError: It is longer.
    """
    parts: list[bytes] = []
    left = limit + 1
    while left > 0:
        part = read(min(left, 1 << 20))
        if not part:
            break
        parts.append(part)
        left -= len(part)
    check_size(name, limit + 1 - left, limit)
    return b"".join(parts)
