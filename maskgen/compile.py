"""Row intervals to block tables, exactly: on the CPU, or by kernels on a GPU."""

from typing import Literal

import torch
from torch import Tensor

from maskgen import classify, host_builds
from maskgen.checks import checked_block_size
from maskgen.errors import BackendUnavailableError, MaskSpecError
from maskgen.interval_limit import MAX_INTERVALS, check_intervals
from maskgen.intervals import RowIntervals
from maskgen.tables import BlockTables, table_shapes


def compile_mask(spans: RowIntervals, BLOCK_SIZE: int | tuple[int, int] = 128) -> BlockTables:
    """Make the exact block tables of a mask, on the device of its spans.

    Args:
        spans: The mask.
        BLOCK_SIZE: Block size in tokens, or the pair (query rows, keys); multiples of 16 up to
            1024.

    Returns:
        Tables equal to those of ``create_block_mask`` in the counts and in the live indices.

    Raises:
        MaskSpecError: BLOCK_SIZE breaks its rule, or the tables are too large to address.
        UnsupportedMaskError: A row has more than ``MAX_INTERVALS`` spans.
    """
    if not isinstance(spans, RowIntervals):
        rule = "must be RowIntervals: a mask family makes them, and from_mask_mod of a mask_mod"
        raise MaskSpecError("spans", getattr(spans, "__name__", type(spans).__name__), rule)
    host_builds.announce("compile_mask")
    size = checked_block_size("BLOCK_SIZE", BLOCK_SIZE)
    spans = spans.disjoint()
    if spans.K > MAX_INTERVALS:
        spans = check_intervals(spans)
    B, H, Q_LEN, KV_LEN = spans.shape
    buffers = {
        # Not zeros: every element is written, and at a million tokens zeros would cost 20 ms.
        name: torch.empty(shape, dtype=torch.int32, device=spans.device)
        for name, shape in table_shapes(B, H, Q_LEN, KV_LEN, size).items()
    }
    tables = BlockTables(Q_LEN=Q_LEN, KV_LEN=KV_LEN, BLOCK_SIZE=size, **buffers)
    tables_into(tables, spans.starts, spans.ends)
    return tables


def tables_into(
    tables: BlockTables,
    starts: Tensor,
    ends: Tensor,
    impl: Literal["auto", "triton"] = "auto",
) -> None:
    """Write the exact tables of a mask into static buffers, in place.

    On a GPU this launches Triton kernels on the current stream: no host sync, no atomics, the
    same bits every time, and it may be captured in a CUDA graph (after one call outside it, which
    compiles the kernels). Nothing is checked that would need a look at the values.

    Args:
        tables: Where to write; ``BlockTables.empty`` makes it.
        starts: First visible key of each span, int32 ``[B, H, K, Q_LEN]``, B and H as in tables.
            The non-empty spans of a row must be disjoint; empty ones may stand anywhere.
        ends: One past the last visible key, same shape.
        impl: ``"auto"`` takes the kernels on a GPU and the host builder on the CPU;
            ``"triton"`` the kernels on either, on the CPU under ``TRITON_INTERPRET=1``.

    Raises:
        MaskSpecError: A shape, dtype or device does not fit the tables.
        BackendUnavailableError: The kernels are asked for and triton is not installed.
    """
    wanted = (tables.B, tables.H, tables.Q_LEN)
    for name, spans in (("starts", starts), ("ends", ends)):
        if spans.dtype != torch.int32 or spans.dim() != 4 or not spans.is_contiguous():
            found = (tuple(spans.shape), spans.dtype)
            raise MaskSpecError(name, found, "must be contiguous int32 [B, H, K, Q_LEN]")
        if (spans.shape[0], spans.shape[1], spans.shape[3]) != wanted:
            rule = f"must be [B, H, K, Q_LEN] with B, H, Q_LEN of the tables, {wanted}"
            raise MaskSpecError(f"{name}.shape", tuple(spans.shape), rule)
        if spans.device != tables.device:
            raise MaskSpecError(name, spans.device, f"must be on {tables.device} as the tables")
    if ends.shape != starts.shape:
        rule = f"must equal the shape of starts, {tuple(starts.shape)}"
        raise MaskSpecError("ends.shape", tuple(ends.shape), rule)
    if impl == "triton" or tables.device.type == "cuda":
        # Here, not at the top: the compiler is complete on the CPU without triton.
        try:
            from maskgen.kernels import launch
        except ImportError as error:
            install = "pip install 'triton>=3.6'"
            raise BackendUnavailableError("triton", "tables_into on a GPU", install) from error
        launch(tables, starts, ends)
    else:
        _fill(tables, classify.block_kinds(starts, ends, tables.KV_LEN, tables.BLOCK_SIZE))


def _fill(tables: BlockTables, kinds: Tensor) -> None:
    for side in ("kv", "q"):
        for prefix, kind in (("", classify.PARTIAL), ("full_", classify.FULL)):
            counts = getattr(tables, f"{prefix}{side}_num_blocks")
            classify.fill_tables(kinds, kind, counts, getattr(tables, f"{prefix}{side}_indices"))
        if side == "kv":
            kinds = kinds.transpose(-1, -2).contiguous()
