"""Span tensors from pairs of bounds: the last step of every family.

Legend: B batch, K span slots of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from maskgen.families.family import Spans
from maskgen.intervals import RowIntervals


def rows(Q_LEN: int, device: torch.device, offset: int = 0) -> Tensor:
    """Positions of the query rows, ``q + offset``, int32 ``[Q_LEN]``."""
    return torch.arange(offset, offset + Q_LEN, dtype=torch.int32, device=device)


def stack_spans(
    pairs: Sequence[tuple[Tensor | int, Tensor | int]], Q_LEN: int, KV_LEN: int, like: Tensor
) -> Spans:
    """Clip half-open spans to the columns and stack them as a family's result.

    Args:
        pairs: For each of the K slots its start and end: ints, or int32 tensors that broadcast
            to ``[B, Q_LEN]``. An end at or before its start is an empty span.
        Q_LEN: Query rows.
        KV_LEN: Key columns.
        like: Any int32 tensor of the device.

    Returns:
        ``starts`` and ``ends``, int32 ``[B, 1, K, Q_LEN]``, ``0 <= start <= end <= KV_LEN``.
    """
    batch = max(
        [1] + [t.shape[0] for pair in pairs for t in pair if isinstance(t, Tensor) and t.dim() == 2]
    )
    starts, ends = [], []
    for start, end in pairs:
        last = _row(end, like).clamp(0, KV_LEN)
        first = torch.minimum(_row(start, like).clamp(0, KV_LEN), last)
        starts.append(first.expand(batch, Q_LEN))
        ends.append(last.expand(batch, Q_LEN))
    return torch.stack(starts, 1).unsqueeze(1), torch.stack(ends, 1).unsqueeze(1)


def _row(bound: Tensor | int, like: Tensor) -> Tensor:
    if isinstance(bound, Tensor):
        return bound
    return torch.full((1,), bound, dtype=torch.int32, device=like.device)


def nothing(Q_LEN: int, KV_LEN: int) -> RowIntervals:
    """The mask that allows no cell: what a batch of padding alone leaves."""
    zeros = torch.zeros(1, 1, 1, Q_LEN, dtype=torch.int32, device="cpu")
    return RowIntervals(zeros, zeros, KV_LEN)
