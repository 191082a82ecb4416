"""Packed documents: from ids or cumulative offsets to where each position's document lies.

Legend: B batch, T positions, D documents.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from maskgen.canonical import INT32_MAX
from maskgen.errors import MaskSpecError
from maskgen.families.params import RuntimeParam

DOC_IDS: Final = RuntimeParam(
    "doc_ids",
    "B, T",
    "document of each position, equal ids side by side, -1 for padding",
    required=False,
    minimum=-1,
    maximum=INT32_MAX,
)
DOC_OFFSETS: Final = RuntimeParam(
    "doc_offsets", "B, D + 1", "where each document starts, and the end of the last", False
)


@dataclass(frozen=True, eq=False)
class Segments:
    """Where the document of each position lies; a position without one has start = end = 0."""

    start: Tensor
    """First position of the document, int32 ``[B, T]``."""
    end: Tensor
    """One past its last position, int32 ``[B, T]``."""
    index: Tensor
    """Number of the document within the row, int32 ``[B, T]``; anything where there is none."""


def segments_of(
    T: int, device: torch.device, *, doc_ids: Tensor | None, doc_offsets: Tensor | None
) -> Segments:
    """Find each position's document, from ids or from offsets, without a host sync.

    Args:
        T: Positions of a row.
        device: Where the tensors lie.
        doc_ids: int32 ``[B, T]``; equal ids side by side are one document, negative is none.
        doc_offsets: int32 ``[B, D + 1]``, ascending from 0; the last value may repeat. Positions
            from it on have no document.

    Raises:
        MaskSpecError: Neither is given.
    """
    if doc_ids is not None:
        return _from_ids(doc_ids)
    if doc_offsets is not None:
        return _from_offsets(doc_offsets, T, device)
    raise MaskSpecError("doc_ids", None, "give doc_ids or doc_offsets")


def _from_ids(doc_ids: Tensor) -> Segments:
    T = doc_ids.shape[1]
    position = torch.arange(T, dtype=torch.int32, device=doc_ids.device)
    change = doc_ids[:, 1:] != doc_ids[:, :-1]
    edge = torch.ones_like(doc_ids[:, :1], dtype=torch.bool)
    opens = torch.cat([edge, change], 1)
    closes = torch.cat([change, edge], 1)
    start = torch.where(opens, position, 0).cummax(1).values
    end = torch.where(closes, position + 1, T).flip(1).cummin(1).values.flip(1)
    real = doc_ids >= 0
    index = (opens & real).cumsum(1, dtype=torch.int32) - 1
    return Segments(torch.where(real, start, 0), torch.where(real, end, 0), index)


def _from_offsets(doc_offsets: Tensor, T: int, device: torch.device) -> Segments:
    batch, bounds = doc_offsets.shape
    position = torch.arange(T, dtype=torch.int32, device=device).expand(batch, T).contiguous()
    found = torch.searchsorted(doc_offsets.contiguous(), position, right=True) - 1
    real = found < bounds - 1
    index = found.clamp(max=bounds - 2)
    start = torch.where(real, doc_offsets.gather(1, index), 0)
    end = torch.where(real, doc_offsets.gather(1, index + 1), 0)
    return Segments(start, end, index.to(torch.int32))


def check_documents(T: int, params: dict[str, Any]) -> None:
    """Raise MaskSpecError when ids or offsets do not describe packed documents of T positions."""
    ids, offsets = params.get("doc_ids"), params.get("doc_offsets")
    if ids is not None and offsets is not None:
        raise MaskSpecError("doc_offsets", None, "give doc_ids or doc_offsets, not both")
    if ids is not None:
        if ids.shape[1] != T:
            rule = f"must name the document of each of the {T} positions"
            raise MaskSpecError("doc_ids", list(ids.shape), rule)
        for row in ids:
            check_pieces(row)
    if offsets is not None:
        _check_offsets(offsets, T)


def count_documents(params: dict[str, Any]) -> int | None:
    """Most documents that a row has, or None when neither ids nor offsets are given."""
    if params.get("doc_ids") is not None:
        return max(len(row[row >= 0].unique()) for row in params["doc_ids"])
    if params.get("doc_offsets") is not None:
        return max(len(row.unique()) for row in params["doc_offsets"]) - 1
    return None


def check_pieces(ids: Tensor) -> None:
    """Raise MaskSpecError when a document of a row ``[T]`` is interrupted, padding counted."""
    runs = torch.unique_consecutive(ids)
    values, counts = runs[runs >= 0].unique(return_counts=True)
    if bool((counts > 1).any()):
        again = int(values[counts > 1][0])
        rule = "equal ids must stand side by side: a document is one piece"
        raise MaskSpecError("doc_ids", again, rule)


def _check_offsets(doc_offsets: Tensor, T: int) -> None:
    if doc_offsets.shape[1] < 2:
        raise MaskSpecError("doc_offsets", doc_offsets.tolist(), "must hold a start and an end")
    if bool((doc_offsets[:, 0] != 0).any()):
        raise MaskSpecError("doc_offsets", int(doc_offsets[:, 0].max()), "must start at 0")
    last = doc_offsets[:, -1:]
    step = doc_offsets[:, 1:] - doc_offsets[:, :-1]
    if bool(((step <= 0) & (doc_offsets[:, :-1] < last)).any()) or bool((step < 0).any()):
        rule = "must ascend; only the last value may repeat, as padding"
        raise MaskSpecError("doc_offsets", doc_offsets.tolist(), rule)
    if bool((last < 1).any()) or bool((last > T).any()):
        rule = f"must end between 1 and {T}, the positions of a row"
        raise MaskSpecError("doc_offsets", int(last.max()), rule)
