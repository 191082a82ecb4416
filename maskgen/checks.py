"""Values from outside (TOML, a cache's JSON) -> checked values, or an error naming the field."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any

from maskgen.errors import MaskSpecError

MAX_LENGTH = 1 << 30
"""Largest length and largest integer parameter: sums of two of them stay inside int32."""
MAX_BLOCK_SIZE = 1024
"""Largest tile side, in tokens."""
BLOCK_MULTIPLE = 16
"""Tile sides are multiples of this, in tokens."""


def checked_int(where: str, value: Any, minimum: int = 1) -> int:
    """Return ``value`` if it is an integer of at least ``minimum``; ``where`` names the field.

    Raises:
        MaskSpecError: It is not.
    """
    # Integral covers NumPy's integers, which lengths often are.
    if not isinstance(value, Integral) or isinstance(value, bool) or value < minimum:
        raise MaskSpecError(where, value, f"must be an integer of at least {minimum}")
    return int(value)


def checked_ints(where: str, value: Any, minimum: int) -> list[int]:
    """Return one or more integers as a list; a single one may stand alone.

    Raises:
        MaskSpecError: The list is empty or an item is no integer of at least ``minimum``.
    """
    values = value if isinstance(value, list) else [value]
    if not values:
        raise MaskSpecError(where, value, "must not be empty")
    return [checked_int(where, item, minimum) for item in values]


def checked_block_size(where: str, value: Any) -> tuple[int, int]:
    """Return the block sizes (query rows, keys), in tokens, from one integer or a pair.

    Raises:
        MaskSpecError: A side is not a multiple of 16 up to 1024.
    """
    sizes = value if isinstance(value, list | tuple) else [value, value]
    valid = range(BLOCK_MULTIPLE, MAX_BLOCK_SIZE + 1, BLOCK_MULTIPLE)
    if len(sizes) != 2 or any(type(size) is not int or size not in valid for size in sizes):
        raise MaskSpecError(
            where,
            value,
            f"must be one or two multiples of {BLOCK_MULTIPLE} up to {MAX_BLOCK_SIZE}",
        )
    return sizes[0], sizes[1]


def check_known(where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse a key that is not in ``known``, with the nearest valid name.

    Raises:
        MaskSpecError: A key of the table is unknown.
    """
    names = list(known)
    for key, value in table.items():
        if key not in names:
            raise MaskSpecError(f"{where}: {key}", value, nearest(key, names))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the rule for an unknown name: the closest valid one, then all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"is unknown; {hint}valid are {', '.join(names)}"


@contextmanager
def in_field(where: str) -> Iterator[None]:
    """Put where a value stands before the field of an error that the block raises."""
    try:
        yield
    except MaskSpecError as error:
        raise MaskSpecError(f"{where}: {error.field}", error.value, error.rule) from error
