"""Block diffusion: noised blocks that see themselves and the clean blocks before them.

Legend: B batch, n tokens of a document; its rows are n noised tokens x_t, then n clean ones x_0.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from maskgen.checks import MAX_LENGTH
from maskgen.errors import MaskSpecError
from maskgen.families.draw import Draw
from maskgen.families.family import Family, MaskMod, Spans
from maskgen.families.full import FULL
from maskgen.families.params import Param
from maskgen.families.segments import DOC_OFFSETS, check_documents, segments_of
from maskgen.families.spans import nothing, rows, stack_spans
from maskgen.intervals import RowIntervals


def block_diffusion(
    Q_LEN: int,
    KV_LEN: int,
    diffusion_block_size: int,
    *,
    variant: str = "training",
    doc_offsets: Tensor | list[int] | None = None,
    device: torch.device | str | None = None,
) -> RowIntervals:
    """Masks of block diffusion language models.

    Args:
        Q_LEN: Query rows, in tokens.
        KV_LEN: Key columns, in tokens; equal to Q_LEN except for ``block_causal``.
        diffusion_block_size: Tokens that are denoised together; a last block may be shorter.
        variant: ``training``: one document of ``Q_LEN / 2`` tokens, all of x_t and then all of
            x_0 (BD3-LM, Fast-dLLM v2). ``packed``: the same for each document of a packed row,
            each as its x_t and then its x_0 (SDAR). ``block_causal``: clean tokens alone, blocks
            before the own one and the own one (sampling).
        doc_offsets: For ``packed``: starts of the documents in the plain text, and the end of
            the last, integers ``[B, D + 1]``; the last value may repeat. The rows of document d
            begin at ``2 * doc_offsets[d]``. Rows past the last document see nothing.
        device: Where the spans lie; by default where the tensors given lie, else the CPU.

    Raises:
        MaskSpecError: A value breaks its rule.
    """
    return BLOCK_DIFFUSION.intervals(
        Q_LEN,
        KV_LEN,
        device=device,
        diffusion_block_size=diffusion_block_size,
        variant=variant,
        doc_offsets=doc_offsets,
    )


def _documents(
    Q_LEN: int, device: torch.device, variant: str, doc_offsets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """First row and number of tokens n of each row's document, int32 ``[B, Q_LEN]``."""
    if variant == "training":
        zero = torch.zeros(1, Q_LEN, dtype=torch.int32, device=device)
        return zero, zero + Q_LEN // 2
    if doc_offsets is None:
        raise MaskSpecError("doc_offsets", None, "is required by variant 'packed'")
    documents = segments_of(Q_LEN, device, doc_ids=None, doc_offsets=doc_offsets * 2)
    return documents.start, (documents.end - documents.start) // 2


def _spans(
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device,
    *,
    diffusion_block_size: int,
    variant: str,
    doc_offsets: Tensor | None,
) -> Spans:
    size = diffusion_block_size
    row = rows(Q_LEN, device)
    if variant == "block_causal":
        return stack_spans([(0, row - row % size + size)], Q_LEN, KV_LEN, row)
    first, n = _documents(Q_LEN, device, variant, doc_offsets)
    local = row - first
    clean = local >= n
    token = torch.where(clean, local - n, local)
    block_start = token - token % size
    block_end = torch.minimum(block_start + size, n)
    own_end = torch.where(clean, 0, first + block_end)
    clean_end = first + n + torch.where(clean, block_end, block_start)
    # A row of no document has n = 0, which empties both spans but for the block's own start.
    clean_end = torch.where(n > 0, clean_end, 0)
    pairs = [(first + block_start, own_end), (first + n, clean_end)]
    return stack_spans(pairs, Q_LEN, KV_LEN, row)


def _mask_mod(
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device,
    *,
    diffusion_block_size: int,
    variant: str,
    doc_offsets: Tensor | None,
) -> MaskMod:
    size = diffusion_block_size
    if variant == "block_causal":

        def block_causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return kv_idx // size <= q_idx // size

        return block_causal
    first, n = _documents(Q_LEN, device, variant, doc_offsets)
    batched = int(first.shape[0] > 1)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = b * batched
        start, tokens = first[row, q_idx], n[row, q_idx]
        q, kv = q_idx - start, kv_idx - start
        q_clean, kv_clean = q >= tokens, kv >= tokens
        q_block = (q - q_clean * tokens) // size
        kv_block = (kv - kv_clean * tokens) // size
        own = (q_clean == kv_clean) & (q_block == kv_block)
        before = kv_clean & (q_block > kv_block)
        return (own | before) & (kv >= 0) & (kv < 2 * tokens)

    return mask_mod


def _check(Q_LEN: int, KV_LEN: int, params: dict[str, Any]) -> None:
    variant = params["variant"]
    if variant != "packed" and "doc_offsets" in params:
        raise MaskSpecError("doc_offsets", variant, "is of variant 'packed' only")
    if variant == "block_causal":
        return
    if Q_LEN != KV_LEN:
        rule = f"must equal Q_LEN = {Q_LEN}: rows and columns are the same x_t and x_0"
        raise MaskSpecError("KV_LEN", KV_LEN, rule)
    if Q_LEN % 2:
        raise MaskSpecError("Q_LEN", Q_LEN, "must be even: every token stands as x_t and as x_0")
    check_documents(Q_LEN // 2, params)


def _bounds(
    Q_LEN: int, KV_LEN: int, *, diffusion_block_size: int, variant: str
) -> tuple[RowIntervals, RowIntervals]:
    if variant == "packed":
        return nothing(Q_LEN, KV_LEN), FULL.intervals(Q_LEN, KV_LEN)
    exact = block_diffusion(Q_LEN, KV_LEN, diffusion_block_size, variant=variant)
    return exact, exact


def _draw(
    draw: Draw, Q_LEN: int, KV_LEN: int, *, diffusion_block_size: int, variant: str
) -> dict[str, Any]:
    return {"doc_offsets": draw.offsets(Q_LEN // 2, 6)} if variant == "packed" else {}


BLOCK_DIFFUSION = Family(
    name="block_diffusion",
    revision=1,
    formula="half[q] == half[kv] & blk[q] == blk[kv] | half[kv] == x_0 & blk[q] > blk[kv], "
    "within a document; block_causal: blk[kv] <= blk[q]",
    source="BD3-LM (arXiv 2503.09573) section 3.1, block_diff_mask; SDAR (arXiv 2510.06303); "
    "Fast-dLLM v2 (arXiv 2509.26328)",
    params=(
        Param("diffusion_block_size", "int", "tokens denoised together", minimum=1),
        Param(
            "variant",
            "str",
            "which rows there are",
            default="training",
            choices=("training", "packed", "block_causal"),
        ),
    ),
    runtime=(
        # A token of the text has two rows.
        replace(DOC_OFFSETS, doc="document starts in the plain text", maximum=MAX_LENGTH // 2),
    ),
    span_fn=_spans,
    mask_mod_fn=_mask_mod,
    max_k_fn=lambda Q_LEN, KV_LEN, diffusion_block_size, variant: (
        1 if variant == "block_causal" else 2
    ),
    check_fn=_check,
    bounds_fn=_bounds,
    draw_fn=_draw,
)
