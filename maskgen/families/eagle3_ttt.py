"""EAGLE-3 training-time test: keys of the first pass, then one copy of the sequence a step.

Legend: B batch, L sequence length = Q_LEN, t test-time steps so far, KV_LEN = L * (1 + t).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from maskgen.errors import MaskSpecError
from maskgen.families.draw import Draw
from maskgen.families.family import Family, MaskMod, Spans
from maskgen.families.full import check_lengths
from maskgen.families.params import Param, RuntimeParam
from maskgen.families.segments import DOC_IDS, check_documents, segments_of
from maskgen.families.spans import rows, stack_spans
from maskgen.intervals import RowIntervals


def eagle3_ttt(
    Q_LEN: int,
    KV_LEN: int,
    *,
    variant: str = "specforge",
    lengths: Tensor | list[int] | None = None,
    doc_ids: Tensor | list[int] | None = None,
    window: int | None = None,
    device: torch.device | str | None = None,
) -> RowIntervals:
    """EAGLE-3's mask at test-time step t: a causal part and one diagonal for each step.

    Args:
        Q_LEN: L, in tokens.
        KV_LEN: ``L * (1 + t)``.
        variant: Whose layout. ``specforge``: diagonals at ``q + i * L``, cut at each sample's
            length less t. ``speculators``: the same diagonals uncut, the causal part within a
            window and a document. ``modelopt``: hidden states are not re-indexed, so the causal
            part ends at ``q - t`` and diagonal i stands at ``q + i * L - (t - i)``.
        lengths: For ``specforge``: real tokens of each sample before the t shifts, ``[B]``; L by
            default.
        doc_ids: For ``speculators``: documents of a packed row, ``[B, L]``, -1 for padding.
        window: For ``speculators``: keys of the causal part a row may see, itself counted.
        device: Where the spans lie; by default where the tensors given lie, else the CPU.

    Raises:
        MaskSpecError: A value breaks its rule.
    """
    return EAGLE3_TTT.intervals(
        Q_LEN,
        KV_LEN,
        device=device,
        variant=variant,
        lengths=lengths,
        doc_ids=doc_ids,
        window=window,
    )


def _tables(
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device,
    variant: str,
    window: int | None,
    lengths: Tensor | None,
    doc_ids: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal part's start and end, and how many diagonals each row sees, int32 ``[B, L]``.

    The last steps' diagonals are seen first: a row that sees d of t sees those of the steps
    ``t - d + 1 .. t``.
    """
    t = KV_LEN // Q_LEN - 1
    row = rows(Q_LEN, device).unsqueeze(0)
    zero = torch.zeros_like(row)
    if variant == "modelopt":
        return zero, (row + (1 - t)).clamp(min=0), row.clamp(max=t - 1) + 1
    if variant == "specforge":
        kept = torch.full_like(row[:, :1], Q_LEN) if lengths is None else lengths.unsqueeze(1)
        live = row < kept - t
        return zero.expand_as(live), torch.where(live, row + 1, 0), live * t
    start, end = zero, row + 1
    if doc_ids is not None:
        documents = segments_of(Q_LEN, device, doc_ids=doc_ids, doc_offsets=None)
        start, end = documents.start, torch.minimum(documents.end, end)
    if window is not None:
        start = torch.maximum(start, row + (1 - window))
    return start.expand_as(end), end, (zero + t).expand_as(end)


def _spans(
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device,
    *,
    variant: str,
    window: int | None,
    lengths: Tensor | None,
    doc_ids: Tensor | None,
) -> Spans:
    t = KV_LEN // Q_LEN - 1
    row = rows(Q_LEN, device)
    start, end, diagonals = _tables(Q_LEN, KV_LEN, device, variant, window, lengths, doc_ids)
    pairs: list[tuple[Tensor, Tensor]] = [(start, end)]
    for i in range(1, t + 1):
        key = row + (i * Q_LEN - (t - i if variant == "modelopt" else 0))
        pairs.append((key, key + (diagonals > t - i)))
    return stack_spans(pairs, Q_LEN, KV_LEN, row)


