"""What shapes one run otherwise than another, in words: for a resume, and between processes."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

SHOWN = 4
"""Most differences that are named."""
SHOWN_CHARACTERS = 60
"""Most of one value."""


def describe_differences(
    was: Mapping[str, Any], now: Mapping[str, Any], pattern: str, masks: str = ""
) -> str:
    """Name what differs, such as ``train.steps 40 -> 41, the masks of context 128``.

    Args:
        was: What shaped one run: ``Session.shaping``.
        now: The same of the other.
        pattern: Of one setting, with the fields ``name``, ``was`` and ``now``.
        masks: What else to say of masks that differ.

    Returns:
        The differences, the settings first; empty where there is none.
    """
    settings, contexts, data = [], set(), False
    for name, old, new in differing("", was, now):
        section, _, key = name.partition(".")
        if section == "masks":
            # Those beside a bucket's own are ``sliding/128``.
            contexts.add(int(key.rpartition("/")[2]))
        elif section == "data":
            data = True
        else:
            settings.append(pattern.format(name=name, was=_shown(old), now=_shown(new)))
    if contexts:
        settings.append(f"the masks of context {', '.join(map(str, sorted(contexts)))}{masks}")
    if data:
        settings.append("the prepared data")
    if len(settings) > SHOWN:
        settings[SHOWN:] = [f"{len(settings) - SHOWN} more"]
    return ", ".join(settings)


def differing(prefix: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Each value that differs: its dotted name below ``prefix``, what it was and what it is now.

    What one of them lacks is None.
    """
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in {**was, **now}:
            name = f"{prefix}.{key}" if prefix else key
            yield from differing(name, was.get(key), now.get(key))
    elif was != now:
        yield prefix, was, now


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
