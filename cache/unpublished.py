"""A version before it is published: entries put end to end, and written as files."""

import concurrent.futures
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cache.atomic import write_synced
from cache.chunk import FILL_VALUE, ChunkGrid, IntArray, encode_chunk
from cache.digest import canonical_json, sha256_hex
from cache.entry import EntryData
from cache.errors import InvalidEntryError
from cache.format import (
    FORMAT,
    FORMAT_VERSION,
    MAX_DOCUMENT_BYTES,
    SECTIONS,
    array_document,
    array_key,
    chunk_key,
    version_document,
    version_key,
)
from cache.version import Version, parse_version


@dataclasses.dataclass(frozen=True)
class UnpublishedVersion:
    """A version assembled in memory and ready to be written."""

    version: Version
    values: Mapping[str, tuple[IntArray, ...]]
    """By section, flat int32 arrays that follow one another without a gap."""


def assemble(entries: Iterable[EntryData]) -> UnpublishedVersion:
    """Place entries end to end, take their digests and write the manifest.

    Args:
        entries: In any order; equal content gives an equal id whatever the order.

    Returns:
        The version, unpublished.

    Raises:
        InvalidEntryError: An entry breaks a rule, two have one name, or the manifest is too long.
    """
    totals = dict.fromkeys(SECTIONS, 0)
    values: dict[str, list[IntArray]] = {section: [] for section in SECTIONS}
    listed: list[dict[str, Any]] = []
    names: set[str] = set()
    for entry in sorted(entries, key=lambda entry: entry.name):
        entry.check()
        if entry.name in names:
            raise InvalidEntryError(entry.name, "the name must be unique; rename one of the two")
        names.add(entry.name)
        digest = hashlib.sha256()
        item: dict[str, Any] = {
            "attrs": entry.attrs,
            "name": entry.name,
            "offsets": dict(totals),
            "spec": entry.spec,
        }
        for section, group in zip(SECTIONS, (entry.spans, entry.tables), strict=True):
            item[section] = {name: list(array.shape) for name, array in group.items()}
            for name in sorted(group):
                flat = np.ascontiguousarray(group[name], "<i4").reshape(-1)
                digest.update(flat.data)
                totals[section] += flat.size
                values[section].append(flat)
        item["sha256"] = digest.hexdigest()
        listed.append(item)
    manifest = canonical_json(
        {
            "entries": listed,
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "sections": totals,
        }
    )
    document = version_document(manifest)
    if len(document) > MAX_DOCUMENT_BYTES:
        raise InvalidEntryError(
            listed[-1]["name"],
            f"the manifest must stay within {MAX_DOCUMENT_BYTES} bytes, found {len(document)}; "
            f"publish fewer entries a version",
        )
    version = parse_version(document, sha256_hex(manifest), "manifest")
    return UnpublishedVersion(version, {section: tuple(parts) for section, parts in values.items()})


def make_folders(folder: Path, version_id: str) -> None:
    """Make the folders of a version in ``folder``, which is not made again if it is gone.

    Raises:
        OSError: The disk refuses.
    """
    (folder / version_id).mkdir()
    for section in SECTIONS:
        (folder / version_id / section).mkdir()
        (folder / version_id / section / "c").mkdir()


def write_version(new: UnpublishedVersion, folder: Path) -> None:
    """Write a version's files below ``folder``, each synced, its own document last.

    Raises:
        OSError: The disk refuses.
    """
    version = new.version
    make_folders(folder, version.id)
    # A thread that is not the main one makes Blosc use one thread: equal content, equal bytes.
    with concurrent.futures.ThreadPoolExecutor(len(SECTIONS)) as pool:
        for section in SECTIONS:
            grid = ChunkGrid(version.totals[section])
            chunks = _chunks(new.values[section], grid)
            # One at a time, so that a version larger than memory's half is not copied whole.
            for index, chunk in enumerate(chunks):
                data = pool.submit(encode_chunk, chunk).result()
                write_synced(folder / chunk_key(version.id, section, index), data)
            write_synced(
                folder / array_key(version.id, section), array_document(version.totals[section])
            )
    write_synced(folder / version_key(version.id), version.document)


def _chunks(parts: tuple[IntArray, ...], grid: ChunkGrid) -> Iterator[IntArray]:
    """Cut arrays that follow one another into the grid's chunks, the last one padded."""
    chunk = np.full(grid.length, FILL_VALUE, np.int32)
    filled = 0
    for part in parts:
        done = 0
        while done < part.size:
            taken = min(part.size - done, grid.length - filled)
            chunk[filled : filled + taken] = part[done : done + taken]
            done += taken
            filled += taken
            if filled == grid.length:
                yield chunk
                chunk = np.full(grid.length, FILL_VALUE, np.int32)
                filled = 0
    if filled:
        yield chunk
