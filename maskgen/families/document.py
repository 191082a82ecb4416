"""Packed documents: each row sees its own document only, through an inner family.

Legend: B batch, T positions, D documents, K span slots of a row.
"""

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from maskgen.errors import MaskSpecError
from maskgen.families.causal import CAUSAL
from maskgen.families.chunked import CHUNKED
from maskgen.families.draw import Draw
from maskgen.families.family import Family, MaskMod, Spans
from maskgen.families.full import FULL
from maskgen.families.params import Param, RuntimeParam
from maskgen.families.prefix_lm import PREFIX_LM
from maskgen.families.segments import (
    DOC_IDS,
    DOC_OFFSETS,
    Segments,
    check_documents,
    count_documents,
    segments_of,
)
from maskgen.families.sink_window import SINK_WINDOW
from maskgen.families.sliding_window import SLIDING_WINDOW
from maskgen.families.spans import nothing, rows, stack_spans
from maskgen.intervals import RowIntervals

INNER: Final = {
    family.name: family
    for family in (CAUSAL, FULL, SLIDING_WINDOW, SINK_WINDOW, CHUNKED, PREFIX_LM)
}
"""Families whose rows depend on the row's position alone, so they fit a document of any length."""


def document(
    Q_LEN: int,
    KV_LEN: int,
    *,
    doc_ids: Tensor | list[int] | None = None,
    doc_offsets: Tensor | list[int] | None = None,
    inner: str = "causal",
    doc_prefix_lens: Tensor | list[int] | None = None,
    device: torch.device | str | None = None,
    **inner_params: Any,
) -> RowIntervals:
    """Attention within packed documents.

    Args:
        Q_LEN: Query rows, in tokens.
        KV_LEN: Key columns, in tokens. Row q and column q are the same position.
        doc_ids: Document of each of the ``T = max(Q_LEN, KV_LEN)`` positions, integers
            ``[B, T]`` or ``[T]``; equal ids side by side, -1 for padding, which sees nothing.
        doc_offsets: In place of ids: where each document starts, and the end of the last,
            integers ``[B, D + 1]``; the last value may repeat. Positions from it on see nothing.
        inner: Family inside a document, in positions counted from the document's start.
        doc_prefix_lens: For ``inner="prefix_lm"``: prefix of each document, ``[B, D]``.
        device: Where the spans lie; by default where the tensors given lie, else the CPU.
        **inner_params: Parameters of the inner family, such as ``window``.

    Raises:
        MaskSpecError: A value breaks its rule, neither ids nor offsets are given, or both.
    """
    return DOCUMENT.intervals(
        Q_LEN,
        KV_LEN,
        device=device,
        doc_ids=doc_ids,
        doc_offsets=doc_offsets,
        inner=inner,
        doc_prefix_lens=doc_prefix_lens,
        **inner_params,
    )


def _inner_params(inner: str, params: dict[str, Any]) -> dict[str, Any]:
    """The inner family's own parameters, those that were given."""
    names = [param.name for param in INNER[inner].params]
    return {name: params[name] for name in names if params.get(name) is not None}


def _prefix_ends(
    documents: Segments, inner: str, params: dict[str, Any], doc_prefix_lens: Tensor | None
) -> Tensor:
    """One past the prefix of each position's document, int32 ``[B, T]``; its start if none."""
    if inner != "prefix_lm":
        return documents.start
    if doc_prefix_lens is None and params["prefix"] is None:
        rule = "is required by inner family 'prefix_lm', or doc_prefix_lens in its place"
        raise MaskSpecError("prefix", None, rule)
    if doc_prefix_lens is None:
        return documents.start + int(params["prefix"])
    batch = max(documents.index.shape[0], doc_prefix_lens.shape[0])
    lens = doc_prefix_lens.expand(batch, -1)
    index = documents.index.clamp(0, lens.shape[1] - 1).long().expand(batch, -1)
    return documents.start + lens.gather(1, index)


def _spans(
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device,
    *,
    inner: str,
    doc_ids: Tensor | None,
    doc_offsets: Tensor | None,
    doc_prefix_lens: Tensor | None,
    **params: Any,
) -> Spans:
    T = max(Q_LEN, KV_LEN)
    documents = segments_of(T, device, doc_ids=doc_ids, doc_offsets=doc_offsets)
    start, end = documents.start[:, :Q_LEN], documents.end[:, :Q_LEN]
    row = rows(Q_LEN, device)
    if inner in ("causal", "prefix_lm"):
        prefix_end = _prefix_ends(documents, inner, params, doc_prefix_lens)[:, :Q_LEN]
        last = torch.minimum(torch.maximum(row + 1, prefix_end), end)
        return stack_spans([(start, last)], Q_LEN, KV_LEN, row)
    inner_starts, inner_ends = INNER[inner].spans(
        Q_LEN, KV_LEN, device=device, **_inner_params(inner, params)
    )
    local = row - start
    pairs = []
    for k in range(inner_starts.shape[2]):
        first = torch.minimum(inner_starts[0, 0, k][local] + start, end)
        last = torch.minimum(inner_ends[0, 0, k][local] + start, end)
        pairs.append((first, last))
    return stack_spans(pairs, Q_LEN, KV_LEN, row)


