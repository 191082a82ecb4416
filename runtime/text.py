"""Prompt files into records: JSONL with conversations or prompts, and plain text.

A line or file that cannot be read is counted by reason and left out; it never stops a run.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What one line of a JSONL file, or one text file, holds. Exactly one field is set."""

    source: str
    """``path:line`` or ``path``, for messages."""
    messages: Any = None
    """The value of ``messages``, unchecked; a ``prompt`` becomes one user message."""
    text: str | None = None
    """A whole plain text, lines ended by LF."""


def read_records(paths: Sequence[str | Path], dropped: Counter[str]) -> list[Record]:
    """Read prompt files in the order given.

    A name that ends in .jsonl, .ndjson or .json is JSON lines; any other file is one plain text. A
    byte order mark and CRLF are taken off; blank lines are counted as such.

    Args:
        paths: Files, UTF-8.
        dropped: Reason -> count, added to.

    Raises:
        ConfigError: A file cannot be read.
    """
    records: list[Record] = []
    for path in map(Path, paths):
        try:
            content = path.read_bytes().removeprefix(BOM)
        except OSError as error:
            raise ConfigError(
                "data.prompts", str(path), f"must be a readable file ({error.strerror})"
            ) from error
        if path.suffix in JSONL_SUFFIXES:
            records += _read_lines(path, content, dropped)
        else:
            records += _read_text(path, content, dropped)
    return records


def _read_lines(path: Path, content: bytes, dropped: Counter[str]) -> list[Record]:
    records = []
    # Only LF ends a line: str.splitlines would also cut at U+2028 inside a JSON string.
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        if not line.strip():
            dropped["blank line"] += 1
            continue
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            dropped["line not UTF-8"] += 1
            continue
        except ValueError:
            dropped["line not JSON"] += 1
            continue
        record = _parse_record(f"{path}:{number}", value)
        if isinstance(record, Record):
            records.append(record)
        else:
            dropped[record] += 1
    return records


def _parse_record(source: str, value: Any) -> Record | str:
    if isinstance(value, dict) and "messages" in value:
        return Record(source=source, messages=value["messages"])
    if isinstance(value, dict) and "prompt" in value:
        prompt = value["prompt"]
        if not isinstance(prompt, str) or not prompt.strip():
            return "empty prompt"
        return Record(source=source, messages=[{"role": "user", "content": prompt}])
    return "neither messages nor prompt"


def _read_text(path: Path, content: bytes, dropped: Counter[str]) -> list[Record]:
    try:
        text = content.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        dropped["file not UTF-8"] += 1
        return []
    if not text.strip():
        dropped["empty file"] += 1
        return []
    return [Record(source=str(path), text=text)]
