"""Samples into steps: which samples every step trains on, in which bucket, on which rank.

The plan is a pure function of (lengths, buckets, global batch, seed) and the step's number, so any
device count and any resume sees the same samples in the same order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from runtime.data.draws import permutation

ORDER_STREAM = 3
STEP_STREAM = 4
NO_ROW = -1


@dataclass(frozen=True)
class Step:
    """One step of all ranks: the same bucket everywhere, so that every rank steps alike."""

    number: int
    epoch: int
    bucket: int
    """Its length, in tokens."""
    rows: tuple[int, ...]
    """Global batch; ``NO_ROW`` fills the last step of a bucket and carries no weight."""
    last: bool = True
    """Whether the step ends with these rows, see ``parts``."""

    def parts(self, count: int) -> Iterator["Step"]:
        """The step's micro-batches, in order: of each its share of the rows, the last one marked.

        Args:
            count: How many; it divides the global batch.
        """
        share = len(self.rows) // count
        for part in range(count):
            rows = self.rows[part * share : (part + 1) * share]
            yield replace(self, rows=rows, last=part == count - 1)

    def of_rank(self, rank: int, size: int) -> tuple[int, ...]:
        """Rows of one rank of ``size``."""
        share = len(self.rows) // size
        return self.rows[rank * share : (rank + 1) * share]


class StepPlan:
    """All steps of a run, in order, by number.

    Args:
        lengths: Tokens of each row, int ``[n]``.
        buckets: Length of the bucket of each row, int ``[n]``.
        global_batch: Rows of one step.
        seed: Keys the order.
    """

    def __init__(
        self, lengths: NDArray[np.int64], buckets: NDArray[np.int64], global_batch: int, seed: int
    ) -> None:
        self.lengths = lengths
        self.global_batch = global_batch
        self.seed = seed
        self._buckets = {int(b): np.flatnonzero(buckets == b) for b in np.unique(buckets)}
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)
        self.steps_per_epoch = sum(-(-len(ids) // global_batch) for ids in self._buckets.values())

    @property
    def buckets(self) -> tuple[int, ...]:
        """Lengths of the buckets in use, ascending."""
        return tuple(self._buckets)

    def __getitem__(self, number: int) -> Step:
        """Step ``number``, counted from 0 over all epochs."""
        epoch, index = divmod(number, self.steps_per_epoch)
        bucket, rows = self._epoch(epoch)[index]
        return Step(number, epoch, bucket, rows)

    def _draw_epoch(self, epoch: int) -> list[tuple[int, tuple[int, ...]]]:
        steps: list[tuple[int, tuple[int, ...]]] = []
        for bucket, ids in self._buckets.items():
            order = permutation(len(ids), key=(self.seed, ORDER_STREAM), counter=(epoch, bucket, 0))
            shuffled = [int(row) for row in ids[order]]
            shuffled += [NO_ROW] * (-len(ids) % self.global_batch)
            steps += [
                (bucket, tuple(shuffled[start : start + self.global_batch]))
                for start in range(0, len(shuffled), self.global_batch)
            ]
        order = permutation(len(steps), key=(self.seed, STEP_STREAM), counter=(epoch, 0, 0))
        return [steps[index] for index in order]
