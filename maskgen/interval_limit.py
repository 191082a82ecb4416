"""How many spans a row may have, and the refusal of a mask with more."""

from maskgen.errors import UnsupportedMaskError
from maskgen.intervals import RowIntervals

MAX_INTERVALS = 32
"""Most spans a row may have in tables, mask_mods and cache entries."""


def check_intervals(spans: RowIntervals) -> RowIntervals:
    """The canonical form of a mask, refused where a row has more than ``MAX_INTERVALS`` spans.

    Raises:
        UnsupportedMaskError: With the first such row, its count and the limit.
    """
    spans = spans.canonical()
    if spans.K > MAX_INTERVALS:
        counts = (spans.ends > spans.starts).sum(2)
        b, h, q = (int(i) for i in (counts > MAX_INTERVALS).nonzero()[0])
        raise too_many_intervals((b, h, q), int(counts[b, h, q]))
    return spans


def too_many_intervals(row: tuple[int, int, int], count: int) -> UnsupportedMaskError:
    """The error for a row ``(b, h, q)`` that needs ``count`` spans."""
    b, h, q = row
    return UnsupportedMaskError(
        f"a row may have at most {MAX_INTERVALS} spans of visible keys, but row (b={b}, h={h}, "
        f"q={q}) has {count}; such scattered masks need create_block_mask",
        row=row,
        count=count,
        limit=MAX_INTERVALS,
    )
