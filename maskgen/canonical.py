"""Spans as bare tensors: sorting, joining, and the canonical form that digests are taken of.

All functions take ``starts`` and ``ends``, int32 ``[B, H, K, Q_LEN]``; a span with
``end <= start`` is empty.

Shape legend: B batch, H heads, K spans a row, Q_LEN query rows.
"""

import functools

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1
"""Largest position that spans can hold."""


def visible_cells(starts: Tensor, ends: Tensor, columns: Tensor) -> Tensor:
    """Expand spans into one bool a cell; no host sync, and may be captured in a graph.

    Args:
        starts: int32 ``[..., K, Q]``.
        ends: int32, same shape.
        columns: Keys to look at, integers that broadcast to ``[..., Q, KV]``.

    Returns:
        bool ``[..., Q, KV]``.
    """
    # One span at a time, so that no tensor is K times as large as the mask.
    cells = (
        (columns >= start[..., None]) & (columns < end[..., None])
        for start, end in zip(starts.unbind(-2), ends.unbind(-2), strict=True)
    )
    return functools.reduce(torch.logical_or, cells)


def is_canonical(starts: Tensor, ends: Tensor) -> bool:
    """Whether spans are in the canonical form that ``RowIntervals.canonical`` describes."""
    B, H, K, _ = starts.shape
    held = ends > starts
    return bool(
        # Non-empty first, empty ones exactly (0, 0), all K needed, a gap between spans.
        (held[:, :, 1:] <= held[:, :, :-1]).all()
        and ((starts == 0) & (ends == 0) | held).all()
        and (K == 1 or held[:, :, -1].any())
        and ((starts[:, :, 1:] > ends[:, :, :-1]) | ~held[:, :, 1:]).all()
        and (B == 1 or not equal_slices(starts, ends, 0))
        and (H == 1 or not equal_slices(starts, ends, 1))
    )


def equal_slices(starts: Tensor, ends: Tensor, dim: int) -> bool:
    """Whether the spans do not depend on the index of a dimension."""
    return all(bool((x == x.narrow(dim, 0, 1)).all()) for x in (starts, ends))


def sorted_spans(starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Spans of each row by start, the empty ones last as ``(INT32_MAX, -1)``."""
    held = ends > starts
    starts = torch.where(held, starts, INT32_MAX)
    ends = torch.where(held, ends, -1)
    if bool((starts[:, :, 1:] >= starts[:, :, :-1]).all()):
        return starts, ends
    starts, order = starts.sort(2)
    return starts, ends.gather(2, order)


def merged(starts: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the spans of each row, join those that overlap or touch, and pack them to the front."""
    starts, ends = sorted_spans(starts, ends)
    reach = ends.cummax(2).values
    opens = ends >= 0
    opens[:, :, 1:] &= starts[:, :, 1:] > reach[:, :, :-1]
    run = opens.cumsum(2)
    K = max(1, int(run[:, :, -1].max()))
    # The last span of a run knows how far the run reaches; the spare slot K takes the rest.
    closes = ends >= 0
    closes[:, :, :-1] &= opens[:, :, 1:] | (ends[:, :, 1:] < 0)
    run -= 1
    B, H, _, Q_LEN = starts.shape
    packed = starts.new_zeros(2, B, H, K + 1, Q_LEN)
    packed[0].scatter_(2, torch.where(opens, run, K), starts)
    packed[1].scatter_(2, torch.where(closes, run, K), reach)
    return packed[0, :, :, :K], packed[1, :, :, :K]
