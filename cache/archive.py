"""A packed cache: a zip of stored members that is read in place, and never trusted."""

import re
import stat
import struct
import zipfile
from pathlib import Path

from cache.advice import how_to_build
from cache.errors import DamagedEntryError, StoreNotFoundError, StoreReadError
from cache.format import version_key
from cache.source import check_size

MAX_ZIP_MEMBERS = 1 << 16
"""Most members of a packed zip that is opened."""

_KEY = re.compile(
    r"zarr\.json|[0-9a-f]{64}/(zarr\.json|(spans|tables)/(zarr\.json|c/(0|[1-9][0-9]{0,3})))"
)

ZIP_ERRORS = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    EOFError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    ValueError,
    struct.error,
)
"""What the zipfile module raises on bytes that are no sound zip."""


class ZipSource:
    """A zip written by ``pack``, read in place.

    Raises:
        StoreNotFoundError: There is no such file.
        DamagedEntryError: It is no zip, or a member breaks a rule: only the format's keys, each
            once, stored, regular and together no longer than the file.
    """

    def __init__(self, path: Path) -> None:
        self.location = str(path)
        try:
            self._zip = zipfile.ZipFile(path)
        except FileNotFoundError as error:
            msg = f"there is no file {path}; {how_to_build(self.location)}"
            raise StoreNotFoundError(self.location, msg) from error
        except ZIP_ERRORS as error:
            raise DamagedEntryError(self.location, "it must be a zip", found=str(error)) from error
        except OSError as error:
            raise StoreReadError(self.location, error) from error
        try:
            self._members = self._checked(path.stat().st_size)
        except BaseException:
            self._zip.close()
            raise

    def _checked(self, file_size: int) -> dict[str, zipfile.ZipInfo]:
        members: dict[str, zipfile.ZipInfo] = {}
        listed = self._zip.infolist()
        if len(listed) > MAX_ZIP_MEMBERS:
            self._refuse("", f"a packed cache has at most {MAX_ZIP_MEMBERS} members", len(listed))
        left = file_size
        for info in listed:
            if _KEY.fullmatch(info.filename) is None or info.orig_filename != info.filename:
                self._refuse("", "a member must be named by a key of the format", info.filename)
            if info.filename in members:
                self._refuse(info.filename, "a name must stand once", "two")
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1:
                self._refuse(info.filename, "a member must be stored, neither packed nor encrypted")
            if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
                self._refuse(info.filename, "a member must be a regular file", "a link or device")
            left -= info.file_size
            if info.file_size != info.compress_size or left < 0:
                self._refuse(info.filename, "sizes must fit the file", info.file_size)
            members[info.filename] = info
        return members

    def _refuse(self, key: str, rule: str, found: object = None) -> None:
        name = self.name(key) if key else self.location
        raise DamagedEntryError(name, rule, found=found)

    def name(self, key: str) -> str:
        """Return the zip's path and the member's name."""
        return f"{self.location}!{key}"

    def read(self, key: str, limit: int) -> bytes | None:
        """Return a member's bytes, or None when there is none."""
        info = self._members.get(key)
        if info is None:
            return None
        check_size(self.name(key), info.file_size, limit)
        try:
            return self._zip.read(info)
        except ZIP_ERRORS as error:
            raise DamagedEntryError(
                self.name(key), "the zip must hold it whole", found=str(error)
            ) from error
        except OSError as error:
            raise StoreReadError(self.name(key), error) from error

    def version_ids(self) -> list[str]:
        """Return the ids, sorted."""
        ids = {key.split("/")[0] for key in self._members if "/" in key}
        return sorted(version for version in ids if version_key(version) in self._members)

    def file_sizes(self, version: str) -> dict[str, int]:
        """Return the sizes of a version's members."""
        return {
            key: info.file_size
            for key, info in self._members.items()
            if key.startswith(f"{version}/")
        }

    def strangers(self) -> list[str]:
        """Return none: a zip with a member of another name was refused."""
        return []

    def close(self) -> None:
        """Close the file."""
        self._zip.close()
