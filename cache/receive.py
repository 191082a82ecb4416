"""Take a version from anywhere into a store's folder: what comes is verified before it is seen.

Each receiver fetches into a folder of its own. It looks for chunks in those that others are at or
have left, by content, and fetches what is missing or wrong there.
"""

import contextlib
import dataclasses
import os
from pathlib import Path

from cache.atomic import discard, write_synced
from cache.chunk import ChunkGrid, check_chunk, max_chunk_bytes
from cache.errors import (
    CacheError,
    DamagedEntryError,
    StoreReadError,
    StoreWriteError,
    VersionNotFoundError,
)
from cache.format import SECTIONS, array_document, array_key, chunk_key, version_key
from cache.opening import open_store
from cache.place import prefix_of, staged
from cache.reader import VersionReader
from cache.source import FolderSource, Source, read_part
from cache.store import Store
from cache.unpublished import make_folders
from cache.verify import findings_of
from cache.writer import StoreWriter


@dataclasses.dataclass(frozen=True)
class Shipment:
    """What a pack, unpack, push or pull did."""

    version: str
    """The id of the version."""
    copied: int
    """Files that were written."""
    kept: int
    """Files that were there already and right."""
    copied_bytes: int


def receive(
    store: Store,
    location: str | os.PathLike[str],
    version_id: str,
    *,
    make_current: bool,
    resumable: bool = True,
) -> Shipment:
    """Take a version into the folder ``location``.

    Args:
        store: Where it is; not trusted.
        location: The ``.zarr`` folder; made when it is not there.
        version_id: The version.
        make_current: Whether it becomes the current one.
        resumable: Whether what was got is left for the next one when the far end fails.

    Raises:
        CacheError: As ``pull`` and ``unpack``.
    """
    writer = open_store(location, writable=True).writer()
    receiver = _Receiver(store.reader(version_id), writer, make_current, resumable)
    if writer.stands(version_id):
        # Unless a gc takes it before it is current.
        with contextlib.suppress(VersionNotFoundError):
            written = writer.finish(version_id, make_current=make_current)
            receiver.drop_parts()
            return receiver.shipment(receiver.nothing_fetched, written)
    return receiver.run()


class _Receiver:
    """One version on its way from a reader into a writer's folder."""

    def __init__(
        self, reader: VersionReader, writer: StoreWriter, make_current: bool, resumable: bool
    ) -> None:
        self.reader = reader
        self.version = reader.version
        self.writer = writer
        self.make_current = make_current
        self.resumable = resumable
        self.label = f"pull-{reader.version.id[:16]}"
        self.nothing_fetched = Shipment(self.version.id, 0, len(list(reader.file_keys())), 0)
        self._has_got = False

    def run(self) -> Shipment:
        try:
            done = self.writer.attempt(self._take, f"{self.label}-", self._is_left)
        except StoreWriteError:
            # When the disk here refuses, what was got must not go on filling it.
            self.drop_parts()
            raise
        self.drop_parts()
        return done

    def shipment(self, fetched: Shipment, written: int) -> Shipment:
        """Count the root's document, too: ``written`` bytes, none where it was kept."""
        return Shipment(
            self.version.id,
            fetched.copied + (written > 0),
            fetched.kept + (written == 0),
            fetched.copied_bytes + written,
        )

    def drop_parts(self) -> None:
        """Remove what others are at or have left of this version: they look at the store again."""
        for part in self._parts():
            discard(part, prefix_of(part, self.writer.folder))

    def _parts(self) -> list[Path]:
        try:
            return staged(self.writer.folder, self.label)
        except OSError:
            return []

    def _is_left(self, error: BaseException) -> bool:
        from_afar = isinstance(error, StoreReadError) or not isinstance(error, OSError)
        return self.resumable and self._has_got and from_afar

    def _take(self, staging: Path) -> Shipment | None:
        version_id = self.version.id
        # Another one may have been first.
        if self.writer.stands(version_id):
            fetched = self.nothing_fetched
        elif found := self._fetch(staging):
            fetched = found
            self.writer.install(staging / version_id, version_id)
        else:
            return None
        written = self.writer.choose(version_id, staging, make_current=self.make_current)
        return None if written is None else self.shipment(fetched, written)

    def _fetch(self, staging: Path) -> Shipment | None:
        """Fetch chunks into ``staging``; documents follow from the manifest.

        Returns:
            What was fetched; None when a part held what looks right and is wrong. It is removed.
        """
        version, parts = self.version, [part for part in self._parts() if part != staging]
        self._has_got = False
        copied, kept, size = 0, 0, 0
        make_folders(staging, version.id)
        try:
            for section in SECTIONS:
                length = ChunkGrid(version.totals[section]).length
                for index in range(ChunkGrid(version.totals[section]).count):
                    key = chunk_key(version.id, section, index)
                    data = _chunk_in(parts, key, length)
                    if data is None:
                        data = sound_chunk(self.reader.source, key, length)
                        copied, size = copied + 1, size + len(data)
                    else:
                        kept += 1
                    write_synced(staging / key, data)
                    self._has_got = True
        except BaseException:
            self._drop_within(staging, parts)
            raise
        for section in SECTIONS:
            document = array_document(version.totals[section])
            write_synced(staging / array_key(version.id, section), document)
            size += len(document)
        write_synced(staging / version_key(version.id), version.document)
        findings = findings_of(_Arrived(staging, self.reader.source), version.id)
        if findings:
            self._has_got = False
            if kept:
                self.drop_parts()
                return None
            first = findings[0]
            raise DamagedEntryError(first.file, first.rule, entry=first.entry)
        return Shipment(version.id, copied + 3, kept, size + len(version.document))

    def _drop_within(self, staging: Path, parts: list[Path]) -> None:
        """Remove parts that hold nothing that ``staging`` lacks, so that they do not pile up."""
        got = _names(staging)
        for part in parts:
            if _names(part) <= got:
                discard(part, prefix_of(part, self.writer.folder))


class _Arrived(FolderSource):
    """What was fetched; messages name where it came from."""

    def __init__(self, folder: Path, origin: Source) -> None:
        super().__init__(folder)
        self.origin = origin

    def name(self, key: str) -> str:
        """Return the name of the far end."""
        return self.origin.name(key)


def sound_chunk(source: Source, key: str, length: int) -> bytes:
    """Return a chunk whose checksum is right.

    Args:
        source: Where it is.
        key: Of the chunk.
        length: int32 values in it.

    Raises:
        DamagedEntryError: It is missing or not what was published.
        VersionRemovedError: The version is gone.
        StoreReadError: It cannot be read.
    """
    data = read_part(source, key, max_chunk_bytes(length))
    check_chunk(data, length, source.name(key))
    return data


def _chunk_in(parts: list[Path], key: str, length: int) -> bytes | None:
    """Return the bytes of a chunk of which one of ``parts`` has a sound copy."""
    for part in parts:
        with contextlib.suppress(CacheError):
            return sound_chunk(FolderSource(part), key, length)
    return None


def _names(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir()}