def _mask_mod(
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device,
    *,
    variant: str,
    window: int | None,
    lengths: Tensor | None,
    doc_ids: Tensor | None,
) -> MaskMod:
    t = KV_LEN // Q_LEN - 1
    starts, ends, diagonals = _tables(Q_LEN, KV_LEN, device, variant, window, lengths, doc_ids)
    starts, ends, seen = starts.contiguous(), ends.contiguous(), diagonals.contiguous()
    batched = int(ends.shape[0] > 1)
    L = Q_LEN
    lag = int(variant == "modelopt")

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = b * batched
        first = (kv_idx >= starts[row, q_idx]) & (kv_idx < ends[row, q_idx])
        step = kv_idx // L
        on_diagonal = kv_idx - step * L == q_idx - (t - step) * lag
        return first | ((step > t - seen[row, q_idx]) & (step > 0) & on_diagonal)

    return mask_mod


def _check(Q_LEN: int, KV_LEN: int, params: dict[str, Any]) -> None:
    if KV_LEN % Q_LEN:
        rule = f"must be a multiple of Q_LEN = {Q_LEN}: the sequence once and again for each step"
        raise MaskSpecError("KV_LEN", KV_LEN, rule)
    variant = params["variant"]
    for name, owner in (
        ("lengths", "specforge"),
        ("doc_ids", "speculators"),
        ("window", "speculators"),
    ):
        if params.get(name) is not None and variant != owner:
            raise MaskSpecError(name, variant, f"is of variant {owner!r} only")
    check_lengths(Q_LEN, params)
    check_documents(Q_LEN, params)


def _bounds(
    Q_LEN: int, KV_LEN: int, *, variant: str, window: int | None
) -> tuple[RowIntervals, RowIntervals]:
    may = eagle3_ttt(Q_LEN, KV_LEN, variant=variant, window=window)
    if variant == "modelopt":
        return may, may
    if variant == "specforge":
        return eagle3_ttt(Q_LEN, KV_LEN, lengths=[1]), may
    padding = [-1] * Q_LEN
    return eagle3_ttt(Q_LEN, KV_LEN, variant=variant, doc_ids=padding), may


def _draw(
    draw: Draw, Q_LEN: int, KV_LEN: int, *, variant: str, window: int | None
) -> dict[str, Any]:
    if variant == "specforge":
        return {"lengths": 1 + draw.below(Q_LEN)}
    return {"doc_ids": draw.doc_ids(Q_LEN, 6)} if variant == "speculators" else {}


EAGLE3_TTT = Family(
    name="eagle3_ttt",
    revision=1,
    formula="specforge: q, kv % L < len - t & (kv <= q | kv >= L & kv % L == q); speculators: "
    "kv < L & kv <= q & same document [& kv > q - window] | kv >= L & kv % L == q; modelopt: "
    "kv <= q - t | kv == q + i * L - (t - i) & kv >= i * L for a step i",
    source="EAGLE-3 (arXiv 2503.01840) section 3.2; SpecForge, speculators and ModelOpt",
    params=(
        Param(
            "variant",
            "str",
            "whose layout",
            default="specforge",
            choices=("specforge", "speculators", "modelopt"),
        ),
        Param("window", "int", "window of the causal part", default=None, minimum=1),
    ),
    runtime=(
        RuntimeParam("lengths", "B", "real tokens of each sample", required=False),
        replace(DOC_IDS, shape="B, L"),
    ),
    span_fn=_spans,
    mask_mod_fn=_mask_mod,
    max_k_fn=lambda Q_LEN, KV_LEN, variant, window: KV_LEN // Q_LEN,
    check_fn=_check,
    bounds_fn=_bounds,
    draw_fn=_draw,
)
