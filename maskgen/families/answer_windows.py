"""Where the anchors of a layout may fall: windows between an answer's start and its end.

A layout is drawn before the sample is known that will use it. Anchors outside the sample's answer
carry no weight, so layouts are drawn for a few windows, and a sample takes the one that suits it.
"""

from collections.abc import Sequence

Window = tuple[int, int]
"""First position that may hold an anchor, and one past the last."""


def default_answer_starts(context: int) -> list[int]:
    """Where answers are taken to start: sixteenths of the context to its half, then every second.

    An answer is anchored evenly by a window that covers it, and what the window is longer than the
    answer is wasted, so windows stand closely.
    """
    starts = {context * part // 16 for part in (*range(9), 10, 12, 14)}
    # The last position is no anchor.
    return sorted(start for start in starts if start <= max(context - 2, 0))


def default_answer_ends(context: int) -> list[int]:
    """Where answers are taken to end: sixteenths of the context past its half.

    A bucket's samples are longer than the bucket before it, which is often half as long.
    """
    return sorted({context * part // 16 for part in range(9, 17)})


def earlier_answer_starts(context: int) -> list[int]:
    """Where they were taken to start before: 0, an eighth, a quarter and a half of the context."""
    return [0, context // 8, context // 4, context // 2]


def earlier_answer_ends(context: int) -> list[int]:
    """Where they were taken to end before: five, six, seven and all eighths of the context."""
    return [context * eighths // 8 for eighths in (5, 6, 7, 8)]


def answer_windows(starts: Sequence[int], ends: Sequence[int]) -> list[Window]:
    """All windows that hold a position, by start, then by end.

    The last token of an answer is no anchor: nothing after it could be predicted.
    """
    return [(start, end - 1) for start in starts for end in ends if end - 1 > start]
