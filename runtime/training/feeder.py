"""Samples into input slots: one thread beside each worker, as far ahead as there are slots."""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from runtime.data.dataset import Dataset
from runtime.data.plan import NO_SAMPLE, Step, StepPlan
from runtime.dflash.anchors import LayoutChooser, draw_anchors
from runtime.errors import SampleTooLongError
from runtime.static.buffers import InputSlot
from runtime.static.queues import Lane
from runtime.training.replica import Replica


class Feeder(threading.Thread):
    """Fills the slots of one rank in the order of the plan, and sends them on a stream of its own.

    Args:
        replica: Whose inputs are filled.
        lane: Where filled slots go.
        dataset: Samples.
        plan: All steps.
        choosers: Context -> layout chooser; empty when anchors come from the data.
        seed: Keys the draws.
        steps: First and last step, the last not included.
    """

    def __init__(
        self,
        *,
        replica: Replica,
        lane: Lane[tuple[Step, InputSlot]],
        dataset: Dataset,
        plan: StepPlan,
        choosers: Mapping[int, LayoutChooser],
        seed: int,
        steps: tuple[int, int],
    ) -> None:
        super().__init__(name=f"feeder-{replica.group.rank} ({replica.device})", daemon=True)
        self.replica = replica
        self.lane = lane
        self.dataset = dataset
        self.plan = plan
        self.choosers = choosers
        self.seed = seed
        self.steps = steps
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
        for number in range(*self.steps):
            step = self.plan[number]
            began = time.monotonic()
            slot = self.replica.free.get()
            tensors = slot.open(self.replica.fields(step.context))
            self.waited_s += time.monotonic() - began
            self.fill(tensors, step)
            slot.send()
            if not self.lane.put((step, slot)):
                return

    def stop(self) -> None:
        """Make the thread end soon."""
        self.replica.free.stop()
        self.lane.stop()

    def fill(self, tensors: dict[str, Tensor], step: Step) -> None:
        """Write one rank's share of a step into host tensors."""
        group = self.replica.group
        for row, index in enumerate(step.of_rank(group.rank, group.size)):
            for tensor in tensors.values():
                tensor[row].zero_()
            if index != NO_SAMPLE:
                self._fill_row(tensors, row, step, index)

    def _fill_row(self, tensors: dict[str, Tensor], row: int, step: Step, index: int) -> None:
        sample = self.dataset.sample(index)
        length = len(sample.input_ids)
        loss_mask = sample.loss_mask
        if length > tensors["input_ids"].shape[1]:
            raise SampleTooLongError(
                f"sample {index} has {length} tokens, and its bucket ctx{step.context} holds "
                f"{step.context}: the data were changed since the run began; prepare them again"
            )
        tensors["input_ids"][row, :length] = sample.input_ids
        tensors["loss_mask"][row, :length] = loss_mask
        if sample.features is not None and "features" in tensors:
            tensors["features"][row, :length] = sample.features
        key = {"seed": self.seed, "epoch": step.epoch, "sample": index}
        if "layout" in tensors:
            chooser = self.choosers[step.context]
            tensors["layout"][row] = chooser.choose(loss_mask.numpy(), **key)
        else:
            count = tensors["anchors"].shape[1]
            anchors, n_valid = draw_anchors(loss_mask.numpy(), count, **key)
            tensors["anchors"][row] = torch.from_numpy(anchors)
            tensors["n_valid"][row] = n_valid


@contextlib.contextmanager
def _copy_stream(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        yield
