"""P-EAGLE: parallel drafting of several depths, the sampled elements in depth-major order.

Legend: B batch, T elements of a row (Q_LEN = KV_LEN = T), an element is (anchor, depth).
"""

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from maskgen.checks import MAX_LENGTH
from maskgen.errors import MaskSpecError
from maskgen.families.causal import CAUSAL
from maskgen.families.draw import Draw
from maskgen.families.family import Family, MaskMod, Spans
from maskgen.families.params import Param, RuntimeParam
from maskgen.families.segments import DOC_IDS, check_pieces, segments_of
from maskgen.families.spans import nothing, rows, stack_spans
from maskgen.intervals import RowIntervals

_DEPTH: Final = 1 << 32
"""Weight of the depth in an element's sort key; anchors lie below it."""


def p_eagle(
    Q_LEN: int,
    KV_LEN: int,
    *,
    num_depths: int,
    anchors: Tensor | list[int],
    depths: Tensor | list[int],
    doc_ids: Tensor | list[int] | None = None,
    window: int | None = None,
    device: torch.device | str | None = None,
) -> RowIntervals:
    """P-EAGLE's training mask over sampled (anchor, depth) elements.

    An element sees the elements of depth 0 up to its own anchor, and those of its own anchor up
    to its own depth.

    Args:
        Q_LEN: T, elements of a row, padding included.
        KV_LEN: Equal to Q_LEN.
        num_depths: Depths there are; elements have depth 0 to ``num_depths - 1``.
        anchors: Position that each element drafts from, integers ``[B, T]``.
        depths: Depth of each element, integers ``[B, T]``, -1 for padding. Elements ascend by
            depth and then by anchor, padding last; every anchor stands at depth 0 too.
        doc_ids: Document of each element, integers ``[B, T]``, -1 for padding; one document by
            default. At depth 0 equal ids stand side by side, and a deeper element has the id of
            its anchor at depth 0.
        window: An element sees depth 0 from ``anchor + depth - (window - 1)`` on; unbounded by
            default.
        device: Where the spans lie; by default where the tensors given lie, else the CPU.

    Raises:
        MaskSpecError: A value breaks its rule.
    """
    return P_EAGLE.intervals(
        Q_LEN,
        KV_LEN,
        device=device,
        num_depths=num_depths,
        anchors=anchors,
        depths=depths,
        doc_ids=doc_ids,
        window=window,
    )


def _documents(depths: Tensor, doc_ids: Tensor | None) -> Tensor:
    """Document of each element, -1 where it is padding, int32 ``[B, T]``."""
    return torch.where(depths < 0, -1, 0 if doc_ids is None else doc_ids)


def _spans(
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device,
    *,
    num_depths: int,
    window: int | None,
    anchors: Tensor,
    depths: Tensor,
    doc_ids: Tensor | None,
) -> Spans:
    docs = _documents(depths, doc_ids)
    batch = max(anchors.shape[0], docs.shape[0])
    anchor = anchors.expand(batch, -1).long()
    depth = depths.expand(batch, -1).long()
    docs = docs.expand(batch, -1)
    real = docs >= 0
    key = torch.where(depth < 0, num_depths, depth) * _DEPTH + anchor
    key = key.contiguous()
    # Depth 0 holds every anchor, so what lies at or below this one ends at its own element.
    end = torch.searchsorted(key, anchor.contiguous(), right=True)
    at = (end - 1).clamp(min=0)
    first = segments_of(Q_LEN, device, doc_ids=docs, doc_offsets=None).start.gather(1, at)
    if window is not None:
        lowest = (anchor + depth + (1 - window)).clamp(min=0)
        reach = torch.searchsorted(key, lowest.contiguous())
        # The window leaves an element's own anchor in sight, however deep the element.
        first = torch.minimum(torch.maximum(first, reach), at).to(torch.int32)
    end = torch.where(real, end.to(torch.int32), 0)
    pairs: list[tuple[Tensor, Tensor]] = [(first, end)]
    for step in range(1, num_depths):
        wanted = (anchor + step * _DEPTH).contiguous()
        found = torch.searchsorted(key, wanted).clamp(max=Q_LEN - 1)
        sees = real & (step <= depth) & (key.gather(1, found) == wanted)
        position = found.to(torch.int32)
        pairs.append((position, position + sees))
    return stack_spans(pairs, Q_LEN, KV_LEN, rows(Q_LEN, device))


def _mask_mod(
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device,
    *,
    num_depths: int,
    window: int | None,
    anchors: Tensor,
    depths: Tensor,
    doc_ids: Tensor | None,
) -> MaskMod:
    docs = _documents(depths, doc_ids)
    batch = max(anchors.shape[0], docs.shape[0])
    anchor = anchors.expand(batch, -1).contiguous()
    depth = depths.expand(batch, -1).contiguous()
    doc = docs.expand(batch, -1).contiguous()
    batched = int(batch > 1)
    # Without a window the reach covers every distance that anchors can have.
    reach = MAX_LENGTH * 2 - 1 if window is None else window

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = b * batched
        q_anchor, kv_anchor = anchor[row, q_idx], anchor[row, kv_idx]
        q_depth, kv_depth = depth[row, q_idx], depth[row, kv_idx]
        near = q_anchor + q_depth - kv_anchor < reach
        first = (kv_depth == 0) & (q_anchor >= kv_anchor) & near
        own = (q_anchor == kv_anchor) & (q_depth >= kv_depth)
        same = (doc[row, q_idx] == doc[row, kv_idx]) & (doc[row, q_idx] >= 0)
        return same & (first | own)

    return mask_mod


