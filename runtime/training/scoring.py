"""The held-out score of a module on one device, through graphs of its own."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn

from runtime.static.buffers import input_slots
from runtime.static.graph import GraphPool
from runtime.static.score import ScoreStep
from runtime.static.step_set import StepSet
from runtime.training.heldout import HeldOut


class Scoring:
    """Scores a module with the weights that it has; it and its optimizer stay as they are.

    Args:
        heldout: Rows and score.
        module: Of the replica.
        pool: Of the replica; steps and scores run on one stream, one after another.
        batch: Rows of a step.
        index: Which of the process's devices.
        memory_hint: What to lower where memory runs out.
    """

    def __init__(
        self,
        heldout: HeldOut,
        module: nn.Module,
        pool: GraphPool,
        *,
        batch: int,
        index: int,
        memory_hint: str,
    ) -> None:
        self.heldout = heldout
        self.pool = pool
        self._batch = batch
        self._rows: dict[int, list[int]] = {}
        for number, row in enumerate(heldout.rows):
            self._rows.setdefault(row.bucket, []).append(number)
        self._score_steps = {
            length: ScoreStep(heldout.scorer(module, length, batch, index), batch, pool.device)
            for length in sorted(self._rows, reverse=True)
        }
        steps = {
            length: (f"held-out {heldout.name} of {length} tokens on {pool.device}", step)
            for length, step in self._score_steps.items()
        }
        self.steps = StepSet(steps, pool, memory_hint=memory_hint)
        fields = (step.inputs.fields for step in self._score_steps.values())
        # Taken and handed back on one thread and one stream: more would never be in use at once.
        self._free = input_slots(fields, pool.device, 1)

    def warm_up(self, report: Callable[[str], None]) -> None:
        """Run every step until compiling is settled, largest first, on the calling thread."""
        self.steps.warm_up(report)

    def capture(self) -> None:
        """Record every step as a graph, on the calling thread."""
        self.steps.capture()

    def sums(self) -> NDArray[np.float64]:
        """Score all rows; waits for the stream.

        Returns:
            ``[samples, 2]``, sum and weight of each sample, in the order of their numbers.
        """
        samples = sorted({row.sample for row in self.heldout.rows})
        place = {sample: index for index, sample in enumerate(samples)}
        sums = np.zeros((len(samples), 2))
        with self.pool.activated():
            for length, numbers in self._batches():
                found = self._run(length, numbers)
                for number, row in zip(numbers, found, strict=False):
                    sums[place[self.heldout.rows[number].sample]] += row
        return sums

    def _batches(self) -> Iterator[tuple[int, Sequence[int]]]:
        for length, numbers in self._rows.items():
            for start in range(0, len(numbers), self._batch):
                yield length, numbers[start : start + self._batch]

    def _run(self, length: int, numbers: Sequence[int]) -> list[list[float]]:
        step = self._score_steps[length]
        slot = self._free.get()
        tensors = slot.open(step.inputs.fields)
        for tensor in tensors.values():
            tensor.zero_()
        for row, number in enumerate(numbers):
            self.heldout.fill(tensors, row, number)
        slot.send()
        step.inputs.take(slot)
        self.steps.run(length)
        found: list[list[float]] = step.found.tolist()
        return found

    def teardown(self) -> None:
        """Free the graphs."""
        self.steps.teardown()
