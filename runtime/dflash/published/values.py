"""The values of a ``config.json`` as JSON has them: taken by name and type, compared and shown."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from runtime.errors import CheckpointError


def take(
    flat: Mapping[str, Any], name: str, holds: Callable[[Any], bool], kind: str, default: Any = None
) -> Any:
    """The value of a key, or its default where it is missing or null.

    Raises:
        CheckpointError: There is neither, or it is of another type.
    """
    value = flat.get(name)
    if value is None:
        if default is None:
            raise missing(name)
        return default
    if not holds(value):
        raise wrong_type(name, value, kind)
    return value


def missing(name: str) -> CheckpointError:
    """What refuses a config without a key."""
    return CheckpointError(f"must hold {name!r}, and it is missing; export the drafter again")


def wrong_type(name: str, value: Any, kind: str) -> CheckpointError:
    """What refuses a value; ``kind`` names the type that it must have."""
    return CheckpointError(f"{name} = {shown(value)}: must be {kind}")


def is_bool(value: Any) -> bool:
    """True or false."""
    return type(value) is bool


def is_int(value: Any) -> bool:
    """An integer; true is none."""
    return type(value) is int


def is_ints(value: Any) -> bool:
    """A list of integers."""
    return isinstance(value, list) and all(map(is_int, value))


def is_number(value: Any) -> bool:
    """A finite number; true is none."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def same(value: Any, other: Any) -> bool:
    """Equal, where true is no 1 and 1.0 is."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def shown(value: Any) -> str:
    """As JSON, cut where it is long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
