"""A cache behind a URL, read in place through fsspec, with errors that say what helps."""

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem, sync

from cache.address import split_query, without_secrets
from cache.causes import SILENCE_S, why
from cache.errors import (
    BackendMissingError,
    CacheError,
    NotListableError,
    ShippingError,
    StoreReadError,
)
from cache.format import is_version_id, version_key
from cache.source import check_size, strange_names

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

_THREAD_SAFE = frozenset({"file", "local", "memory"})
"""Protocols whose fsspec file systems many threads may call at once, besides the async ones."""

_ONE_AT_A_TIME = threading.RLock()
"""Held around each call of any other: it may have one connection, and fsspec shares it."""

_NOT_THERE = (404, 410)
_PAGE = re.compile(rb"\s*<(!doctype|html|head|body|\?xml|error)\b", re.IGNORECASE)
_PART_BYTES = 1 << 20


def url_source(url: str) -> "UrlSource":
    """Return the source behind a URL such as ``s3://bucket/masks.zarr``.

    Raises:
        BackendMissingError: The package for its protocol is not installed; the pip line is named.
        ShippingError: The protocol is unknown, or the server cannot be reached.
    """
    protocol, shown = url.split("://", 1)[0], without_secrets(url)
    try:
        filesystem, root = fsspec.core.url_to_fs(url, **_options(protocol))
        source = UrlSource(url, filesystem, root)
        # What was listed before is stale, since another process may have published.
        with source.guard:
            filesystem.invalidate_cache()
    except ImportError as error:
        pip_line = PIP_LINES.get(protocol, f"see fsspec's documentation of {protocol}")
        raise BackendMissingError(shown, protocol, pip_line) from error
    except Exception as error:  # each backend raises errors of its own library
        message = "cannot open {}: {}; {}".format(shown, *why(error, url))
    else:
        return source
    # Without its cause, which shows what is hidden here.
    raise ShippingError(shown, message)


def _options(protocol: str) -> dict[str, Any]:
    """What ends the silence of an SSH server; the user's own fsspec settings go first."""
    if protocol not in ("sftp", "ssh"):
        return {}
    # Else it prints the traceback of each failure, which is raised as well.
    logging.getLogger("paramiko").addHandler(logging.NullHandler())
    own = fsspec.config.conf.get(protocol, {})
    return {name: SILENCE_S for name in ("timeout", "channel_timeout") if name not in own}


class UrlSource:
    """A cache behind an fsspec file system, read in place."""

    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        self.filesystem = filesystem
        # fsspec guesses an HTTP server's files from the links of a page; that is no listing.
        self.lists = "http" not in protocols(filesystem)
        # Of a web address a query, such as a token, stays behind the path of each file.
        root, self._query = (root, "") if self.lists else split_query(root)
        address, query = (url, "") if self.lists else split_query(url)
        self.root = root.rstrip("/")
        self._address = address.rstrip("/")
        self.location = without_secrets(self._address + query)
        # An async file system hands its calls to one thread of its own.
        safe = filesystem.async_impl or not _THREAD_SAFE.isdisjoint(protocols(filesystem))
        self.guard: contextlib.AbstractContextManager[Any]
        self.guard = contextlib.nullcontext() if safe else _ONE_AT_A_TIME
        if hasattr(filesystem, "ftp"):
            filesystem.ftp.get_channel().settimeout(SILENCE_S)

    def name(self, key: str) -> str:
        """Return the object's address."""
        return without_secrets(f"{self._address}/{key}{self._query}")

    def path(self, key: str) -> str:
        """Return the object's path within the file system."""
        return f"{self.root}/{key}{self._query}"

    def read(self, key: str, limit: int) -> bytes | None:
        """Return an object's bytes, or None when there is none."""
        name, path = self.name(key), self.path(key)
        try:
            with self.typed_errors(name):
                if self.lists:
                    check_size(name, self._ask("info", path)["size"], limit)
                    data: bytes | None = self.filesystem.cat_file(path)
                else:
                    loop = self.filesystem.loop
                    data = sync(loop, _read_http, self.filesystem, path, name, limit)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        if data is not None:
            check_size(name, len(data), limit)
            if _PAGE.match(data):
                raise StoreReadError(name, WebPage())
        return data

    def version_ids(self) -> list[str]:
        """Return the ids, sorted."""
        with self.typed_errors(self.location):
            self.filesystem.invalidate_cache()
        names = (path.rstrip("/").rsplit("/", 1)[-1] for path in self._listed(self.root))
        return sorted(name for name in names if is_version_id(name) and self._holds(name))

    def file_sizes(self, version: str) -> dict[str, int]:
        """Return the sizes of all objects below a version."""
        sizes: dict[str, int] = {}
        folders = [f"{self.root}/{version}"]
        while folders:
            for path, info in self._listed(folders.pop()).items():
                if info["type"] == "directory":
                    folders.append(path)
                else:
                    sizes[version + path.rsplit(version, 1)[-1]] = int(info["size"])
        return sizes

    def strangers(self) -> list[str]:
        """Return the addresses of objects and folders that do not belong here."""
        try:
            paths = list(self._listed(self.root))
        except NotListableError:
            return []
        return strange_names(self, [path.rstrip("/").rsplit("/", 1)[-1] for path in paths])

    def _ask(self, what: str, path: str, **options: Any) -> Any:
        """Call ``info`` or ``ls``, short questions that are asked before anything is read.

        So the limit holds for all attempts together: S3's own come to 400 s.
        """
        if isinstance(self.filesystem, AsyncFileSystem):
            ask = getattr(self.filesystem, f"_{what}")
            loop = self.filesystem.loop
            return sync(loop, ask, path, timeout=SILENCE_S, **options)
        return getattr(self.filesystem, what)(path, **options)

    def _holds(self, version: str) -> bool:
        try:
            with self.typed_errors(self.name(version_key(version))):
                self._ask("info", self.path(version_key(version)))
        except FileNotFoundError:
            return False
        return True

    def _listed(self, folder: str) -> dict[str, dict[str, Any]]:
        if not self.lists:
            raise NotListableError(self.location)
        try:
            with self.typed_errors(self.location):
                try:
                    return {item["name"]: item for item in self._ask("ls", folder, detail=True)}
                except (PermissionError, NotImplementedError):
                    raise NotListableError(self.location) from None
        except FileNotFoundError:
            return {}

    @contextlib.contextmanager
    def typed_errors(self, name: str) -> Iterator[None]:
        """One call of the file system; what is not there stays an error of the system."""
        try:
            with self.guard:
                yield
        except (CacheError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise
        except Exception as error:  # each backend raises errors of its own library
            # Their text may show a token, and so would a traceback that ends in them.
            raise StoreReadError(name, error) from None


class WebPage(Exception):
    """What a server sends for a person to read."""


async def _read_http(filesystem: Any, url: str, name: str, limit: int) -> bytes | None:
    """Return what a web server sends for ``url``, or None when it has no such file.

    fsspec's own reading waits for a silent server for 300 s, leaves connections of refused requests
    open, and goes by the length that a server announces.
    """
    import aiohttp

    silence = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
    session = await filesystem.set_session()
    options = {"timeout": silence, **filesystem.kwargs}
    data = bytearray()
    async with session.get(filesystem.encode_url(url), **options) as response:
        if response.status in _NOT_THERE:
            return None
        response.raise_for_status()
        async for part in response.content.iter_chunked(_PART_BYTES):
            data += part
            check_size(name, len(data), limit)
    return bytes(data)


def protocols(filesystem: Any) -> tuple[str, ...]:
    """Return the protocols that an fsspec file system answers to."""
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
