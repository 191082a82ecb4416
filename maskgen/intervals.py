"""RowIntervals: a mask as, for each query row, a short list of half-open spans of visible keys.

Everything else follows from it: block tables, the mask_mod of partial blocks, set algebra, and
what is shipped.

Shape legend: B batch, H heads (1 where the mask does not depend on them), K spans a row,
Q_LEN query rows.
"""

from collections.abc import Sequence
from typing import Literal, NoReturn

import torch
from torch import Tensor

from maskgen.canonical import equal_slices, is_canonical, merged, sorted_spans, visible_cells
from maskgen.errors import MaskSpecError
from maskgen.frame import check_frame_length, check_range, check_same_frame, check_spans


class RowIntervals:
    """A mask as spans of visible keys for each query row.

    The spans of a row may stand in any order and may overlap, and empty ones (``end <= start``)
    may stand anywhere; ``canonical()`` brings them to the one form that digests are taken of.
    The results of the operators ``&``, ``|``, ``~`` and of ``crop``, ``shift``, ``pad_to`` and
    ``concat`` are canonical. Instances are values: do not write into their tensors.

    Args:
        starts: First visible key of each span, int32 ``[B, H, K, Q_LEN]``.
        ends: One past the last visible key, int32, same shape and device.
        KV_LEN: Number of keys.

    Raises:
        MaskSpecError: Shape, dtype, device or length break their rule, or a non-empty span
            leaves ``[0, KV_LEN)``.
    """

    __slots__ = ("KV_LEN", "_canonical", "ends", "starts")

    starts: Tensor
    ends: Tensor
    KV_LEN: int

    def __init__(self, starts: Tensor, ends: Tensor, KV_LEN: int) -> None:
        check_spans(starts, ends, KV_LEN)
        self._set(starts, ends, KV_LEN)

    def _set(
        self, starts: Tensor, ends: Tensor, KV_LEN: int, canonical: bool | None = None
    ) -> "RowIntervals":
        self.starts = starts.contiguous()
        self.ends = ends.contiguous()
        self.KV_LEN = int(KV_LEN)
        self._canonical = canonical
        return self

    @classmethod
    def _trusted(
        cls, starts: Tensor, ends: Tensor, KV_LEN: int, canonical: bool | None = None
    ) -> "RowIntervals":
        """Wrap spans that are known to be in range, without reading them."""
        return cls.__new__(cls)._set(starts, ends, KV_LEN, canonical)

    @property
    def B(self) -> int:  # noqa: N802
        """Batch size, 1 where the mask does not depend on the batch."""
        return self.starts.shape[0]

    @property
    def H(self) -> int:  # noqa: N802
        """Number of heads, 1 where the mask does not depend on the head."""
        return self.starts.shape[1]

    @property
    def K(self) -> int:  # noqa: N802
        """Spans a row, empty ones included; at least 1."""
        return self.starts.shape[2]

    @property
    def Q_LEN(self) -> int:  # noqa: N802
        """Number of query rows."""
        return self.starts.shape[3]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(B, H, Q_LEN, KV_LEN)``, as of the dense mask."""
        return (self.B, self.H, self.Q_LEN, self.KV_LEN)

    @property
    def device(self) -> torch.device:
        """Where the spans are."""
        return self.starts.device

    def __repr__(self) -> str:
        return (
            f"RowIntervals(B={self.B}, H={self.H}, K={self.K}, Q_LEN={self.Q_LEN}, "
            f"KV_LEN={self.KV_LEN}, device={str(self.device)!r})"
        )

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a mask has no truth value: combine masks with &, | and ~, not with and, or and not"
        )

    @property
    def is_canonical(self) -> bool:
        """Whether the spans are in canonical form; see ``canonical``."""
        if self._canonical is None:
            self._canonical = is_canonical(self.starts, self.ends)
        return self._canonical

    def canonical(self) -> "RowIntervals":
        """The same mask in the one form that digests are taken of.

        Returns:
            Spans sorted, disjoint with a gap of at least 1, non-empty ones first and empty ones
            ``(0, 0)``; K the smallest that fits; B and H 1 where all their slices are equal.
        """
        if self.is_canonical:
            return self
        starts, ends = merged(self.starts, self.ends)
        for dim in (0, 1):
            if starts.shape[dim] > 1 and equal_slices(starts, ends, dim):
                starts, ends = starts.narrow(dim, 0, 1), ends.narrow(dim, 0, 1)
        return RowIntervals._trusted(starts, ends, self.KV_LEN, canonical=True)

    def disjoint(self) -> "RowIntervals":
        """This mask with the spans of each row disjoint, as tables and counts need them.

        Returns:
            ``self`` where its spans already are, else the canonical form.
        """
        if self.K == 1 or self._canonical:
            return self
        starts, ends = sorted_spans(self.starts, self.ends)
        overlap = (starts[:, :, 1:] < ends.cummax(2).values[:, :, :-1]).any()
        return self.canonical() if bool(overlap) else self

    def __and__(self, other: "RowIntervals") -> "RowIntervals":
        if not isinstance(other, RowIntervals):
            return NotImplemented
        check_same_frame(self.shape, other.shape, "&")
        return ~(~self | ~other)

    def __or__(self, other: "RowIntervals") -> "RowIntervals":
        if not isinstance(other, RowIntervals):
            return NotImplemented
        check_same_frame(self.shape, other.shape, "|")
        B, H = max(self.B, other.B), max(self.H, other.H)
        return RowIntervals._trusted(
            torch.cat([m.starts.expand(B, H, -1, -1) for m in (self, other)], 2),
            torch.cat([m.ends.expand(B, H, -1, -1) for m in (self, other)], 2),
            self.KV_LEN,
        ).canonical()

    def __invert__(self) -> "RowIntervals":
        mask = self.canonical()
        # The gaps between spans: an empty span becomes one at KV_LEN, so the gap after the last
        # real span reaches KV_LEN and those after it are empty.
        held = mask.ends > mask.starts
        starts = torch.where(held, mask.starts, self.KV_LEN)
        ends = torch.where(held, mask.ends, self.KV_LEN)
        edge = starts.new_zeros(mask.B, mask.H, 1, mask.Q_LEN)
        return RowIntervals._trusted(
            torch.cat([edge, ends], 2), torch.cat([starts, edge + self.KV_LEN], 2), self.KV_LEN
        ).canonical()

    def crop(
        self, q: tuple[int, int] | None = None, kv: tuple[int, int] | None = None
    ) -> "RowIntervals":
        """Cut a frame out of the mask.

        Args:
            q: Half-open range of query rows to keep; None keeps all.
            kv: Half-open range of keys to keep; None keeps all.

        Returns:
            The mask of the frame, its first row and key being 0.

        Raises:
            MaskSpecError: A range is empty or leaves the mask.
        """
        q0, q1 = check_range("q", q, self.Q_LEN)
        kv0, kv1 = check_range("kv", kv, self.KV_LEN)
        starts, ends = self.starts[..., q0:q1], self.ends[..., q0:q1]
        return RowIntervals._trusted(
            starts.clamp(kv0, kv1) - kv0, ends.clamp(kv0, kv1) - kv0, kv1 - kv0
        ).canonical()

    def shift(self, q: int = 0, kv: int = 0) -> "RowIntervals":
        """Move the mask by whole rows and keys inside the same frame.

        Args:
            q: Rows to move down by (up when negative).
            kv: Keys to move right by (left when negative).

        Returns:
            The moved mask; what leaves the frame is dropped and what enters is not visible.
        """
        q = max(-self.Q_LEN, min(self.Q_LEN, q))
        kv = max(-self.KV_LEN, min(self.KV_LEN, kv))
        starts, ends = torch.zeros_like(self.starts), torch.zeros_like(self.ends)
        rows = self.Q_LEN - abs(q)
        source = slice(max(0, -q), max(0, -q) + rows)
        target = slice(max(0, q), max(0, q) + rows)
        # In int64: an endpoint near 2**31 must not wrap before it is cut back to the frame.
        for moved, spans in ((starts, self.starts), (ends, self.ends)):
            moved[..., target] = (spans[..., source].long() + kv).clamp(0, self.KV_LEN).int()
        return RowIntervals._trusted(starts, ends, self.KV_LEN).canonical()

    def pad_to(self, Q_LEN: int | None = None, KV_LEN: int | None = None) -> "RowIntervals":
        """Enlarge the frame at its end with rows that see nothing and keys that nobody sees.

        Args:
            Q_LEN: New number of rows; None keeps it.
            KV_LEN: New number of keys; None keeps it.

        Raises:
            MaskSpecError: A length is below the present one.
        """
        Q_LEN = self.Q_LEN if Q_LEN is None else Q_LEN
        KV_LEN = self.KV_LEN if KV_LEN is None else KV_LEN
        for field, value, least in (("Q_LEN", Q_LEN, self.Q_LEN), ("KV_LEN", KV_LEN, self.KV_LEN)):
            if value < least:
                raise MaskSpecError(field, value, f"padding cannot go below {least}; use crop()")
        check_frame_length("Q_LEN", Q_LEN)
        check_frame_length("KV_LEN", KV_LEN)
        starts, ends = (
            torch.nn.functional.pad(x, (0, Q_LEN - self.Q_LEN)) for x in (self.starts, self.ends)
        )
        return RowIntervals._trusted(starts, ends, KV_LEN).canonical()

    @staticmethod
    def concat(masks: Sequence["RowIntervals"], dim: Literal["q", "kv"]) -> "RowIntervals":
        """Join masks along the query rows or along the keys.

        Args:
            masks: At least one mask; B and H each equal or 1, and the other length equal.
            dim: ``"q"`` puts rows below rows; ``"kv"`` puts keys after keys.

        Raises:
            MaskSpecError: Nothing to join, another dim, or lengths that differ.
        """
        if not masks:
            raise MaskSpecError("masks", masks, "concat needs at least one mask")
        if dim not in ("q", "kv"):
            raise MaskSpecError("dim", dim, 'must be "q" or "kv"')
        first = masks[0]
        for mask in masks[1:]:
            check_same_frame(first.shape, mask.shape, "concat", q=dim == "kv", kv=dim == "q")
        B, H = max(m.B for m in masks), max(m.H for m in masks)
        K = max(m.K for m in masks)
        starts, ends, width = [], [], 0
        for mask in masks:
            s, e = mask.starts.expand(B, H, -1, -1), mask.ends.expand(B, H, -1, -1)
            if dim == "q":
                s, e = (torch.nn.functional.pad(x, (0, 0, 0, K - mask.K)) for x in (s, e))
            else:
                s, e = s + width, e + width
                width += check_frame_length("KV_LEN", width + mask.KV_LEN) - width
            starts.append(s)
            ends.append(e)
        along = 3 if dim == "q" else 2
        KV_LEN = first.KV_LEN if dim == "q" else width
        return RowIntervals(torch.cat(starts, along), torch.cat(ends, along), KV_LEN).canonical()

    def select(self, batch_index: Tensor) -> "RowIntervals":
        """Pick masks of the batch; K stays as it is, so that static buffers keep their shape.

        Args:
            batch_index: Which ones, integers ``[n]``.

        Returns:
            ``[n, H, K, Q_LEN]`` spans, or ``self`` where B is 1: that mask holds for every index.
        """
        if self.B == 1:
            return self
        index = batch_index.to(self.device)
        return RowIntervals._trusted(
            self.starts.index_select(0, index), self.ends.index_select(0, index), self.KV_LEN
        )

    def to(self, device: torch.device | str) -> "RowIntervals":
        """The same spans on another device."""
        return RowIntervals._trusted(
            self.starts.to(device), self.ends.to(device), self.KV_LEN, self._canonical
        )

    def dense(self) -> Tensor:
        """The mask as one bool a cell, ``[B, H, Q_LEN, KV_LEN]``; for small masks."""
        keys = torch.arange(self.KV_LEN, dtype=torch.int32, device=self.device)
        return visible_cells(self.starts, self.ends, keys)

    def row_counts(self) -> Tensor:
        """Visible keys of each row, int32 ``[B, H, Q_LEN]``."""
        spans = self.disjoint()
        counts = (spans.ends - spans.starts).clamp_(min=0).sum(2, dtype=torch.int32)
        # Joining spans may have shown equal slices, and then there is one of them.
        return counts.expand(self.B, self.H, -1).contiguous()

    def equals(self, other: "RowIntervals") -> bool:
        """Whether both let the same cells be seen, in frames of the same lengths."""
        if (self.Q_LEN, self.KV_LEN) != (other.Q_LEN, other.KV_LEN):
            return False
        a, b = self.canonical(), other.canonical()
        return torch.equal(a.starts, b.starts) and torch.equal(a.ends, b.ends)
