"""Where the anchors of a layout may fall: windows between an answer's start and its end.

A layout is drawn before the sample is known that will use it. Anchors outside the sample's answer
carry no weight, so layouts are drawn for a few windows, and a sample takes the one that suits it.
"""

from collections.abc import Sequence

Window = tuple[int, int]
"""First position that may hold an anchor, and one past the last."""


def default_answer_starts(context: int) -> list[int]:
    """Where answers are taken to start: 0, an eighth, a quarter and a half of the context."""
    return [0, context // 8, context // 4, context // 2]


def default_answer_ends(context: int) -> list[int]:
    """Where answers are taken to end: five, six, seven and all eighths of the context.

    A bucket's samples are longer than the bucket before it, which is often half as long.
    """
    return [context * eighths // 8 for eighths in (5, 6, 7)] + [context]


def answer_windows(starts: Sequence[int], ends: Sequence[int]) -> list[Window]:
    """All windows that hold a position, by start, then by end.

    The last token of an answer is no anchor: nothing after it could be predicted.
    """
    return [(start, end - 1) for start in starts for end in ends if end - 1 > start]
