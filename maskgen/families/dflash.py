"""DFlash training: draft blocks that see the context before their anchor, and themselves.

Rows are N draft blocks of Bs slots; columns are S context tokens, then the same N blocks.
Legend: B batch, N draft blocks, S context tokens, Bs slots of a draft block, W window.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from maskgen.checks import MAX_LENGTH
from maskgen.errors import MaskSpecError
from maskgen.families.after_context import AfterContext
from maskgen.families.dflash_layouts import LAYOUTS
from maskgen.families.dflash_rules import SLIDING_RULES, layer_rule
from maskgen.families.draw import Draw
from maskgen.families.family import Family, MaskMod, Spans
from maskgen.families.params import Param, RuntimeParam
from maskgen.families.segments import DOC_IDS, check_documents, segments_of
from maskgen.families.spans import rows, stack_spans
from maskgen.intervals import RowIntervals


def dflash(
    Q_LEN: int,
    KV_LEN: int,
    *,
    draft_block_size: int,
    anchors: Tensor | list[int],
    n_valid: Tensor | list[int] | None = None,
    doc_ids: Tensor | list[int] | None = None,
    layer: str = "full",
    in_block: str = "default",
    window: int | None = None,
    convention: str = "specforge",
    device: torch.device | str | None = None,
) -> RowIntervals:
    """DFlash's training mask.

    Draft block j sees the context strictly before ``anchors[j]`` and itself. A block past
    ``n_valid`` sees only itself, so that no row is empty. Both label layouts (slot k predicts
    the token at anchor + k, or at anchor + k + 1) train with this same mask.

    Args:
        Q_LEN: ``N * draft_block_size`` rows.
        KV_LEN: ``S + Q_LEN`` columns.
        draft_block_size: Slots of a draft block.
        anchors: Integers ``[B, N]`` in ``[0, S)``, ascending in the first ``n_valid[b]``.
        n_valid: Draft blocks in use, integers ``[B]``; all of them by default.
        doc_ids: Documents of a packed context, integers ``[B, S]``, -1 for padding: a block sees
            its anchor's document only.
        layer: ``full`` or ``sliding``.
        in_block: ``bidirectional``, ``causal`` (JetSpec), or ``default``: bidirectional in a
            full layer, and what the convention says in a sliding one.
        window: Keys that a row of a sliding layer may see; for ``speculators`` the context
            keys before the anchor.
        convention: The code whose sliding rule is meant, one of ``SLIDING_RULES``.
        device: Where the spans lie; by default where the tensors given lie, else the CPU.

    Raises:
        MaskSpecError: A value breaks its rule.

    Source: DFlash (arXiv 2602.06036) section 4; SpecForge ``create_dflash_block_mask``.
    """
    return DFLASH.intervals(
        Q_LEN,
        KV_LEN,
        device=device,
        draft_block_size=draft_block_size,
        anchors=anchors,
        n_valid=n_valid,
        doc_ids=doc_ids,
        layer=layer,
        in_block=in_block,
        window=window,
        convention=convention,
    )


def _contexts(
    anchors: Tensor, n_valid: Tensor | None, doc_ids: Tensor | None, S: int
) -> tuple[Tensor, Tensor]:
    """First context token and one past the last that each block may see, int32 ``[B, N]``."""
    last = anchors.clamp(max=S)
    if n_valid is not None:
        number = rows(anchors.shape[1], anchors.device)
        last = torch.where(number < n_valid.unsqueeze(1), last, 0)
    if doc_ids is None:
        return torch.zeros_like(last), last
    documents = segments_of(S, anchors.device, doc_ids=doc_ids, doc_offsets=None)
    batch = max(last.shape[0], doc_ids.shape[0])
    at = anchors.clamp(0, S - 1).long().expand(batch, -1)
    first = documents.start.expand(batch, -1).gather(1, at)
    real = documents.end.expand(batch, -1).gather(1, at) > 0
    return first, torch.where(real, last, 0)


def _spans(
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device,
    *,
    draft_block_size: int,
    layer: str,
    in_block: str,
    window: int | None,
    convention: str,
    anchors: Tensor,
    n_valid: Tensor | None,
    doc_ids: Tensor | None,
) -> Spans:
    S = KV_LEN - Q_LEN
    rule = layer_rule(layer, in_block, convention)
    row = rows(Q_LEN, device)
    block = row // draft_block_size
    slot = row % draft_block_size
    first, last = _contexts(anchors, n_valid, doc_ids, S)
    context_start, context_end = first[:, block], last[:, block]
    own_start = S + block * draft_block_size
    own_end = own_start + (slot + 1 if rule.causal else draft_block_size)
    if window is not None and layer == "sliding":
        reach = slot + (1 - window) if rule.moves else torch.full_like(slot, -window)
        context_start = torch.maximum(context_start, context_end + reach)
        if rule.within_block:
            own_start = own_start + reach.clamp(min=0)
    return stack_spans([(context_start, context_end), (own_start, own_end)], Q_LEN, KV_LEN, row)


def _mask_mod(
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device,
    *,
    draft_block_size: int,
    layer: str,
    in_block: str,
    window: int | None,
    convention: str,
    anchors: Tensor,
    n_valid: Tensor | None,
    doc_ids: Tensor | None,
) -> MaskMod:
    S = KV_LEN - Q_LEN
    rule = layer_rule(layer, in_block, convention)
    first, last = _contexts(anchors, n_valid, doc_ids, S)
    batched = int(last.shape[0] > 1)
    top = Q_LEN // draft_block_size - 1
    slots = draft_block_size
    sliding = window is not None and layer == "sliding"
    # Without a bound the reach covers the whole context, so one code serves every layer.
    reach = (window if sliding and window is not None else KV_LEN) + (not rule.moves)
    moves = int(rule.moves)
    ahead = 0 if rule.causal else slots
    bound = window if sliding and rule.within_block and window is not None else slots

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        block = (q_idx // slots).clamp(max=top)
        slot = q_idx % slots
        anchor = last[b * batched, block]
        context = (
            (kv_idx < anchor)
            & (kv_idx >= first[b * batched, block])
            & (anchor + slot * moves - kv_idx < reach)
        )
        own = kv_idx - S - block * slots
        distance = slot - own
        inside = (own >= 0) & (own < slots) & (distance + ahead >= 0)
        return context | (inside & (distance < bound))

    return mask_mod


def _check(Q_LEN: int, KV_LEN: int, params: dict[str, Any]) -> None:
    slots = params["draft_block_size"]
    if Q_LEN % slots:
        rule = f"must be a multiple of draft_block_size = {slots}"
        raise MaskSpecError("Q_LEN", Q_LEN, rule)
    S = KV_LEN - Q_LEN
    if S < 1:
        rule = f"must be more than Q_LEN = {Q_LEN}: the context stands before the draft blocks"
        raise MaskSpecError("KV_LEN", KV_LEN, rule)
    if params["layer"] == "sliding" and params["window"] is None:
        raise MaskSpecError("window", None, "is required in a sliding layer")
    if params["layer"] == "full" and params["window"] is not None:
        rule = "is of sliding layers only; set layer = 'sliding'"
        raise MaskSpecError("window", params["window"], rule)
    order = layer_rule(params["layer"], params["in_block"], params["convention"])
    if order.within_block and not order.causal and params["window"] < slots:
        rule = (
            f"must be at least draft_block_size = {slots}: convention {params['convention']!r} "
            "has no rule for the later slots of a shorter window"
        )
        raise MaskSpecError("window", params["window"], rule)
    check_documents(S, params)
    _check_anchors(S, Q_LEN // slots, params)


def _check_anchors(S: int, N: int, params: dict[str, Any]) -> None:
    """Check the values of anchors and n_valid, where they are given."""
    number = rows(N, torch.device("cpu"))
    used = torch.ones_like(number, dtype=torch.bool).unsqueeze(0)
    if "n_valid" in params:
        used = number < params["n_valid"].unsqueeze(1)
        if (most := int(params["n_valid"].max())) > N:
            raise MaskSpecError("n_valid", most, f"each must be 0 to {N}, the draft blocks")
    if "anchors" not in params:
        return
    anchors = params["anchors"]
    if anchors.shape[1] != N:
        rule = f"must name one anchor for each of the {N} draft blocks"
        raise MaskSpecError("anchors", list(anchors.shape), rule)
    used = used.expand(max(len(used), len(anchors)), N)
    anchors = anchors.expand(len(used), N)
    outside = used & ((anchors < 0) | (anchors >= S))
    if bool(outside.any()):
        rule = f"each valid one must lie in the context, 0 to {S - 1}"
        raise MaskSpecError("anchors", int(anchors[outside][0]), rule)
    falls = used[:, 1:] & (anchors[:, 1:] < anchors[:, :-1])
    if bool(falls.any()):
        pair = [int(anchors[:, :-1][falls][0]), int(anchors[:, 1:][falls][0])]
        raise MaskSpecError("anchors", pair, "must ascend among the valid ones; sort them")


def _bounds(
    Q_LEN: int, KV_LEN: int, *, draft_block_size: int, **static: Any
) -> tuple[RowIntervals, RowIntervals]:
    """No context at all, and the context before every possible anchor."""
    S, N = KV_LEN - Q_LEN, Q_LEN // draft_block_size
    static["draft_block_size"] = draft_block_size
    must = DFLASH.intervals(Q_LEN, KV_LEN, anchors=[0] * N, n_valid=[0], **static)
    last = [S - 1] * N
    may = DFLASH.intervals(Q_LEN, KV_LEN, anchors=last, **static)
    if static["layer"] == "sliding":
        # A lower anchor reaches lower keys: rows that see context at all may see any of it.
        unbounded = {**static, "layer": "full", "window": None, "in_block": "bidirectional"}
        whole = DFLASH.intervals(Q_LEN, KV_LEN, anchors=last, **unbounded)
        may = may | (whole & _rows_with_context(Q_LEN, KV_LEN, may, S))
    return must, may


def _rows_with_context(Q_LEN: int, KV_LEN: int, mask: RowIntervals, S: int) -> RowIntervals:
    """The context columns, in the rows where the mask has some of them."""
    sees = ((mask.starts < S) & (mask.ends > mask.starts)).any(2, keepdim=True)
    zero = torch.zeros_like(sees, dtype=torch.int32)
    return RowIntervals(zero, torch.where(sees, S, zero), KV_LEN)


def _draw(
    draw: Draw, Q_LEN: int, KV_LEN: int, *, draft_block_size: int, **static: Any
) -> dict[str, Any]:
    S, N = KV_LEN - Q_LEN, Q_LEN // draft_block_size
    return {
        "anchors": sorted(draw.below(S) for _ in range(N)),
        "n_valid": draw.below(N + 1),
        "doc_ids": draw.doc_ids(S, 4),
    }


DFLASH = Family(
    name="dflash",
    revision=1,
    formula="j < n_valid & kv < anchors[j] & kv < S [& same document] [& window] "
    "| (kv - S) // draft_block_size == j [& slot order], j = q // draft_block_size",
    source="DFlash (arXiv 2602.06036); SpecForge create_dflash_block_mask; sliding rules of "
    "SpecForge, speculators, ModelOpt, NeMo Automodel, SGLang and vLLM",
    params=(
        Param("draft_block_size", "int", "slots of a draft block", minimum=1),
        Param("layer", "str", "kind of layer", default="full", choices=("full", "sliding")),
        Param(
            "in_block",
            "str",
            "order inside a draft block",
            default="default",
            choices=("default", "bidirectional", "causal"),
        ),
        Param("window", "int", "window of a sliding layer, in tokens", default=None, minimum=1),
        Param(
            "convention",
            "str",
            "the code whose sliding rule is meant",
            default="specforge",
            choices=tuple(SLIDING_RULES),
        ),
    ),
    runtime=(
        # What an unused block says does not matter.
        RuntimeParam(
            "anchors",
            "B, N",
            "context position where each draft block starts",
            minimum=-MAX_LENGTH,
        ),
        RuntimeParam("n_valid", "B", "draft blocks in use", required=False),
        replace(DOC_IDS, shape="B, S", doc="document of each context position, -1 for padding"),
    ),
    span_fn=_spans,
    mask_mod_fn=_mask_mod,
    max_k_fn=lambda Q_LEN, KV_LEN, **static: 2,
    check_fn=_check,
    bounds_fn=_bounds,
    draw_fn=_draw,
    layouts=LAYOUTS,
    after_context=AfterContext(count="anchors", size="draft_block_size"),
)