def _mask_mod(
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device,
    *,
    inner: str,
    doc_ids: Tensor | None,
    doc_offsets: Tensor | None,
    doc_prefix_lens: Tensor | None,
    **params: Any,
) -> MaskMod:
    T = max(Q_LEN, KV_LEN)
    documents = segments_of(T, device, doc_ids=doc_ids, doc_offsets=doc_offsets)
    prefix_end = _prefix_ends(documents, inner, params, doc_prefix_lens)
    batched = int(prefix_end.shape[0] > 1)
    start = documents.start.expand_as(prefix_end).contiguous()
    end = documents.end.expand_as(prefix_end).contiguous()
    # A prefix is a table here, so below it the inner family is causal.
    family = CAUSAL if inner == "prefix_lm" else INNER[inner]
    inner_mod = family.mask_mod(Q_LEN, KV_LEN, device=device, **_inner_params(family.name, params))

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = b * batched
        first = start[row, q_idx]
        seen = inner_mod(b, h, q_idx - first, kv_idx - first) | (kv_idx < prefix_end[row, q_idx])
        return seen & (kv_idx >= first) & (kv_idx < end[row, q_idx])

    return mask_mod


def _check(Q_LEN: int, KV_LEN: int, params: dict[str, Any]) -> None:
    inner = params["inner"]
    family = INNER[inner]
    taken = {param.name for param in family.params}
    for name in (param.name for param in _INNER_PARAMS):
        if params[name] is not None and name not in taken:
            rule = f"is no parameter of the inner family {inner!r}"
            raise MaskSpecError(name, params[name], rule)
    family.check(Q_LEN, KV_LEN, _inner_params(inner, params))
    check_documents(max(Q_LEN, KV_LEN), params)
    if "doc_prefix_lens" in params:
        _check_prefixes(params)


def _check_prefixes(params: dict[str, Any]) -> None:
    if params["inner"] != "prefix_lm":
        raise MaskSpecError("doc_prefix_lens", params["inner"], "is of inner = 'prefix_lm' only")
    if params["prefix"] is not None:
        rule = "give prefix or doc_prefix_lens, not both"
        raise MaskSpecError("doc_prefix_lens", params["prefix"], rule)
    prefixes = params["doc_prefix_lens"]
    documents = count_documents(params)
    if documents is not None and prefixes.shape[1] < documents:
        rule = f"must name a prefix for each of the {documents} documents"
        raise MaskSpecError("doc_prefix_lens", list(prefixes.shape), rule)


def _bounds(Q_LEN: int, KV_LEN: int, **static: Any) -> tuple[RowIntervals, RowIntervals]:
    """Nothing (all may be padding), and the inner rows over every possible document start."""
    row = rows(Q_LEN, torch.device("cpu"))
    must = nothing(Q_LEN, KV_LEN)
    if static["inner"] == "prefix_lm" and static["prefix"] is None:
        return must, FULL.intervals(Q_LEN, KV_LEN)
    inner = INNER[static["inner"]]
    starts, ends = inner.spans(Q_LEN, KV_LEN, **_inner_params(inner.name, static))
    # A document that starts s later shifts its rows by s: take each slot's reach relative to
    # the row, and its extreme over all local rows up to this one.
    empty = starts[0, 0] >= ends[0, 0]
    back = torch.where(empty, KV_LEN, starts[0, 0] - row).cummin(1).values
    ahead = torch.where(empty, -Q_LEN, ends[0, 0] - row).cummax(1).values
    pairs = [(row + back[k], row + ahead[k]) for k in range(len(back))]
    may = RowIntervals(*stack_spans(pairs, Q_LEN, KV_LEN, row), KV_LEN).canonical()
    return must, may


def _draw(
    draw: Draw, Q_LEN: int, KV_LEN: int, *, inner: str, prefix: int | None, **static: Any
) -> dict[str, Any]:
    drawn: dict[str, Any] = {"doc_ids": draw.doc_ids(max(Q_LEN, KV_LEN), 8)}
    if inner == "prefix_lm" and prefix is None:
        drawn["doc_prefix_lens"] = [draw.below(KV_LEN + 1) for _ in range(8)]
    return drawn


_INNER_PARAMS: Final = tuple(
    {
        param.name: replace(param, default=None)
        for family in INNER.values()
        for param in family.params
        if param.name != "offset"
    }.values()
)

DOCUMENT = Family(
    name="document",
    revision=1,
    formula="doc[q] == doc[kv] & doc[q] >= 0 & inner(q - start(doc), kv - start(doc))",
    source="Packed sequences: torchtitan and attention-gym generate_doc_mask_mod",
    params=(
        Param(
            "inner",
            "str",
            "family inside a document",
            default="causal",
            choices=tuple(INNER),
        ),
        *_INNER_PARAMS,
    ),
    runtime=(
        DOC_IDS,
        DOC_OFFSETS,
        RuntimeParam("doc_prefix_lens", "B, D", "prefix of each document", required=False),
    ),
    span_fn=_spans,
    mask_mod_fn=_mask_mod,
    max_k_fn=lambda Q_LEN, KV_LEN, inner, **static: INNER[inner].max_K(
        Q_LEN, KV_LEN, _inner_params(inner, static)
    ),
    check_fn=_check,
    bounds_fn=_bounds,
    draw_fn=_draw,
)
