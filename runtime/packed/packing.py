"""Documents into rows: which documents share a row of which length."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.training.inputs import Rows

ROOMY = 4
"""A document goes where rows are at least so many times as long as it is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows(Rows):
    """Rows of several documents."""

    documents: tuple[tuple[int, ...], ...]
    """Samples of each row, in the order in which they stand there."""


def pack(lengths: Sequence[int], buckets: Sequence[int], max_documents: int) -> PackedRows:
    """Put every document into a row: the longest first, each where the least room is left.

    Best-fit decreasing (Ding et al., arXiv 2404.10830), for each row length by itself: a short
    document goes into short rows, whose attention costs less.

    Args:
        lengths: Tokens of each document, none over the largest bucket.
        buckets: Row lengths, ascending.
        max_documents: Most of a row.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    sizes = np.asarray(buckets, dtype=np.int64)
    chosen = np.minimum(np.searchsorted(sizes, ROOMY * tokens), len(sizes) - 1)
    rows: list[tuple[int, ...]] = []
    row_buckets: list[int] = []
    for index, size in enumerate(buckets):
        (ours,) = np.nonzero(chosen == index)
        made = _pack_rows(
            ours[np.argsort(-tokens[ours], kind="stable")], tokens, size, max_documents
        )
        rows += made
        row_buckets += [size] * len(made)
    used = [int(tokens[list(row)].sum()) for row in rows]
    return PackedRows(
        lengths=np.asarray(used, dtype=np.int64),
        buckets=np.asarray(row_buckets, dtype=np.int64),
        documents=tuple(rows),
    )


def _pack_rows(
    order: NDArray[np.int64], tokens: NDArray[np.int64], size: int, max_documents: int
) -> list[tuple[int, ...]]:
    rows: list[list[int]] = []
    # (room left, row) of every row that takes more, ascending, so that bisection finds the fit.
    free: list[tuple[int, int]] = []
    for document in order.tolist():
        length = int(tokens[document])
        at = bisect.bisect_left(free, (length, -1))
        if at < len(free):
            room, row = free.pop(at)
        else:
            room, row = size, len(rows)
            rows.append([])
        rows[row].append(document)
        if room > length and len(rows[row]) < max_documents:
            bisect.insort(free, (room - length, row))
    return [tuple(row) for row in rows]
