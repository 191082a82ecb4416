"""Writes a cache's files behind a URL."""

import contextlib
import secrets
from collections.abc import Iterator

from cache.causes import why
from cache.errors import CacheError, ShippingError
from cache.format import MAX_ROOT_BYTES, ROOT_KEY, parse_root
from cache.place import INSIDE
from cache.remote import UrlSource, protocols

_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "hf", "abfs", "az", "adl", "oci", "oss"})
_CRC_BYTES = 4


class RemoteWriter:
    """Writes a cache's files behind a URL, each whole or not at all.

    An object store makes an object visible when it is complete; elsewhere a file is written
    under another name and renamed.

    Raises:
        ShippingError: It is a web server, which takes no files.
    """

    def __init__(self, source: UrlSource) -> None:
        self.source = source
        kinds = protocols(source.filesystem)
        if "http" in kinds:
            raise ShippingError(
                source.location,
                f"cannot write {source.location}: a web server takes no files; `push` to where it "
                "serves them from, such as a folder or a bucket",
            )
        self._is_object_store = not _OBJECT_STORES.isdisjoint(kinds)

    def root(self) -> str | None:
        """Return the current version's id there, or None when there is no cache or none current.

        Raises:
            FormatVersionError: Something else stands there.
            DamagedEntryError: The root there is damaged.
            StoreReadError: It cannot be read.
        """
        document = self.source.read(ROOT_KEY, MAX_ROOT_BYTES)
        return None if document is None else parse_root(document, self.source.name(ROOT_KEY))

    def holds(self, key: str, data: bytes) -> bool:
        """Return whether the file is there, as long as ``data`` and with its last four bytes.

        A chunk ends in the CRC-32C of all that is before it, so its last bytes differ from those of
        others; documents are short and compared whole.
        """
        path = self.source.path(key)
        with self._typed_errors(key):
            try:
                if int(self.source.filesystem.info(path)["size"]) != len(data):
                    return False
                # Counted from the front, since SFTP knows no place before the end.
                start = len(data) - _CRC_BYTES if "/c/" in key else 0
                found: bytes = self.source.filesystem.cat_file(path, start=start)
            except FileNotFoundError:
                return False
        return found == data[start:]

    def write(self, key: str, data: bytes) -> None:
        """Write a file.

        Raises:
            ShippingError: The far end refuses.
        """
        path, filesystem = self.source.path(key), self.source.filesystem
        with self._typed_errors(key):
            if self._is_object_store:
                filesystem.pipe_file(path, data)
                return
            filesystem.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            # Of its own name, as another one may push the same; beside the versions, so that one
            # that is left belongs to none.
            part = self.source.path(f"{INSIDE}{secrets.token_hex(8)}")
            filesystem.pipe_file(part, data)
            filesystem.mv(part, path)

    @contextlib.contextmanager
    def _typed_errors(self, key: str) -> Iterator[None]:
        try:
            with self.source.guard:
                yield
        except CacheError:
            raise
        except Exception as error:  # each backend raises errors of its own library
            name = self.source.name(key)
            what, helps = why(error, name)
            # Without its cause, which may show a token.
            raise ShippingError(
                self.source.location,
                f"cannot write {name}: {what}; no reader sees a half version, and a second push "
                f"sends what is missing; {helps}",
            ) from None
