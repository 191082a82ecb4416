"""Packed documents of which several share one prompt document without repeating it.

Legend: B batch, T positions, D documents.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from maskgen.errors import MaskSpecError
from maskgen.families.causal import CAUSAL
from maskgen.families.draw import Draw
from maskgen.families.family import Family, MaskMod, Spans
from maskgen.families.params import RuntimeParam
from maskgen.families.segments import DOC_OFFSETS, check_documents, segments_of
from maskgen.families.spans import nothing, rows, stack_spans
from maskgen.intervals import RowIntervals


def shared_prefix(
    Q_LEN: int,
    KV_LEN: int,
    *,
    doc_offsets: Tensor | list[int],
    prefix_docs: Tensor | list[int],
    device: torch.device | str | None = None,
) -> RowIntervals:
    """Several answers to one prompt, as preference and group-relative training packs them.

    Each document is causal within itself and sees the whole document that is its prefix.

    Args:
        Q_LEN: Query rows, in tokens.
        KV_LEN: Key columns, in tokens. Row q and column q are the same position.
        doc_offsets: Where each document starts, and the end of the last, integers
            ``[B, D + 1]``; the last value may repeat. Positions from it on see nothing.
        prefix_docs: The prefix of each document by its number, integers ``[B, D]``; a document
            without a prefix has its own number.
        device: Where the spans lie; by default where the tensors given lie, else the CPU.

    Raises:
        MaskSpecError: A value breaks its rule.
    """
    return SHARED_PREFIX.intervals(
        Q_LEN, KV_LEN, device=device, doc_offsets=doc_offsets, prefix_docs=prefix_docs
    )


def _tables(
    T: int, device: torch.device, doc_offsets: Tensor, prefix_docs: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Own start and end, prefix start and end of each position's document, int32 ``[B, T]``."""
    documents = segments_of(T, device, doc_ids=None, doc_offsets=doc_offsets)
    batch = max(doc_offsets.shape[0], prefix_docs.shape[0])
    start = documents.start.expand(batch, -1)
    end = documents.end.expand(batch, -1)
    index = documents.index.expand(batch, -1)
    prefix = prefix_docs.expand(batch, -1).gather(1, index.long())
    offsets = doc_offsets.expand(batch, -1)
    other = (prefix != index) & (end > 0)
    prefix_start = torch.where(other, offsets.gather(1, prefix.long()), 0)
    prefix_end = torch.where(other, offsets.gather(1, prefix.long() + 1), 0)
    return start.contiguous(), end.contiguous(), prefix_start, prefix_end


def _spans(
    Q_LEN: int, KV_LEN: int, device: torch.device, *, doc_offsets: Tensor, prefix_docs: Tensor
) -> Spans:
    row = rows(Q_LEN, device)
    start, end, prefix_start, prefix_end = _tables(Q_LEN, device, doc_offsets, prefix_docs)
    own = (start, torch.minimum(row + 1, end))
    return stack_spans([(prefix_start, prefix_end), own], Q_LEN, KV_LEN, row)


def _mask_mod(
    Q_LEN: int, KV_LEN: int, device: torch.device, *, doc_offsets: Tensor, prefix_docs: Tensor
) -> MaskMod:
    start, end, prefix_start, prefix_end = _tables(Q_LEN, device, doc_offsets, prefix_docs)
    batched = int(start.shape[0] > 1)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = b * batched
        own = (kv_idx >= start[row, q_idx]) & (kv_idx <= q_idx) & (kv_idx < end[row, q_idx])
        prefix = (kv_idx >= prefix_start[row, q_idx]) & (kv_idx < prefix_end[row, q_idx])
        return own | prefix

    return mask_mod


def _check(Q_LEN: int, KV_LEN: int, params: dict[str, Any]) -> None:
    check_documents(max(Q_LEN, KV_LEN), params)
    if "prefix_docs" not in params or "doc_offsets" not in params:
        return
    prefix = params["prefix_docs"]
    D = params["doc_offsets"].shape[1] - 1
    if prefix.shape[1] != D:
        rule = f"must name a prefix for each of the {D} documents"
        raise MaskSpecError("prefix_docs", list(prefix.shape), rule)
    bad = prefix > rows(D, prefix.device)
    if bool(bad.any()):
        rule = "each must be the document's own number or that of one before it"
        raise MaskSpecError("prefix_docs", int(prefix[bad][0]), rule)
    nested = prefix.gather(1, prefix.long()) != prefix
    if bool(nested.any()):
        rule = "a prefix document must have no prefix of its own: give it its own number"
        raise MaskSpecError("prefix_docs", int(prefix[nested][0]), rule)


def _bounds(Q_LEN: int, KV_LEN: int) -> tuple[RowIntervals, RowIntervals]:
    return nothing(Q_LEN, KV_LEN), CAUSAL.intervals(Q_LEN, KV_LEN)


def _draw(draw: Draw, Q_LEN: int, KV_LEN: int) -> dict[str, Any]:
    roots: list[int] = []
    prefix_docs: list[int] = []
    for document in range(6):
        prefix = [document, *roots][draw.below(len(roots) + 1)]
        roots += [document] * (prefix == document)
        prefix_docs.append(prefix)
    return {"doc_offsets": draw.offsets(Q_LEN, 6), "prefix_docs": prefix_docs}


SHARED_PREFIX = Family(
    name="shared_prefix",
    revision=1,
    formula="doc[q] == doc[kv] & kv <= q | doc[kv] == prefix_docs[doc[q]] & doc[kv] != doc[q]",
    source="attention-gym generate_shared_prefix_mask_mod",
    runtime=(
        replace(DOC_OFFSETS, required=True),
        RuntimeParam("prefix_docs", "B, D", "number of each document's prefix document"),
    ),
    span_fn=_spans,
    mask_mod_fn=_mask_mod,
    max_k_fn=lambda Q_LEN, KV_LEN: 2,
    check_fn=_check,
    bounds_fn=_bounds,
    draw_fn=_draw,
)
