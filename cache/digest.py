"""Canonical JSON and SHA-256: one value, one text, one digest on every machine.

Canonical JSON holds integers, strings, booleans, lists and dicts with string keys. Keys are
sorted by code point, nothing is written between tokens, and all but ASCII is escaped.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn, TypeAlias

Json: TypeAlias = int | str | bool | Sequence["Json"] | Mapping[str, "Json"]

MAX_DEPTH = 32
"""Deepest nesting of lists and dicts that is written or read."""

MAX_INT = 10**18
"""Integers stay below it in size, so that any language's 64 bits hold them."""


def canonical_json(obj: object) -> bytes:
    """Write a value as canonical JSON.

    Args:
        obj: Integers of at most 18 digits, strings, booleans, lists, tuples and dicts with string
            keys.

    Returns:
        The ASCII text.

    Raises:
        TypeError: A float, None, a key that is no string, or any other type, with its path.
        ValueError: An integer of 19 digits, or nesting beyond ``MAX_DEPTH``.
    """
    check_json(obj, "value")
    return _dump(obj)


def check_canonical(value: Json, data: bytes) -> None:
    """Check that ``data``, from which ``value`` was read, is in the canonical form.

    Raises:
        ValueError: It is not (spaces, order, doubled keys), or is too deep to be written again.
    """
    try:
        same = _dump(value) == data
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if not same:
        msg = "JSON is not in the canonical form (sorted keys, no spaces, ASCII, no doubled key)"
        raise ValueError(msg)


def parse_json(data: bytes) -> Json:
    """Read JSON in any form, floats and NaN refused.

    Raises:
        ValueError: Not JSON, a float, or nesting that overflows the parser.
    """
    try:
        value: Json = json.loads(
            data.decode(), parse_float=_refuse_number, parse_constant=_refuse_number
        )
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    return value


def sha256_hex(data: bytes | bytearray | memoryview) -> str:
    """Return the SHA-256 of ``data`` as 64 lower-case hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


_TOO_DEEP = f"JSON is nested deeper than {MAX_DEPTH} levels"


def _dump(value: object) -> bytes:
    # No search for circles: parsed and checked values have none.
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False
    )
    return text.encode("ascii")


def _refuse_number(text: str) -> NoReturn:
    msg = f"JSON holds {text[:32]!r}; integers only"
    raise ValueError(msg)


def check_json(value: object, path: str, depth: int = 0) -> None:
    """Check that a value holds nothing but what canonical JSON may hold.

    Args:
        value: The value.
        path: What to call it in an error.
        depth: Levels of lists and dicts that will stand around it.

    Raises:
        TypeError: A float, None, a key that is no string, or any other type, with its path.
        ValueError: An integer of 19 digits, or nesting beyond ``MAX_DEPTH``.
    """
    if not _is_plain(value, depth):
        _check_each(value, path, depth)


_PLAIN = frozenset({int, str, bool, list, dict})


def _is_plain(value: Any, depth: int) -> bool:
    """Return True where nothing is to be refused, found a level at a time; False says nothing."""
    level = [value]
    for _ in range(depth, MAX_DEPTH + 1):
        if not _PLAIN.issuperset(map(type, level)):
            return False
        integers = [item for item in level if type(item) is int]
        if integers and not -MAX_INT < min(integers) <= max(integers) < MAX_INT:
            return False
        dicts = [item for item in level if type(item) is dict]
        lists = [item for item in level if type(item) is list]
        if not dicts and not lists:
            return True
        if not {str}.issuperset(map(type, chain.from_iterable(dicts))):
            return False
        level = [*chain.from_iterable(lists), *chain.from_iterable(map(dict.values, dicts))]
    return False


def _check_each(value: object, path: str, depth: int) -> None:
    kind = type(value)
    if kind is str or kind is bool:
        return
    if kind is int:
        if not -MAX_INT < value < MAX_INT:  # type: ignore[operator]
            msg = f"{path} must have 18 digits at most"
            raise ValueError(msg)
        return
    if depth >= MAX_DEPTH:
        raise ValueError(_TOO_DEEP)
    if isinstance(value, Mapping):
        for key, item in value.items():
            if type(key) is not str:
                msg = f"{path} has the key {key!r}; keys must be strings"
                raise TypeError(msg)
            _check_each(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            _check_each(item, f"{path}[{position}]", depth + 1)
    else:
        msg = (
            f"{path} is {value!r:.60} of type {kind.__name__}; canonical JSON holds integers, "
            f"strings, booleans, lists and dicts only"
        )
        raise TypeError(msg)
