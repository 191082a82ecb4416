"""The zarr v3 documents of a cache, and the keys that they stand under.

Every document but the root's follows from the manifest alone, so that it is compared byte for
byte. See docs/cache-format.md.
"""

import re

from cache.chunk import CODEC_LEVEL, FILL_VALUE, ChunkGrid
from cache.digest import canonical_json, parse_json
from cache.errors import DamagedEntryError, FormatVersionError

FORMAT = "flex-mask-cache"
"""The format's name, in the root's attributes and in each manifest."""

FORMAT_VERSION = 1
"""The one format version that is written and read."""

SECTIONS = ("spans", "tables")
"""The flat arrays of a version, in digest order."""

ROOT_KEY = "zarr.json"
"""The root's document; it alone is ever replaced."""

SIDECARS = "sidecars"
"""Folder beside the stores for what is known of a version but no part of it."""

OLD_SIDECARS = "attest"
"""Its name before; read and swept, never written."""

MAX_ROOT_BYTES = 1 << 16
"""Longest root document that is read."""

MAX_DOCUMENT_BYTES = 1 << 24
"""Longest version document that is written or read, 16 MiB."""

MAX_SECTION_VALUES = 1 << 36
"""Most int32 values of a section, 256 GiB in 4096 chunks."""

_ID = re.compile(r"[0-9a-f]{64}")
_ROOT_REMEDY = "Delete this one file, then pull, unpack or build: the versions beside it stay"


def is_version_id(text: str) -> bool:
    """Return whether ``text`` is 64 lower-case hexadecimal digits."""
    return _ID.fullmatch(text) is not None


def version_key(version: str) -> str:
    """Return the key of a version's document; the version exists when it does."""
    return f"{version}/zarr.json"


def array_key(version: str, section: str) -> str:
    """Return the key of the document of a section's array."""
    return f"{version}/{section}/zarr.json"


def chunk_key(version: str, section: str, index: int) -> str:
    """Return the key of chunk ``index`` of a section's array."""
    return f"{version}/{section}/c/{index}"


def root_document(current: str | None) -> bytes:
    """Write the root group's document; ``current`` is a version id, or None before the first."""
    attributes: dict[str, int | str] = {"format": FORMAT, "format_version": FORMAT_VERSION}
    if current is not None:
        attributes["current"] = current
    return canonical_json({"attributes": attributes, "node_type": "group", "zarr_format": 3})


def parse_root(data: bytes, file: str) -> str | None:
    """Read the root group's document.

    Args:
        data: Its bytes; spaces and the order of keys are free here.
        file: What to name in an error.

    Returns:
        The current version's id, or None when no version is current.

    Raises:
        FormatVersionError: It is a group of another format or version.
        DamagedEntryError: It is not the document of a cache's root.
    """
    try:
        document = parse_json(data)
    except ValueError as error:
        raise DamagedEntryError(
            file, "it must be a JSON document", found=str(error), in_folder=_ROOT_REMEDY
        ) from error
    attributes = document.get("attributes") if isinstance(document, dict) else None
    if not isinstance(attributes, dict):
        raise DamagedEntryError(
            file, "it must be the document of a zarr group with attributes", in_folder=_ROOT_REMEDY
        )
    check_format(attributes, file)
    current = attributes.get("current")
    if current is not None and not (isinstance(current, str) and is_version_id(current)):
        raise DamagedEntryError(
            file,
            "current must be 64 hexadecimal digits",
            found=repr(current),
            in_folder=_ROOT_REMEDY,
        )
    try:
        same = canonical_json(document) == root_document(current)
    except (TypeError, ValueError):
        same = False
    if not same:
        raise DamagedEntryError(
            file,
            "it must hold the format's name and version, and current, and nothing else",
            in_folder=_ROOT_REMEDY,
        )
    return current


def check_format(attributes: dict[str, object], file: str) -> None:
    """Refuse a document that is not of this format and version.

    Raises:
        FormatVersionError: With what was found and what this reader knows.
    """
    name, version = attributes.get("format"), attributes.get("format_version")
    if name != FORMAT:
        remedy = f"it is no cache ({FORMAT}), but another program's: name the folder of a cache"
        raise FormatVersionError(file, name, FORMAT_VERSION, remedy)
    if type(version) is not int or version != FORMAT_VERSION:
        raise FormatVersionError(file, version, FORMAT_VERSION)


_VERSION_HEAD = b'{"attributes":{"manifest":'
_VERSION_TAIL = b'},"node_type":"group","zarr_format":3}'


def version_document(manifest: bytes) -> bytes:
    """Write the document of a version's group around its canonical manifest."""
    return _VERSION_HEAD + manifest + _VERSION_TAIL


def manifest_of(document: bytes, file: str) -> bytes:
    """Return the manifest's bytes out of the document of a version's group.

    Raises:
        DamagedEntryError: The document is not what ``version_document`` writes.
    """
    if not (document.startswith(_VERSION_HEAD) and document.endswith(_VERSION_TAIL)):
        raise DamagedEntryError(file, "it must be the canonical document of a version's group")
    return document[len(_VERSION_HEAD) : -len(_VERSION_TAIL)]


def array_document(total: int) -> bytes:
    """Write the document of a section's array of ``total`` int32 values."""
    codec = {
        "blocksize": 0,
        "clevel": CODEC_LEVEL,
        "cname": "zstd",
        "shuffle": "shuffle",
        "typesize": 4,
    }
    return canonical_json(
        {
            "attributes": {},
            "chunk_grid": {
                "configuration": {"chunk_shape": [ChunkGrid(total).length]},
                "name": "regular",
            },
            "chunk_key_encoding": {"configuration": {"separator": "/"}, "name": "default"},
            "codecs": [
                {"configuration": {"endian": "little"}, "name": "bytes"},
                {"configuration": codec, "name": "blosc"},
                {"name": "crc32c"},
            ],
            "data_type": "int32",
            "fill_value": FILL_VALUE,
            "node_type": "array",
            "shape": [total],
            "zarr_format": 3,
        }
    )
