"""An answer of the target, and how much of it repeats itself."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to one prompt of P tokens."""

    token_ids: list[int]
    """A tokens; the last is an end token when ``ended``."""
    ended: bool
    """Whether the model ended it; otherwise its limit did."""


def distinct_share(token_ids: Sequence[int], n: int = 4) -> float:
    """Share of an answer's n-grams that are distinct; 1.0 for fewer than n tokens."""
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