def _check(Q_LEN: int, KV_LEN: int, params: dict[str, Any]) -> None:
    if Q_LEN != KV_LEN:
        rule = f"must equal Q_LEN = {Q_LEN}: rows and columns are the same elements"
        raise MaskSpecError("KV_LEN", KV_LEN, rule)
    given = {name: params[name] for name in ("anchors", "depths", "doc_ids") if name in params}
    for name, table in given.items():
        if table.shape[1] != Q_LEN:
            rule = f"must hold one value for each of the {Q_LEN} elements"
            raise MaskSpecError(name, list(table.shape), rule)
    if "anchors" in given and "depths" in given:
        batch = max(len(table) for table in given.values())
        rows_of = [table.expand(batch, -1).long() for table in given.values()]
        for anchors, depths, *docs in zip(*rows_of, strict=True):
            _check_elements(anchors, depths, params["num_depths"])
            if docs:
                _check_element_documents(anchors, depths, docs[0])


def _check_elements(anchors: Tensor, depths: Tensor, num_depths: int) -> None:
    """Check the order of one row's elements ``[T]``, and that each has its root at depth 0."""
    padding = depths < 0
    if (deepest := int(depths.max())) >= num_depths:
        rule = f"each must be 0 to {num_depths - 1}, or -1 for padding"
        raise MaskSpecError("depths", deepest, rule)
    if bool((padding[:-1] & ~padding[1:]).any()):
        raise MaskSpecError("depths", -1, "padding must stand at the end of the row")
    anchors, depths = anchors[~padding], depths[~padding]
    if bool((anchors < 0).any()):
        raise MaskSpecError("anchors", int(anchors.min()), "each must be at least 0")
    key = depths * _DEPTH + anchors
    falls = key[1:] <= key[:-1]
    if bool(falls.any()):
        pair = [int(anchors[:-1][falls][0]), int(anchors[1:][falls][0])]
        rule = "elements must ascend by depth and then by anchor, none twice; sort them"
        raise MaskSpecError("anchors", pair, rule)
    orphans = anchors[~torch.isin(anchors, anchors[depths == 0])]
    if orphans.numel():
        rule = "every anchor of a deeper element must stand at depth 0 too"
        raise MaskSpecError("anchors", int(orphans[0]), rule)


def _check_element_documents(anchors: Tensor, depths: Tensor, docs: Tensor) -> None:
    """Check that documents are pieces of depth 0, and the same for an anchor at every depth.

    The spans take an element's document from its root and the documents' limits from depth 0.
    """
    roots = depths == 0
    check_pieces(docs[roots])
    real = depths >= 0
    anchors, docs, roots = anchors[real], docs[real], roots[real]
    of_root = docs[roots][torch.searchsorted(anchors[roots], anchors)]
    if bool((docs != of_root).any()):
        at = int((docs != of_root).nonzero()[0])
        rule = (
            f"of anchor {int(anchors[at])} must be {int(of_root[at])} at every depth, as at depth 0"
        )
        raise MaskSpecError("doc_ids", int(docs[at]), rule)


def _bounds(
    Q_LEN: int, KV_LEN: int, *, num_depths: int, window: int | None
) -> tuple[RowIntervals, RowIntervals]:
    """Nothing (all may be padding), and causal: what an element sees stands before it."""
    return nothing(Q_LEN, KV_LEN), CAUSAL.intervals(Q_LEN, KV_LEN)


def _draw(
    draw: Draw, Q_LEN: int, KV_LEN: int, *, num_depths: int, window: int | None
) -> dict[str, Any]:
    """All anchors at depth 0, and at each next depth some of those of the depth before."""
    kept = list(range(1 + draw.below(Q_LEN)))
    documents = draw.doc_ids(len(kept), 4)
    elements: list[tuple[int, int]] = []
    for depth in range(num_depths):
        elements += [(anchor, depth) for anchor in kept]
        kept = [anchor for anchor in kept if draw.below(4)]
    elements = elements[:Q_LEN]
    padding = [(0, -1)] * (Q_LEN - len(elements))
    return {
        "anchors": [anchor for anchor, _ in elements + padding],
        "depths": [depth for _, depth in elements + padding],
        "doc_ids": [documents[anchor] for anchor, _ in elements] + [-1] * len(padding),
    }


P_EAGLE = Family(
    name="p_eagle",
    revision=1,
    formula="same document & (depth[kv] == 0 & anchor[kv] <= anchor[q] "
    "[& anchor[kv] > anchor[q] + depth[q] - window] "
    "| anchor[kv] == anchor[q] & depth[kv] <= depth[q])",
    source="P-EAGLE (arXiv 2602.01469); SpecForge and speculators",
    params=(
        Param("num_depths", "int", "depths there are, 0 counted", minimum=1),
        Param("window", "int", "window over the elements of depth 0", default=None, minimum=1),
    ),
    runtime=(
        # What padding says does not matter. An anchor and a depth add up to less than 2**31 - 1.
        RuntimeParam(
            "anchors",
            "B, T",
            "position that each element drafts from",
            minimum=-MAX_LENGTH,
            maximum=MAX_LENGTH - 1,
        ),
        RuntimeParam("depths", "B, T", "depth of each element, -1 for padding", minimum=-1),
        replace(DOC_IDS, doc="document of each element, -1 for padding"),
    ),
    span_fn=_spans,
    mask_mod_fn=_mask_mod,
    max_k_fn=lambda Q_LEN, KV_LEN, num_depths, window: num_depths,
    check_fn=_check,
    bounds_fn=_bounds,
    draw_fn=_draw,
)
