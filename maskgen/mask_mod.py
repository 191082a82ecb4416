"""Row intervals to the one mask_mod of all masks, and any FlexAttention mask_mod to row intervals.

Shape legend: B batch, H heads, K spans a row, Q_LEN query rows.
"""

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from torch.overrides import TorchFunctionMode

from maskgen import host_builds
from maskgen.canonical import INT32_MAX
from maskgen.checks import checked_int
from maskgen.errors import MaskSpecError
from maskgen.families.family import MaskMod
from maskgen.interval_limit import MAX_INTERVALS, too_many_intervals
from maskgen.intervals import RowIntervals

# What a cell may cost while a tile is evaluated: its result, the changes found in it, and three
# int64 temporaries of the mask_mod's own arithmetic.
_BYTES_PER_CELL = 32
_CACHED_CELLS = 1 << 20


def spans_mask_mod(starts: Tensor, ends: Tensor) -> MaskMod:
    """The mask_mod that lets a row see its spans.

    It reads views of the given tensors, so spans written in place later are seen by the next
    call, and every mask_mod made here shares one code object: masks of equal shapes share one
    compiled kernel.

    Args:
        starts: First visible key of each span, int32 ``[B, H, K, Q_LEN]``, on the device of the
            attention.
        ends: One past the last visible key, same shape.

    Returns:
        ``mask_mod(b, h, q_idx, kv_idx)``; where B or H is 1, b or h is not read.
    """
    by_batch, by_head = starts.shape[0] > 1, starts.shape[1] > 1
    # Indexed with tensors only: an integer beside them would leave vmap's rewrite of getitem.
    kept = (slice(None) if by_batch else 0, slice(None) if by_head else 0)
    spans = tuple((starts[(*kept, k)], ends[(*kept, k)]) for k in range(starts.shape[2]))

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row: tuple[Tensor, ...] = (q_idx,)
        if by_head:
            row = (h, *row)
        if by_batch:
            row = (b, *row)
        first, last = spans[0]
        visible = (kv_idx >= first[row]) & (kv_idx < last[row])
        for first, last in spans[1:]:
            visible = visible | ((kv_idx >= first[row]) & (kv_idx < last[row]))
        return visible

    return mask_mod


def from_mask_mod(
    mask_mod: MaskMod,
    B: int | None = None,
    H: int | None = None,
    Q_LEN: int | None = None,
    KV_LEN: int | None = None,
    device: torch.device | str = "cpu",
    *,
    budget_bytes: int = 256 << 20,
) -> RowIntervals:
    """Read the row intervals of any FlexAttention mask_mod off its cells.

    The arguments stand in the order of ``create_block_mask``, and every cell is evaluated exactly
    as there (by torch's own ``create_mask``, under vmap), but some rows at a time, so memory stays
    within a budget.

    Args:
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)``; its captured tensors must be on ``device``.
        B: Batch size, or None where the mask does not depend on b, which is then 0.
        H: Number of heads, or None where the mask does not depend on h, which is then 0.
        Q_LEN: Query rows; required.
        KV_LEN: Keys; required.
        device: Where to evaluate, and where the spans are.
        budget_bytes: Most memory for the cells in work, beside the spans themselves.

    Returns:
        The mask in canonical form.

    Raises:
        MaskSpecError: mask_mod is not callable with four arguments, raises, or returns something
            else than booleans; a size is no integer of at least 1, or too large for int32; one row
            does not fit the budget.
        UnsupportedMaskError: A row has more than ``MAX_INTERVALS`` spans; evaluation stops there.
    """
    host_builds.announce("from_mask_mod")
    _check_signature(mask_mod)
    B, H = (1 if size is None else checked_int(name, size) for name, size in (("B", B), ("H", H)))
    Q_LEN, KV_LEN = checked_int("Q_LEN", Q_LEN), checked_int("KV_LEN", KV_LEN)
    budget_bytes = checked_int("budget_bytes", budget_bytes)
    if (total := B * H * Q_LEN) > INT32_MAX:
        raise MaskSpecError("B * H * Q_LEN", total, "must be below 2**31, which int32 addresses")
    device = torch.device(device)
    rows = budget_bytes // _BYTES_PER_CELL // KV_LEN
    if rows < 1:
        rule = f"one row of KV_LEN={KV_LEN} takes {_BYTES_PER_CELL * KV_LEN} bytes"
        raise MaskSpecError("budget_bytes", budget_bytes, rule)
    spans = torch.zeros(2, B, H, 1, Q_LEN, dtype=torch.int32, device=device)
    for b in range(B):
        for h in range(H):
            for q in range(0, Q_LEN, rows):
                tile = _evaluate(mask_mod, (b, h, q), min(rows, Q_LEN - q), KV_LEN, device)
                found = _tile_spans(tile, (b, h, q))
                K = found.shape[1]
                if found.shape[1] > spans.shape[3]:
                    spans = torch.nn.functional.pad(spans, (0, 0, 0, K - spans.shape[3]))
                spans[:, b, h, :K, q : q + rows] = found
    return RowIntervals(spans[0], spans[1], KV_LEN).canonical()


