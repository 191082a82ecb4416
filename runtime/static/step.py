"""One training step of one bucket on one device, over static tensors only, whatever it trains.

inputs -> objective: loss and sums -> gradients -> all-reduce -> AdamW -> sums added up

A step of several micro-batches is ``add`` for all but the last, and the call itself for that one.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from runtime.static.buffers import Field, StaticInputs
from runtime.static.exchange import GradientExchange

COUNTERS = ("steps", "skipped", "skips_in_a_row", "worst_skips_in_a_row", "grad_norm")
"""Kept on the device after the sums: steps begun, steps without update, and the last norm."""
WEIGHT = 1
"""Which of an objective's sums the gradients are divided by; a step where it is 0 has nothing to
learn and changes nothing."""


class Objective(Protocol):
    """The loss of one bucket: static inputs in, a number to minimise and sums to add up out."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The static inputs, by name."""
        ...

    def __call__(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the loss; every tensor that outlives the call was made before it.

        Args:
            inputs: One tensor a field.

        Returns:
            The loss, summed and not averaged, with its graph; and float32 ``[n]`` to be summed
            over ranks and steps, of which the first is the loss and the second its weight.
        """
        ...


class TrainStep:
    """The step of one bucket.

    Args:
        objective: The loss.
        exchange: Takes the gradients; shared by all buckets of the device.
        totals: float32 ``[sums + len(COUNTERS)]``; what is added up between two reads.
        adds: Whether a step may have several micro-batches. Its gradients and sums are then added
            to what lies in the flat tensor, which is 0 between two steps.
    """

    def __init__(
        self,
        objective: Objective,
        exchange: GradientExchange,
        totals: Tensor,
        *,
        adds: bool = False,
    ) -> None:
        self.objective = objective
        self.exchange = exchange
        self.optimizer = exchange.optimizer
        self.totals = totals
        self.adds = adds
        self.inputs = StaticInputs(objective.fields, totals.device)

    def __call__(self) -> None:
        """Run the step, or its last micro-batch; every input and output is a static tensor."""
        loss, sums = self.objective(self.inputs.tensors)
        self.exchange.backward(loss, adds=self.adds)
        with torch.no_grad():
            if self.adds:
                self.optimizer.sums.add_(sums)
            else:
                self.optimizer.sums.copy_(sums)
            self.exchange.finish()
            self._update()
            if self.adds:
                self.optimizer.reduced.zero_()

    def add(self) -> None:
        """Run a micro-batch that others of the step follow: nothing is reduced or updated."""
        loss, sums = self.objective(self.inputs.tensors)
        self.exchange.backward(loss, adds=True, ends=False)
        with torch.no_grad():
            self.optimizer.sums.add_(sums)

    def _update(self) -> None:
        num_sums = len(self.optimizer.sums)
        sums, counters = self.totals[:num_sums], self.totals[num_sums:]
        steps, skips, in_a_row, worst, norm = counters.unbind()
        weight = self.optimizer.sums[WEIGHT]
        skipped = self.optimizer.step(weight, steps)
        # A step without a supervised token is skipped too, but it is no fault.
        faulty = skipped * (weight != 0)
        sums.add_(torch.where(faulty > 0, 0.0, self.optimizer.sums))
        steps.add_(1)
        skips.add_(faulty)
        in_a_row.copy_((in_a_row + 1) * faulty)
        worst.copy_(torch.maximum(worst, in_a_row))
        norm.copy_(self.optimizer.grad_norm)
