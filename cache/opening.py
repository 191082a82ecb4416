"""A location -> the store that it names: a folder, a packed zip or a URL."""

import os
from pathlib import Path

from cache.address import is_url
from cache.advice import how_to_build
from cache.archive import ZipSource
from cache.errors import StoreNotFoundError, StoreWriteError
from cache.format import MAX_ROOT_BYTES, ROOT_KEY, parse_root
from cache.remote import url_source
from cache.source import FolderSource, Source
from cache.store import Store


def open_store(location: str | os.PathLike[str], writable: bool = False) -> Store:
    """Open a cache.

    Args:
        location: A ``.zarr`` folder, a packed ``.zip``, or a URL such as ``s3://bucket/m.zarr``.
        writable: Whether versions may be published; a folder that is not there is made by the
            first ``publish``.

    Returns:
        The store.

    Raises:
        StoreNotFoundError: There is no cache, and ``writable`` is false.
        StoreWriteError: ``writable`` is asked of a zip or a URL, or of a folder whose name does
            not end in ``.zarr``.
        FormatVersionError: It is of another format or version.
        DamagedEntryError: Its root is not what this library writes.
        BackendMissingError: The package for the URL's protocol is not installed.
    """
    source = _source(os.fspath(location))
    is_folder = isinstance(source, FolderSource) and Path(source.location).suffix == ".zarr"
    if writable and not is_folder:
        msg = f"{source.location} cannot be written: name a folder that ends in .zarr"
        raise StoreWriteError(source.location, msg)
    document = source.read(ROOT_KEY, MAX_ROOT_BYTES)
    if document is not None:
        current = parse_root(document, source.name(ROOT_KEY))
    elif writable:
        current = None
    else:
        if isinstance(source, FolderSource) and source.folder.is_file():
            msg = f"{source.location} is a file; a cache is a folder, or a packed file in .zip"
            raise StoreNotFoundError(source.location, msg)
        bring = "" if is_url(source.location) else "`unpack` and `pull` bring one, or "
        how = f"{bring}{how_to_build(source.location)}"
        msg = f"there is no cache at {source.location} (no {ROOT_KEY} in it); {how}"
        raise StoreNotFoundError(source.location, msg)
    return Store(source, current, writable=writable)


def _source(location: str) -> Source:
    if location.startswith("file://"):
        location = location.removeprefix("file://")
    elif is_url(location):
        return url_source(location)
    path = Path(location)
    if path.suffix == ".zip":
        return ZipSource(path)
    return FolderSource(path)
