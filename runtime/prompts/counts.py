"""What became of the records of the prompt files: counts by reason, and the first places."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

PLACES = 5
"""Places remembered of each reason."""
NAMED_KEYS = 8
"""Different keys named that records have and nothing reads; further ones count as others."""


@dataclass(kw_only=True, slots=True)
class Counts:
    """Records and pieces by what happened to them."""

    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> records, lines, files or pieces left out."""
    places: dict[str, list[str]] = field(default_factory=dict)
    """Reason -> the first ``PLACES`` of them, ``file:line`` or ``file``, a detail in brackets."""
    noted: Counter[str] = field(default_factory=Counter)
    """What happened to samples that were kept or judged."""
    _unread: set[str] = field(default_factory=set)

    def drop(self, reason: str, place: str, detail: str = "") -> None:
        """Count one left out."""
        self.dropped[reason] += 1
        known = self.places.setdefault(reason, [])
        if len(known) < PLACES:
            known.append(f"{place} ({detail})" if detail else place)

    def note_unread(self, keys: list[str]) -> None:
        """Note the keys of a record that was kept without them."""
        for key in keys:
            if len(self._unread) < NAMED_KEYS:
                self._unread.add(key)
            name = shown(key) if key in self._unread else "other keys"
            self.noted[f"key not read: {name}"] += 1


def shown(text: str, longest: int = 40) -> str:
    """A piece of someone's data on one line, printable, cut to ``longest`` characters."""
    printable = text if text.isascii() and text.isprintable() else ascii(text)[1:-1]
    return printable if len(printable) <= longest else printable[: longest - 3] + "..."


def ordered(counter: Mapping[str, int]) -> dict[str, int]:
    """What was counted at least once, by name."""
    return {name: count for name, count in sorted(counter.items()) if count}
