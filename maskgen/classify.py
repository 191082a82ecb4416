"""Row intervals to block kinds, and block kinds to sorted index tables, on the CPU.

The visible cells of a block are the sum over its rows of the overlap of each span with the
block's columns. Of the keys below an endpoint x, every block column before x's own holds
KV_BLOCK, x's own holds ``x % KV_BLOCK``, and those after it none. So two additions for each
endpoint (ends plus, starts minus) into the differences between neighbouring columns, and one
running sum along the columns, give all counts: ``O(K * Q_LEN + blocks)``, no dense grid.

All of it is NumPy on the memory of the tensors, in pieces that stay in a core's cache: for these
scans and copies that is several times faster than torch's operators.

Source: the running sum over differences is the imos method; what full and partial mean is taken
from ``torch.nn.attention.flex_attention.create_block_mask``.

Shape legend: B batch, H heads, K spans a row, R query block rows, C KV block columns.
"""

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

EMPTY, PARTIAL, FULL = 0, 1, 2

_Int32: TypeAlias = NDArray[np.int32]
# Blocks worked on at a time: 1 MiB of counts.
_PIECE = 1 << 18


def block_kinds(starts: Tensor, ends: Tensor, KV_LEN: int, BLOCK_SIZE: tuple[int, int]) -> Tensor:
    """Classify every block of a mask as empty, partial or full.

    Args:
        starts: First visible key of each span, int32 ``[B, H, K, Q_LEN]`` on the CPU.
        ends: One past the last visible key, same shape. A span with ``end <= start`` is empty.
            The non-empty spans of a row must be disjoint.
        KV_LEN: Number of keys.
        BLOCK_SIZE: Block size in (query rows, keys).

    Returns:
        uint8 ``[B, H, R, C]``: 0 empty, 1 partial, 2 full. A ragged last block is never full.
    """
    B, H, K, Q_LEN = starts.shape
    Q_BLOCK, KV_BLOCK = BLOCK_SIZE
    R, C = -(-Q_LEN // Q_BLOCK), -(-KV_LEN // KV_BLOCK)
    flat_starts = starts.numpy().reshape(B * H, K, Q_LEN)
    flat_ends = ends.numpy().reshape(B * H, K, Q_LEN)
    kinds = torch.empty(B, H, R, C, dtype=torch.uint8, device="cpu")
    flat_kinds = kinds.numpy().reshape(B * H, R, C)
    rows = min(R, max(1, _PIECE // C))
    masks = max(1, _PIECE // (C * R))
    for m in range(0, B * H, masks):
        for r in range(0, R, rows):
            q = slice(r * Q_BLOCK, (r + rows) * Q_BLOCK)
            counts = _block_counts(
                flat_starts[m : m + masks, :, q], flat_ends[m : m + masks, :, q], KV_LEN, BLOCK_SIZE
            )
            piece = flat_kinds[m : m + masks, r : r + rows]
            np.greater(counts, 0, out=piece.view(np.bool_))
            piece += counts == Q_BLOCK * KV_BLOCK
    return kinds


def _block_counts(starts: _Int32, ends: _Int32, KV_LEN: int, BLOCK_SIZE: tuple[int, int]) -> _Int32:
    """Visible cells of each block, int32 ``[masks, R, C]``, of spans ``[masks, K, Q_LEN]``."""
    masks, K, Q_LEN = starts.shape
    Q_BLOCK, KV_BLOCK = BLOCK_SIZE
    R, C = -(-Q_LEN // Q_BLOCK), -(-KV_LEN // KV_BLOCK)
    # Two columns more: an endpoint at KV_LEN may stand in column C and change the one after.
    cells = np.zeros((masks, R, C + 2), dtype=np.int32)
    flat = cells.reshape(-1)
    of_row = np.arange(Q_LEN) // Q_BLOCK * (C + 2)
    of_row = of_row + np.arange(masks)[:, None] * (R * (C + 2))
    for k in range(K):
        low = np.clip(starts[:, k], 0, KV_LEN)
        high = np.clip(ends[:, k], low, KV_LEN)
        for endpoint, add in ((high, 1), (low, -1)):
            column, rest = _divide(endpoint, KV_BLOCK)
            where = (column + of_row).reshape(-1)
            rest = rest.reshape(-1)
            np.add.at(flat, where, (rest - KV_BLOCK) * np.int32(add))
            where += 1
            np.add.at(flat, where, rest * np.int32(-add))
    # What column 0 lacks, KV_BLOCK for each end, it lacks for each start too.
    np.cumsum(cells, axis=2, out=cells)
    return cells[:, :, :C]


def _divide(x: _Int32, divisor: int) -> tuple[_Int32, _Int32]:
    """Quotient and remainder of non-negative ``x``; by shifts where that is possible."""
    if divisor & (divisor - 1) == 0:
        return x >> (divisor.bit_length() - 1), x & (divisor - 1)
    quotient = x // divisor
    return quotient, x - quotient * divisor


def fill_tables(kinds: Tensor, kind: int, num_blocks: Tensor, indices: Tensor) -> None:
    """Write the ascending columns of one kind of block for every row, with tails of zero.

    Args:
        kinds: uint8 ``[B, H, R, C]`` on the CPU, contiguous.
        kind: Which blocks to list, ``PARTIAL`` or ``FULL``.
        num_blocks: Written with the number per row, int32 ``[B, H, R]``, contiguous.
        indices: Written with the columns, int32 ``[B, H, R, C]``, contiguous.
    """
    C = kinds.shape[-1]
    all_kinds: NDArray[Any] = kinds.numpy().reshape(-1, C)
    all_counts = num_blocks.numpy().reshape(-1)
    all_indices = indices.numpy().reshape(-1, C)
    columns = np.arange(C, dtype=np.int32)
    rows = max(1, _PIECE // C)
    for r in range(0, len(all_kinds), rows):
        wanted = all_kinds[r : r + rows] == kind
        counts = all_counts[r : r + rows]
        np.sum(wanted, axis=1, dtype=np.int32, out=counts)
        piece = all_indices[r : r + rows]
        piece.fill(0)
        # A boolean take and a boolean assignment copy whole runs of blocks.
        piece[columns < counts[:, None]] = np.broadcast_to(columns, wanted.shape)[wanted]
