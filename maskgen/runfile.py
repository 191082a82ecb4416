"""A run file (TOML) with overrides -> its sections; ``[masks]`` is checked here.

``--set section.key=value`` overrides one key, the value in TOML syntax; what is none is taken as a
string, so that a bare word needs no quotes.
"""

import copy
import json
import shlex
import tomllib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from maskgen.checks import check_known, nearest
from maskgen.errors import MaskSpecError

DEFAULT_CACHE = "build/masks.zarr"
"""Where the cache is when neither an option nor a run file says."""

SECTIONS = ("run", "target", "data", "masks", "drafter", "train", "evaluate")
"""Of a run file; only ``[masks]`` is read here, and a setting of another name is a slip."""

_SECTION_KEYS = ("cache", "BLOCK_SIZE", "entry")


def read_document(path: str | Path, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Read a TOML run file.

    Args:
        path: The file.
        settings: ``section.key=value`` each, applied in order.

    Raises:
        MaskSpecError: It cannot be read or is not TOML, or a setting is malformed.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise MaskSpecError("--config", str(path), f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise MaskSpecError("--config", str(path), f"must be TOML ({error})") from error
    return with_settings(document, settings)


def with_settings(
    document: Mapping[str, Any],
    settings: Sequence[str],
    sections: Collection[str] | None = SECTIONS,
) -> dict[str, Any]:
    """Return a copy of a document with ``section.key=value`` each, applied in order.

    Args:
        document: As ``read_document`` returns it; stays as it is.
        settings: As in ``read_document``.
        sections: What a setting may name beside the document's own; None for anything.

    Raises:
        MaskSpecError: A setting is malformed or names another section.
    """
    changed = copy.deepcopy(dict(document))
    for setting in settings:
        _apply(changed, setting, sections)
    return changed


def _apply(document: dict[str, Any], setting: str, sections: Collection[str] | None) -> None:
    where, separator, text = setting.partition("=")
    *tables, key = where.strip().split(".")
    if not separator or not tables or not all([*tables, key]):
        raise MaskSpecError("--set", setting, "must read section.key=value")
    try:
        setting.encode()
    except UnicodeEncodeError as error:
        # Prepared data could be written below such a path, and not read again: safetensors.
        raise MaskSpecError("--set", setting, "must be UTF-8, paths too") from error
    if sections is not None and tables[0] not in document and tables[0] not in sections:
        raise MaskSpecError("--set", setting, f"section {nearest(tables[0], sections)}")
    table = document
    for depth, name in enumerate(tables, start=1):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            section = ".".join(tables[:depth])
            raise MaskSpecError(section, table, f"must be a table, [{section}]")
    table[key] = read_value(text)


def read_value(text: str) -> Any:
    """A value in TOML syntax; what is none is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def setting(key: str, value: str) -> str:
    """Return what ``--set`` takes to give a key this string."""
    return f"{key}={value if read_value(value) == value else json.dumps(value, ensure_ascii=False)}"


def with_run_file(message: str, path: str | None, settings: Sequence[str] = ()) -> str:
    """Fill the run file and the settings of a command into the commands that an error advises.

    Args:
        message: The error; ``cache.advice.RUN_FILE`` stands in each command.
        path: The run file; None leaves the message as it is.
        settings: As in ``read_document``.
    """
    from cache.advice import RUN_FILE

    if path is None:
        return message
    words = ["--config", path, *(word for setting in settings for word in ("--set", setting))]
    return message.replace(RUN_FILE, shlex.join(words))


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
    check_known("masks", section, _SECTION_KEYS)
    if not isinstance(section.get("cache", ""), str):
        raise MaskSpecError("masks.cache", section["cache"], "must be a path")
    return section
