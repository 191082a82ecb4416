"""Triton kernels: row intervals to all eight block tables on the device, in two launches.

This is the only file that imports triton, and only ``maskgen.compile`` imports this file.

The first kernel owns one query block row. It counts the visible cells of the row's blocks, some
columns at a time, and needs a look at single rows only where a span begins or ends; the lists of
partial and full columns are packed by a running sum. It leaves the kind of each block in a scratch
matrix, and the second kernel packs the columns of that into the transposed tables. Every output
element has one writer, so the result does not depend on the order of anything.

Shape legend: B batch, H heads, K spans a row, R query block rows, C KV block columns.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from maskgen.tables import BlockTables

# Columns that one step of the first kernel handles, and query rows it adds up at once: a step's
# accumulator is 32 elements a thread with 4 warps.
_COLUMNS = 128
_ROWS = 32
# Rows of blocks that one step of the second kernel handles.
_BLOCK_ROWS = 1024


def _rows(
    starts_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    num_partial_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    num_full_ptr: tl.tensor,
    full_ptr: tl.tensor,
    kinds_ptr: tl.tensor,
    Q_LEN: tl.tensor,
    KV_LEN: tl.tensor,
    K: tl.tensor,
    R: tl.tensor,
    C: tl.tensor,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Tables of one query block row, and its kinds."""
    r = tl.program_id(0)
    bh = tl.program_id(1)
    spans = bh.to(tl.int64) * K * Q_LEN
    first_q = r * Q_BLOCK
    last_q = tl.minimum(first_q + Q_BLOCK, Q_LEN)
    row = bh.to(tl.int64) * R + r
    partial_ptr += row * C
    full_ptr += row * C
    kinds_ptr += row * C
    whole: tl.constexpr = Q_BLOCK * KV_BLOCK

    offs = first_q + tl.arange(0, ALL_ROWS)
    num_partial = 0
    num_full = 0
    for c0 in range(0, C, COLUMNS):
        c = c0 + tl.arange(0, COLUMNS)
        low = c * KV_BLOCK
        high = tl.minimum(low + KV_BLOCK, KV_LEN)
        # Each span is either beside a column, or covers it in all rows, or is mixed.
        cells = tl.zeros([COLUMNS], tl.int32)
        mixed = tl.zeros([COLUMNS], tl.int32)
        for k in range(K):
            at = spans + k * Q_LEN + offs
            s = tl.load(starts_ptr + at, mask=offs < last_q, other=0)
            e = tl.load(ends_ptr + at, mask=offs < last_q, other=0)
            held = e > s
            lowest = tl.min(tl.where(held, s, 2147483647))
            highest = tl.max(tl.where(held, e, -1))
            # Rows beyond Q_LEN are not held, so a ragged block is never covered.
            within = offs < first_q + Q_BLOCK
            last_start = tl.max(tl.where(within, tl.where(held, s, 2147483647), -1))
            first_end = tl.min(tl.where(within, tl.where(held, e, -1), 2147483647))
            covers = (last_start <= low) & (first_end >= low + KV_BLOCK)
            beside = (highest <= low) | (lowest >= high)
            cells += tl.where(covers, whole, 0)
            mixed |= tl.where(covers | beside, 0, 1)
        if tl.max(mixed) > 0:
            sums = tl.zeros([ROWS, COLUMNS], tl.int32)
            for q0 in range(first_q, last_q, ROWS):
                q = q0 + tl.arange(0, ROWS)
                for k in range(K):
                    at = spans + k * Q_LEN + q
                    s = tl.load(starts_ptr + at, mask=q < last_q, other=0)[:, None]
                    e = tl.load(ends_ptr + at, mask=q < last_q, other=0)[:, None]
                    overlap = tl.minimum(e, high[None, :]) - tl.maximum(s, low[None, :])
                    sums += tl.maximum(overlap, 0)
            cells = tl.sum(sums, axis=0)
        valid = c < C
        is_full = (cells == whole) & valid
        is_partial = (cells > 0) & (cells < whole) & valid
        kind = tl.where(is_full, 2, is_partial.to(tl.int32))
        tl.store(kinds_ptr + c, kind.to(tl.uint8), mask=valid)
        # Both running sums in one: partial blocks in the low half, full ones in the high half.
        step = is_partial.to(tl.int32) + (is_full.to(tl.int32) << 16)
        before = tl.cumsum(step, axis=0) - step
        tl.store(partial_ptr + num_partial + (before & 65535), c, mask=is_partial)
        tl.store(full_ptr + num_full + (before >> 16), c, mask=is_full)
        total = tl.sum(step)
        num_partial += total & 65535
        num_full += total >> 16
    tl.store(num_partial_ptr + row, num_partial)
    tl.store(num_full_ptr + row, num_full)
    for c0 in range(0, C, COLUMNS):
        c = c0 + tl.arange(0, COLUMNS)
        tl.store(partial_ptr + c, 0, mask=(c >= num_partial) & (c < C))
        tl.store(full_ptr + c, 0, mask=(c >= num_full) & (c < C))


