"""Samples into host slots: one thread beside each worker, a step or two ahead of it."""

import contextlib
import queue
import threading

import torch
from torch import Tensor

from runtime.anchors import LayoutChooser, draw_anchors
from runtime.batches import NO_SAMPLE, Step, StepPlan
from runtime.buffers import HostSlot
from runtime.dataset import Dataset
from runtime.errors import TrainingError
from runtime.replica import Replica

POLL_S = 0.2


class Feeder(threading.Thread):
    """Fills the host slots of one rank in the order of the plan.

    Args:
        replica: Whose static inputs are filled.
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
        dataset: Dataset,
        plan: StepPlan,
        choosers: dict[int, LayoutChooser],
        seed: int,
        steps: tuple[int, int],
    ) -> None:
        super().__init__(name=f"feeder-{replica.group.rank}", daemon=True)
        self.replica = replica
        self.dataset = dataset
        self.plan = plan
        self.choosers = choosers
        self.seed = seed
        self.steps = steps
        self._ready: queue.Queue[tuple[Step, HostSlot] | BaseException] = queue.Queue(maxsize=2)
        self._stopping = threading.Event()

    def run(self) -> None:
        """Fill slots until the last step, a stop, or an error, which the worker then raises."""
        try:
            for number in range(*self.steps):
                step = self.plan[number]
                slot = self._free_slot(step)
                if slot is None:
                    return
                slot.wait()
                self.fill(slot.tensors, step)
                if not self._offer((step, slot)):
                    return
        except BaseException as error:
            self._offer(error)

    def get(self) -> tuple[Step, HostSlot]:
        """Take the next filled slot.

        Raises:
            BaseException: What ended the feeder.
        """
        while True:
            try:
                item = self._ready.get(timeout=POLL_S)
            except queue.Empty:
                if self._stopping.is_set():
                    raise TrainingError(f"{self.name} was stopped") from None
                continue
            if isinstance(item, BaseException):
                raise item
            return item

    def stop(self) -> None:
        """Make the thread end soon."""
        self._stopping.set()

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

    def _free_slot(self, step: Step) -> HostSlot | None:
        free = self.replica.draft_steps[step.context].inputs.free
        while not self._stopping.is_set():
            with contextlib.suppress(queue.Empty):
                return free.get(timeout=POLL_S)
        return None

    def _offer(self, item: tuple[Step, HostSlot] | BaseException) -> bool:
        while not self._stopping.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(item, timeout=POLL_S)
                return True
        return False
