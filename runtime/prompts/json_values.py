"""JSON in prompt files: a value a line, or values in one document; what is wrong is left out.

Strict where a guess would be wrong (a key given twice), lenient where nothing is lost (NaN, a
comma too many, a document that ends early).
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from runtime.prompts.counts import shown
from runtime.prompts.pieces import BOM, Piece

LONGEST = 16 << 20
"""Bytes of a line, or characters of a value; no context takes so much, and tokenising more takes
minutes and gigabytes."""
MOST_FAILURES = 1000
"""Of one document, each of which costs a look at all that stands before it."""
START = re.compile(rb"\s*(\{\s*([\"'}]|$)|\[\s*([\[{\"\]]|$))")
"""How a line begins that is JSON and not prose."""
WITHIN = re.compile(rb"\s*([\[\]{}\"]|-?\d|true\b|false\b|null\b)")
"""How a line begins within a JSON document."""
BETWEEN = re.compile(r"[\s,]*")


class _RepeatedKeyError(ValueError):
    """An object has a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKeyError(next(key for key in keys if keys.count(key) > 1))
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def is_json(lines: Sequence[bytes]) -> bool:
    """Whether a file is JSON of some kind, be it damaged.

    Args:
        lines: Its first lines that are not blank.
    """
    starts = sum(bool(START.match(line)) for line in lines)
    within = sum(bool(WITHIN.match(line)) for line in lines)
    return (
        2 * starts >= len(lines)
        or (bool(START.match(lines[0])) and 2 * within >= len(lines))
        or all(_parses(line) for line in lines)
    )


def is_json_lines(lines: Sequence[bytes]) -> bool:
    """Whether JSON has a value on each line, and is no document over several."""
    alone = sum(
        (line.lstrip().startswith(b"{") and line.rstrip().endswith(b"}")) or _is_scalar(line)
        for line in lines
    )
    return 2 * alone >= len(lines)


def read_json_lines(content: bytes) -> Iterable[Piece]:
    """One piece a line; LF, CRLF and CR end one, and nothing else does."""
    for number, line in enumerate(content.splitlines(), start=1):
        line = line.removeprefix(BOM)
        if not line.strip():
            yield Piece(line=number, reason="blank line")
        elif len(line) > LONGEST:
            yield _too_long(number, len(line))
        else:
            yield _read_line(number, line)


def read_json(content: bytes) -> Iterable[Piece]:
    """The elements of an array, or the values that stand one after another.

    After one that is no JSON reading goes on at the next line that begins an object, indented no
    more than the first value was.
    """
    # A byte that is no UTF-8 becomes a lone surrogate, which spoils its own value alone.
    text = content.decode("utf-8", "surrogateescape").replace("\r\n", "\n").replace("\r", "\n")
    position = len(text) - len(text.lstrip())
    is_array = text.startswith("[", position)
    position += is_array
    counted, line, failures = 0, 1, 0
    again: re.Pattern[str] | None = None
    while True:
        position = _after(text, position)
        line += text.count("\n", counted, position)
        counted = position
        if position == len(text):
            if is_array:
                yield Piece(line=line, reason="JSON array that does not end")
            return
        if is_array and text[position] == "]":
            is_array = False
            position += 1
            continue
        if again is None:
            column = position - text.rfind("\n", 0, position) - 1
            again = re.compile(rf"\n[ \t]{{0,{column}}}(?=\{{)")
        try:
            value, end = DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            yield _failed(line, error, "value not JSON")
            failures += 1
            following = again.search(text, position)
            if following is None:
                return
            if failures == MOST_FAILURES:
                yield Piece(line=line, reason="all that follows so many bad values")
                return
            position = following.end()
            continue
        if end - position > LONGEST:
            yield _too_long(line, end - position)
        else:
            yield Piece(line=line, value=value)
        position = end


def _after(text: str, position: int) -> int:
    found = BETWEEN.match(text, position)
    assert found is not None, "it matches nothing at all too"
    return found.end()


def _read_line(number: int, line: bytes) -> Piece:
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        return Piece(line=number, reason="line not UTF-8", detail=f"byte {error.start + 1}")
    try:
        return Piece(line=number, value=DECODER.decode(text))
    except (ValueError, RecursionError) as error:
        return _failed(number, error, "line not JSON")


def _failed(line: int, error: ValueError | RecursionError, not_json: str) -> Piece:
    if isinstance(error, RecursionError):
        return Piece(line=line, reason="nested too deeply")
    if isinstance(error, _RepeatedKeyError):
        return Piece(line=line, reason="key given twice", detail=shown(str(error)))
    if isinstance(error, json.JSONDecodeError):
        return Piece(line=line, reason=not_json, detail=f"{error.msg}, column {error.colno}")
    return Piece(line=line, reason="number too long")


def _too_long(line: int, length: int) -> Piece:
    limit = f"longer than {LONGEST >> 20} MiB"
    return Piece(line=line, reason=limit, detail=f"{length / (1 << 20):.0f} MiB")


def _parses(line: bytes) -> bool:
    try:
        DECODER.decode(line.decode("utf-8").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _is_scalar(line: bytes) -> bool:
    return not line.lstrip().startswith((b"{", b"[")) and _parses(line)
