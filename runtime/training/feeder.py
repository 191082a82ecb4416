"""Samples into input slots: one thread beside each worker, as far ahead as there are slots."""

import contextlib
import threading
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from runtime.data.plan import NO_ROW, Step, StepPlan
from runtime.static.buffers import InputSlot
from runtime.static.channels import Lane
from runtime.training.method import Trainee
from runtime.training.replica import Replica


class Feeder(threading.Thread):
    """Fills the slots of one rank in the order of the plan, and sends them on a stream of its own.

    Args:
        replica: Whose inputs are filled.
        lane: Where filled slots go.
        trainee: Fills the rows.
        plan: All steps.
        steps: First and last step, the last not included.
        parts: Micro-batches of each, a slot for each.
    """

    def __init__(
        self,
        *,
        replica: Replica,
        lane: Lane[tuple[Step, InputSlot]],
        trainee: Trainee,
        plan: StepPlan,
        steps: tuple[int, int],
        parts: int,
    ) -> None:
        super().__init__(name=f"feeder-{replica.group.rank} ({replica.device})", daemon=True)
        self.replica = replica
        self.lane = lane
        self.plan = plan
        self.trainee = trainee
        self.steps = steps
        self.parts = parts
        self.waited_s = 0.0
        """Seconds without a slot to fill: the steps are the slower end."""

    def run(self) -> None:
        """Fill slots until the last step, a stop, or an error, which the receiver then raises."""
        try:
            with _copy_stream(self.replica.device):
                self._run()
        except BaseException as error:
            self.lane.fail(error)

    def _run(self) -> None:
        for step in self._micro_batches():
            began = time.monotonic()
            slot = self.replica.free.get()
            tensors = slot.open(self.replica.fields(step.bucket))
            self.waited_s += time.monotonic() - began
            self.fill(tensors, step)
            slot.send()
            if not self.lane.put((step, slot)):
                return

    def _micro_batches(self) -> Iterator[Step]:
        for number in range(*self.steps):
            yield from self.plan[number].parts(self.parts)

    def stop(self) -> None:
        """Make the thread end soon."""
        self.replica.free.stop()
        self.lane.stop()

    def fill(self, tensors: dict[str, Tensor], step: Step) -> None:
        """Write one rank's share of a micro-batch into host tensors."""
        group = self.replica.group
        for row, index in enumerate(step.of_rank(group.rank, group.size)):
            for tensor in tensors.values():
                tensor[row].zero_()
            if index != NO_ROW:
                self.trainee.fill(tensors, row, index, epoch=step.epoch)


@contextlib.contextmanager
def _copy_stream(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield
