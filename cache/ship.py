"""Carry a version between machines: pack and unpack a zip, push to and pull from a URL.

What is sent was verified before; receive.py verifies what comes. Only the format's own keys are
ever written. Sidecars stay at home: they are no part of a version, and nothing proves them.
"""

import contextlib
import os
import stat
import zipfile
from pathlib import Path

from cache.address import is_url
from cache.archive import ZipSource
from cache.atomic import staging_folder, sync_folder
from cache.chunk import ChunkGrid
from cache.errors import (
    CacheError,
    DamagedEntryError,
    ShippingError,
    StoreWriteError,
)
from cache.format import ROOT_KEY, SECTIONS, array_document, array_key, root_document, version_key
from cache.opening import open_store
from cache.place import followed
from cache.reader import VersionReader
from cache.receive import Shipment, receive, sound_chunk
from cache.remote import url_source
from cache.store import Store
from cache.upload import RemoteWriter
from cache.verify import findings_of
from cache.version import Version


def pack(store: Store, zip_path: str | os.PathLike[str], version: str | None = None) -> Shipment:
    """Write one version as a zip that ``open_store`` reads in place.

    Args:
        store: Where the version is.
        zip_path: The file to write, ending in ``.zip``; one that is there is replaced at once.
        version: An id or its first digits; None is the current one.

    Returns:
        What was written. Two packs of one version are equal byte for byte.

    Raises:
        VersionNotFoundError: There is no such version.
        DamagedEntryError: It is damaged; nothing is written.
        StoreWriteError: The disk refuses, or the name does not end in ``.zip``.
    """
    target = Path(zip_path)
    if target.suffix != ".zip":
        raise StoreWriteError(str(target), f"{target} must end in .zip")
    target = followed(target)
    reader = _sound_reader(store, version)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with staging_folder(target) as staging:
            copied, size = 0, 0
            with (staging / target.name).open("xb") as file:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                    for key in sorted([*reader.file_keys(), ROOT_KEY]):
                        data = _content(reader, key)
                        archive.writestr(_member(key), data)
                        copied, size = copied + 1, size + len(data)
                file.flush()
                os.fsync(file.fileno())
            (staging / target.name).replace(target)
        sync_folder(target.parent)
    except OSError as error:
        if isinstance(error, CacheError):
            raise
        state = "no part of a zip was left"
        raise StoreWriteError.caused_by(str(target), error, state) from error
    return Shipment(reader.version.id, copied, 0, size)


def unpack(
    zip_path: str | os.PathLike[str],
    location: str | os.PathLike[str],
    *,
    make_current: bool = True,
) -> Shipment:
    """Put the version of a packed zip into a store's folder.

    Args:
        zip_path: A file that ``pack`` wrote; it is not trusted.
        location: The ``.zarr`` folder; made when it is not there.
        make_current: Whether the version becomes the current one.

    Returns:
        What was written.

    Raises:
        StoreNotFoundError: There is no such zip.
        DamagedEntryError: The zip is not what ``pack`` wrote; nothing is written.
        FormatVersionError: It is of another format or version.
        StoreWriteError: The disk refuses.
    """
    store = open_store(zip_path)
    source = store.source
    if not isinstance(source, ZipSource):
        raise ShippingError(store.location, f"{store.location} is no .zip; `pull` takes others")
    with contextlib.closing(source):
        return receive(store, location, store.resolve(), make_current=make_current, resumable=False)


def push(
    store: Store, url: str, version: str | None = None, *, make_current: bool = True
) -> Shipment:
    """Copy a version to a URL: data first, the version's document next, the root last.

    Args:
        store: Where the version is.
        url: Such as ``s3://bucket/masks.zarr``; what is there already and right is not sent.
        version: An id or its first digits; None is the current one.
        make_current: Whether the version becomes the current one there.

    Returns:
        What was sent.

    Raises:
        VersionNotFoundError: There is no such version.
        DamagedEntryError: It is damaged here; nothing is sent.
        BackendMissingError: The package for the URL's protocol is not installed.
        ShippingError: The far end refuses; a second push sends what is missing.
        FormatVersionError: What stands at the URL is something else.
    """
    if not is_url(url) or url.startswith("file://"):
        return receive(
            store, url.removeprefix("file://"), store.resolve(version), make_current=make_current
        )
    far = RemoteWriter(url_source(url))
    before = far.root()
    reader = _sound_reader(store, version)
    copied, kept, size = 0, 0, 0
    # The version's document is the last of the keys: without it the version does not exist.
    for key in reader.file_keys():
        data = _content(reader, key)
        if far.holds(key, data):
            kept += 1
        else:
            far.write(key, data)
            copied, size = copied + 1, size + len(data)
    current = reader.version.id if make_current else before
    root = root_document(current)
    if far.holds(ROOT_KEY, root):
        kept += 1
    else:
        far.write(ROOT_KEY, root)
        copied, size = copied + 1, size + len(root)
    return Shipment(reader.version.id, copied, kept, size)


def pull(
    url: str,
    location: str | os.PathLike[str],
    version: str | None = None,
    *,
    make_current: bool = True,
) -> Shipment:
    """Copy a version from a URL into a store's folder.

    What a broken transfer got stays beside the folder, and the next pull goes on from there.

    Args:
        url: Such as ``https://host/masks.zarr``, or another folder; it is not trusted.
        location: The ``.zarr`` folder; made when it is not there.
        version: An id, or its first digits where the far end can list; None is its current one.
        make_current: Whether the version becomes the current one here.

    Returns:
        What was fetched.

    Raises:
        StoreNotFoundError: There is no cache at the URL.
        VersionNotFoundError: There is no such version.
        DamagedEntryError: What arrives is not what was published; nothing becomes visible.
        BackendMissingError: The package for the URL's protocol is not installed.
        StoreReadError: The far end refuses.
        StoreWriteError: The disk refuses.
    """
    store = open_store(url)
    return receive(store, location, store.resolve(version), make_current=make_current)


def _sound_reader(store: Store, version: str | None) -> VersionReader:
    reader = store.reader(version)
    for finding in findings_of(store.source, reader.version.id):
        raise DamagedEntryError(finding.file, finding.rule, entry=finding.entry)
    return reader


def _content(reader: VersionReader, key: str) -> bytes:
    version: Version = reader.version
    if key == ROOT_KEY:
        return root_document(version.id)
    if key == version_key(version.id):
        return version.document
    for section in SECTIONS:
        total = version.totals[section]
        if key == array_key(version.id, section):
            return array_document(total)
        if key.startswith(f"{version.id}/{section}/c/"):
            return sound_chunk(reader.source, key, ChunkGrid(total).length)
    raise AssertionError(f"{key} is no key of the version")


def _member(key: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(key, (1980, 1, 1, 0, 0, 0))
    info.create_system = 3
    info.external_attr = (stat.S_IFREG | 0o644) << 16
    return info
