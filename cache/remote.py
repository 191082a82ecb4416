"""fsspec file systems by URL, with errors that name what is missing."""

import contextlib
from collections.abc import Iterator

import fsspec

from cache.errors import BackendMissingError, CacheError, ShippingError
from cache.layout import MAX_ROOT_BYTES, ROOT_KEY, parse_root
from cache.source import UrlSource, protocols, without_password

PIP_LINES = {
    "http": "pip install aiohttp requests",
    "https": "pip install aiohttp requests",
    "s3": "pip install s3fs",
    "s3a": "pip install s3fs",
    "gs": "pip install gcsfs",
    "gcs": "pip install gcsfs",
    "hf": "pip install huggingface_hub",
    "sftp": "pip install paramiko",
    "ssh": "pip install paramiko",
    "abfs": "pip install adlfs",
    "az": "pip install adlfs",
}
"""What installs the package behind a protocol."""

_OBJECT_STORES = frozenset(
    {"s3", "s3a", "gs", "gcs", "hf", "http", "https", "abfs", "az", "adl", "oci", "oss"}
)
_CRC_BYTES = 4


def is_url(location: str) -> bool:
    """Tell whether ``location`` is a URL rather than a path."""
    return "://" in location


def url_source(url: str) -> UrlSource:
    """Return the source behind a URL such as ``s3://bucket/masks.zarr``.

    Raises:
        BackendMissingError: The package for its protocol is not installed; the pip line is named.
        ShippingError: The protocol is unknown, or its options do not fit.
    """
    protocol = url.split("://", 1)[0]
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
        source = UrlSource(url, filesystem, root)
        # What was listed before is stale, since another process may have published.
        with source.guard:
            filesystem.invalidate_cache()
    except ImportError as error:
        pip_line = PIP_LINES.get(protocol, f"see fsspec's documentation of {protocol}")
        raise BackendMissingError(without_password(url), protocol, pip_line) from error
    except Exception as error:  # each backend raises errors of its own library
        shown = without_password(url)
        raise ShippingError(shown, f"cannot open {shown}: {error}") from error
    return source


class RemoteWriter:
    """Writes a cache's files behind a URL, each whole or not at all.

    An object store makes an object visible when it is complete; elsewhere a file is written
    beside its place and renamed.
    """

    def __init__(self, source: UrlSource) -> None:
        self.source = source
        self._is_object_store = not _OBJECT_STORES.isdisjoint(protocols(source.filesystem))

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
        """Tell whether the file is there, as long as ``data`` and with its last four bytes.

        A chunk ends in the CRC-32C of all that is before it, so its last bytes tell it from
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
            filesystem.pipe_file(f"{path}.part", data)
            filesystem.mv(f"{path}.part", path)

    @contextlib.contextmanager
    def _typed_errors(self, key: str) -> Iterator[None]:
        try:
            with self.source.guard:
                yield
        except CacheError:
            raise
        except Exception as error:  # each backend raises errors of its own library
            name = self.source.name(key)
            raise ShippingError(
                self.source.location,
                f"cannot write {name}: {error or type(error).__name__}; no reader sees a half "
                f"version, and a second push sends what is missing",
            ) from error
