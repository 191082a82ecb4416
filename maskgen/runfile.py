"""A run file (TOML) -> its ``[masks]`` section; other sections are the runtime's."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maskgen.checks import check_known
from maskgen.errors import MaskSpecError

DEFAULT_CACHE = "build/masks.zarr"
"""Where the cache is when neither an option nor a run file says."""

_SECTION_KEYS = ("cache", "BLOCK_SIZE", "entry")


def read_document(path: str | Path) -> dict[str, Any]:
    """Read a TOML run file.

    Raises:
        MaskSpecError: It cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise MaskSpecError("CONFIG", str(path), f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise MaskSpecError("CONFIG", str(path), f"must be TOML ({error})") from error


def read_cache_location(source: str | Path | Mapping[str, Any]) -> str:
    """Return ``[masks].cache`` of a run file, or the default location."""
    return str(masks_section(source).get("cache", DEFAULT_CACHE))


def masks_section(source: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``[masks]`` table of a run file, its keys checked.

    Raises:
        MaskSpecError: The file cannot be read, or it has no such section or an unknown key in it.
    """
    document = source if isinstance(source, Mapping) else read_document(source)
    section = document.get("masks")
    if not isinstance(section, Mapping):
        raise MaskSpecError("masks", section, "must be a [masks] section of the run file")
    for key in section:
        check_known("masks", key, _SECTION_KEYS)
    if not isinstance(section.get("cache", ""), str):
        raise MaskSpecError("masks.cache", section["cache"], "must be a path")
    return section