def _check_signature(mask_mod: MaskMod) -> None:
    if not callable(mask_mod):
        raise MaskSpecError("mask_mod", mask_mod, "must be callable")
    try:
        signature = inspect.signature(mask_mod)
    except ValueError:
        # A builtin has none; whether it takes four arguments shows when it is evaluated.
        return
    try:
        signature.bind(0, 0, 0, 0)
    except TypeError as error:
        rule = f"must take (b, h, q_idx, kv_idx): {error}"
        raise MaskSpecError("mask_mod", _name(mask_mod), rule) from error


def _name(mask_mod: MaskMod) -> object:
    return getattr(mask_mod, "__qualname__", mask_mod)


def _evaluate(
    mask_mod: MaskMod, origin: tuple[int, int, int], rows: int, KV_LEN: int, device: torch.device
) -> Tensor:
    """Cells of ``rows`` rows from ``origin`` (b, h, q) on, bool ``[rows, KV_LEN]``."""
    b0, h0, q0 = origin

    def from_origin(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        with _IndexByTensors():
            return mask_mod(b + b0, h + h0, q_idx + q0, kv_idx)

    try:
        cells = create_mask(from_origin, 1, 1, rows, KV_LEN, device)
    except Exception as error:
        rule = f"must run under torch.vmap, but raised {type(error).__name__}: {error}"
        raise MaskSpecError("mask_mod", _name(mask_mod), rule) from error
    shape = (1, 1, rows, KV_LEN)
    if not isinstance(cells, Tensor) or cells.dtype != torch.bool or cells.shape != shape:
        found = type(cells).__name__
        if isinstance(cells, Tensor):
            found = f"{cells.dtype} of shape {tuple(cells.shape)} for cells of shape {shape}"
        rule = f"must return one boolean a cell, not {found}"
        raise MaskSpecError("mask_mod", _name(mask_mod), rule)
    return cells[0, 0]


class _IndexByTensors(TorchFunctionMode):
    """Reads a captured tensor at tensor indices, ``table[q_idx]``, straight by ``aten.index``.

    So does ``create_mask``, but through an autograd function under four vmaps, for gradients that
    a mask has none of: nine tenths of what evaluating a tile costs beside its cells.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__:
            table, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if all(isinstance(item, Tensor) for item in indices):
                return torch.ops.aten.index(table, indices)
        return func(*args, **(kwargs or {}))


def _tile_spans(tile: Tensor, origin: tuple[int, int, int]) -> Tensor:
    """Spans of each row of a tile of cells, int32 ``[2, K, rows]``, in ascending order."""
    rows, KV_LEN = tile.shape
    K, counts, edges = _changes_on_cpu(tile) if tile.device.type == "cpu" else _changes(tile)
    if K > MAX_INTERVALS:
        b, h, q = origin
        first = int((counts > MAX_INTERVALS).nonzero()[0])
        raise too_many_intervals((b, h, q + first), int(counts[first]))
    edges = edges.view(-1, 2)
    row = edges[:, 0] // (KV_LEN + 1)
    k = torch.arange(row.numel(), device=tile.device) - (counts.cumsum(0) - counts)[row]
    found = torch.zeros(2, max(1, K), rows, dtype=torch.int32, device=tile.device)
    found[:, k, row] = (edges - row[:, None] * (KV_LEN + 1)).to(torch.int32).T
    return found


def _changes(tile: Tensor) -> tuple[int, Tensor, Tensor]:
    """Where the rows of a tile change between hidden and visible cells.

    Each row counts as hidden before its first cell and after its last, so its changes are a
    start, an end, a start, an end, and in the flat order of all rows they still are.

    Returns:
        Most spans of a row; spans of each row, int64 ``[rows]``; and the changes, int64
        ``[2 * spans]``, ascending, as indices into rows of KV_LEN + 1.
    """
    rows, KV_LEN = tile.shape
    changes = torch.empty(rows, KV_LEN + 1, dtype=torch.bool, device=tile.device)
    changes[:, 0] = tile[:, 0]
    changes[:, KV_LEN] = tile[:, KV_LEN - 1]
    torch.ne(tile[:, 1:], tile[:, :-1], out=changes[:, 1:KV_LEN])
    counts = changes.sum(1) >> 1
    K = int(counts.max())
    if K > MAX_INTERVALS:
        return K, counts, counts.new_empty(0)
    return K, counts, changes.view(-1).nonzero().view(-1)


def _changes_on_cpu(tile: Tensor) -> tuple[int, Tensor, Tensor]:
    """The same by NumPy, some rows at a time so that they stay in cache: ten times faster."""
    rows, KV_LEN = tile.shape
    counts = np.empty(rows, dtype=np.int64)
    found = []
    step = max(1, _CACHED_CELLS // KV_LEN)
    for r in range(0, rows, step):
        cells = tile[r : r + step].numpy()
        changes = np.empty((len(cells), KV_LEN + 1), dtype=np.bool_)
        changes[:, 0] = cells[:, 0]
        changes[:, KV_LEN] = cells[:, KV_LEN - 1]
        np.not_equal(cells[:, 1:], cells[:, :-1], out=changes[:, 1:KV_LEN])
        edges = np.flatnonzero(changes)
        edges_of_row = np.bincount(edges // (KV_LEN + 1), minlength=len(cells))
        counts[r : r + step] = edges_of_row >> 1
        if edges_of_row.max() > 2 * MAX_INTERVALS:
            counts[r + step :] = 0
            break
        found.append(edges + r * (KV_LEN + 1))
    edges = np.concatenate(found or [edges])
    return int(counts.max()), torch.from_numpy(counts), torch.from_numpy(edges)
