"""Lengths -> the few static shapes that a run compiles: buckets, and the plan that picks them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from maskgen.checks import MAX_LENGTH
from maskgen.errors import MaskgenError, MaskSpecError

MAX_CANDIDATES = 16384
"""Most distinct rounded lengths that the planner takes; its time grows with their square."""


class BucketOverflowError(MaskgenError, ValueError):
    """A length is longer than the largest bucket.

    Attributes:
        length: The length asked for, in tokens.
        largest: The largest bucket there is, in tokens.
    """

    exit_code = 1

    def __init__(self, length: int, largest: int) -> None:
        super().__init__(
            f"a length must fit a bucket: found {length} tokens, the largest bucket holds "
            f"{largest}; cut or skip the sample, or add a larger bucket to [masks] and build again"
        )
        self.length = length
        self.largest = largest


@dataclass(frozen=True)
class Bucket:
    """One static shape: everything that decides which kernel is compiled and captured."""

    Q_LEN: int
    """Query rows, in tokens."""
    KV_LEN: int
    """KV columns, in tokens."""
    BLOCK_SIZE: tuple[int, int]
    """Tile sizes (Q, KV), in tokens."""
    K: int
    """Spans a row in the static buffers."""

    @property
    def context(self) -> int:
        """Context tokens before the draft blocks, where KV is context then queries (DFlash)."""
        return self.KV_LEN - self.Q_LEN

    @property
    def num_blocks(self) -> tuple[int, int]:
        """Tile rows and tile columns, the ragged last ones included."""
        return (
            math.ceil(self.Q_LEN / self.BLOCK_SIZE[0]),
            math.ceil(self.KV_LEN / self.BLOCK_SIZE[1]),
        )


@dataclass(frozen=True, kw_only=True)
class BucketWaste:
    """What one bucket of a plan costs for a set of lengths."""

    context: int
    """The bucket's length, in tokens."""
    samples: int
    """Lengths that fall in this bucket."""
    tokens: int
    """Real tokens in them."""

    @property
    def padded_tokens(self) -> int:
        """Tokens computed, padding included."""
        return self.context * self.samples

    @property
    def share(self) -> float:
        """Padding over computed tokens, 0 to 1; 0 for a bucket that no length uses."""
        padded = self.padded_tokens
        return (padded - self.tokens) / padded if padded else 0.0


@dataclass(frozen=True)
class BucketPlan:
    """The bucket lengths of a run, ascending."""

    contexts: tuple[int, ...]
    """Bucket lengths, in tokens; sorted and made unique."""

    def __post_init__(self) -> None:
        ordered = tuple(sorted(set(self.contexts)))
        if not ordered or ordered[0] < 1:
            raise MaskSpecError("contexts", list(self.contexts), "must be lengths of at least 1")
        object.__setattr__(self, "contexts", ordered)

    def buckets_of(self, lengths: Iterable[int]) -> np.ndarray:
        """Return the smallest bucket that holds each sample, int64 ``[n]``, for lengths in tokens.

        Raises:
            MaskSpecError: There is no length, or one is no integer from 1 to 2**30.
            BucketOverflowError: A length is longer than the largest bucket; names the longest.
        """
        values = _checked_lengths(lengths)
        if (longest := int(values.max())) > self.contexts[-1]:
            raise BucketOverflowError(longest, self.contexts[-1])
        return np.asarray(self.contexts)[np.searchsorted(self.contexts, values)]

    def waste(self, lengths: Iterable[int]) -> list[BucketWaste]:
        """Count padding per bucket, in the plan's order, for ``lengths`` in tokens.

        Raises:
            MaskSpecError: There is no length, or one is no integer from 1 to 2**30.
            BucketOverflowError: A length is longer than the largest bucket.
        """
        values = _checked_lengths(lengths)
        index = np.searchsorted(self.contexts, self.buckets_of(values))
        samples = np.bincount(index, minlength=len(self.contexts))
        tokens = np.zeros(len(self.contexts), np.int64)
        np.add.at(tokens, index, values)
        return [
            BucketWaste(context=context, samples=int(count), tokens=int(total))
            for context, count, total in zip(self.contexts, samples, tokens, strict=True)
        ]


def plan_buckets(lengths: Iterable[int], max_buckets: int, multiple: int) -> BucketPlan:
    """Choose at most ``max_buckets`` lengths with the least padding, by dynamic programming.

    With the rounded lengths sorted as ``v[0] < v[1] < ...`` and ``n[j]`` lengths at or below
    ``v[j]``, a bucket ``v[j]`` that covers all above ``v[i]`` computes ``v[j] * (n[j] - n[i])``
    tokens; the plan minimises the sum.

    Args:
        lengths: Sample lengths, in tokens.
        max_buckets: Most buckets to use; each one costs a compile and a capture.
        multiple: Every bucket is a multiple of this, usually BLOCK_SIZE.

    Raises:
        MaskSpecError: An argument is no integer from 1 to 2**30, there is no length, or there are
            too many distinct ones.
    """
    if max_buckets < 1:
        raise MaskSpecError("max_buckets", max_buckets, "must be at least 1")
    if not 1 <= multiple <= MAX_LENGTH:
        raise MaskSpecError("multiple", multiple, "must be 1 to 2**30")
    values = _checked_lengths(lengths)
    candidates, counts = np.unique(-(-values // multiple) * multiple, return_counts=True)
    if len(candidates) > MAX_CANDIDATES:
        raise MaskSpecError(
            "multiple", multiple, f"must leave at most {MAX_CANDIDATES} distinct rounded lengths, "
            f"this one leaves {len(candidates)}; raise it"
        )  # fmt: skip
    chosen = _least_padding(candidates, np.cumsum(counts), min(max_buckets, len(candidates)))
    return BucketPlan(tuple(int(candidates[j]) for j in chosen))


def _least_padding(sizes: np.ndarray, covered: np.ndarray, max_buckets: int) -> Sequence[int]:
    """Return the indices of the chosen sizes; ``covered[j]`` counts lengths up to ``sizes[j]``."""
    cost = sizes * covered
    choices: list[np.ndarray] = []
    for _ in range(max_buckets - 1):
        better, choice = cost.copy(), np.full(len(sizes), -1)
        for j in range(1, len(sizes)):
            totals = cost[:j] + sizes[j] * (covered[j] - covered[:j])
            i = int(totals.argmin())
            if totals[i] < better[j]:
                better[j], choice[j] = totals[i], i
        choices.append(choice)
        cost = better
    chosen = [len(sizes) - 1]
    for choice in reversed(choices):
        previous = int(choice[chosen[-1]])
        # -1 says that this many buckets do not beat one fewer at this size.
        if previous >= 0:
            chosen.append(previous)
    return chosen[::-1]


def _checked_lengths(lengths: Iterable[int]) -> np.ndarray:
    """Return the lengths as int64; what int64 would round or wrap is refused before."""
    values = lengths if isinstance(lengths, np.ndarray) else np.asarray(list(lengths))
    if not len(values):
        raise MaskSpecError("lengths", [], "must hold at least one length")
    # Floats and objects are also what NumPy makes of integers past 64 bits.
    whole = values.dtype.kind in "iu"
    for value in (values.min(), values.max()) if whole else values[:1].tolist():
        if not (whole and 1 <= value <= MAX_LENGTH):
            raise MaskSpecError(
                "lengths",
                int(value) if whole else value,
                "must be integers, 1 to 2**30 tokens each",
            )
    return values.astype(np.int64)
