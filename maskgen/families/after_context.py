"""Lengths that an entry of a run file names by a context."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AfterContext:
    """Rows that stand behind a context, ``KV_LEN = context + Q_LEN``; an entry may say so.

    With ``context = [128, 256]`` and ``count`` in place of Q_LEN and KV_LEN, ``Q_LEN`` is the count
    times the size.
    """

    count: str
    """What an entry calls the number of groups of rows: ``anchors``."""
    size: str
    """The family's parameter that says how many rows a group has: ``draft_block_size``."""