def _columns(
    kinds_ptr: tl.tensor,
    num_partial_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    num_full_ptr: tl.tensor,
    full_ptr: tl.tensor,
    R: tl.tensor,
    C: tl.tensor,
    BLOCK_ROWS: tl.constexpr,
) -> None:
    """Tables of one KV block column, from the kinds of its blocks."""
    column = tl.program_id(0)
    bh = tl.program_id(1)
    kinds_ptr += bh.to(tl.int64) * R * C + column
    out = bh.to(tl.int64) * C + column
    partial_ptr += out * R
    full_ptr += out * R
    num_partial = 0
    num_full = 0
    for r0 in range(0, R, BLOCK_ROWS):
        r = r0 + tl.arange(0, BLOCK_ROWS)
        kind = tl.load(kinds_ptr + r * C, mask=r < R, other=0)
        is_partial = kind == 1
        is_full = kind == 2
        step = is_partial.to(tl.int32) + (is_full.to(tl.int32) << 16)
        before = tl.cumsum(step, axis=0) - step
        tl.store(partial_ptr + num_partial + (before & 65535), r, mask=is_partial)
        tl.store(full_ptr + num_full + (before >> 16), r, mask=is_full)
        total = tl.sum(step)
        num_partial += total & 65535
        num_full += total >> 16
    tl.store(num_partial_ptr + out, num_partial)
    tl.store(num_full_ptr + out, num_full)
    for r0 in range(0, R, BLOCK_ROWS):
        r = r0 + tl.arange(0, BLOCK_ROWS)
        tl.store(partial_ptr + r, 0, mask=(r >= num_partial) & (r < R))
        tl.store(full_ptr + r, 0, mask=(r >= num_full) & (r < R))


rows_kernel: Any = triton.jit(_rows)
columns_kernel: Any = triton.jit(_columns)


def launch(tables: BlockTables, starts: Tensor, ends: Tensor) -> None:
    """Write the tables of checked spans on the current stream; see ``tables_into``."""
    B, H, K, Q_LEN = starts.shape
    Q_BLOCK, KV_BLOCK = tables.BLOCK_SIZE
    R, C = tables.kv_indices.shape[-2:]
    scratch = tables.scratch
    if scratch is None:
        scratch = torch.empty((B, H, R, C), dtype=torch.uint8, device=tables.device)
    # Triton launches on the current device; -1 keeps it, for the interpreter's CPU tensors.
    with torch.cuda.device(starts.device if starts.is_cuda else -1):
        rows_kernel[(R, B * H)](
            starts,
            ends,
            tables.kv_num_blocks,
            tables.kv_indices,
            tables.full_kv_num_blocks,
            tables.full_kv_indices,
            scratch,
            Q_LEN,
            tables.KV_LEN,
            K,
            R,
            C,
            Q_BLOCK=Q_BLOCK,
            KV_BLOCK=KV_BLOCK,
            ALL_ROWS=triton.next_power_of_2(Q_BLOCK),
            ROWS=_ROWS,
            COLUMNS=min(_COLUMNS, max(16, triton.next_power_of_2(C))),
        )
        columns_kernel[(C, B * H)](
            scratch,
            tables.q_num_blocks,
            tables.q_indices,
            tables.full_q_num_blocks,
            tables.full_q_indices,
            R,
            C,
            BLOCK_ROWS=min(_BLOCK_ROWS, max(16, triton.next_power_of_2(R))),
        )
