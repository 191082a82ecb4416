"""Causal attention that restarts at every chunk."""

import torch
from torch import Tensor

from maskgen.families.causal import OFFSET, check_offset
from maskgen.families.family import Family, MaskMod, Spans
from maskgen.families.params import Param
from maskgen.families.spans import rows, stack_spans
from maskgen.intervals import RowIntervals


def chunked(
    Q_LEN: int,
    KV_LEN: int,
    chunk: int,
    *,
    offset: int = 0,
    device: torch.device | str | None = None,
) -> RowIntervals:
    """Chunked causal attention, as the local layers of Llama 4.

    Args:
        Q_LEN: Query rows, in tokens.
        KV_LEN: Key columns, in tokens.
        chunk: Tokens of a chunk; chunks start at key position 0.
        offset: Row q stands at key position ``q + offset``.
        device: Where the spans lie; the CPU by default.

    Raises:
        MaskSpecError: A value breaks its rule.
    """
    return CHUNKED.intervals(Q_LEN, KV_LEN, device=device, chunk=chunk, offset=offset)


def _spans(Q_LEN: int, KV_LEN: int, device: torch.device, *, chunk: int, offset: int) -> Spans:
    row = rows(Q_LEN, device, offset)
    return stack_spans([(row - row % chunk, row + 1)], Q_LEN, KV_LEN, row)


def _mask_mod(Q_LEN: int, KV_LEN: int, device: torch.device, *, chunk: int, offset: int) -> MaskMod:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        position = q_idx + offset
        return (kv_idx <= position) & (kv_idx >= position - position % chunk)

    return mask_mod


CHUNKED = Family(
    name="chunked",
    revision=1,
    formula="kv <= q + offset & kv // chunk == (q + offset) // chunk",
    source="Llama 4 local layers; transformers chunked_causal_mask_function",
    params=(Param("chunk", "int", "tokens of a chunk", minimum=1), OFFSET),
    span_fn=_spans,
    mask_mod_fn=_mask_mod,
    max_k_fn=lambda Q_LEN, KV_LEN, chunk, offset: 1,
    check_fn=check_offset,
)
