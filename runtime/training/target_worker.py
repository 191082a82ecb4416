"""Frozen targets on devices of their own: one thread each turns token ids into features.

feeder -> lane -> target -> lane -> worker: the features travel by a copy between devices, straight
into the slot that carries the rest of the sample.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from runtime.data.plan import Step
from runtime.ranks.devices import enter_thread
from runtime.static.buffers import InputSlot
from runtime.static.channels import Lane
from runtime.static.graph import GraphPool
from runtime.static.step_set import StepSet

MEMORY_HINT = "raise train.accumulate, or lower train.global_batch or the largest bucket in [masks]"


@dataclass(frozen=True)
class RemoteTarget:
    """A target whose weights lie on a device of its own."""

    device: torch.device
    features: Callable[[Tensor], Tensor]
    """Input ids int64 ``[B, S]`` on ``device`` to features ``[B, S, K*H]``, with a last hidden
    state ``[B, S, (K+1)*H]``; capturable."""


class TargetReplica:
    """A target's static steps, one a bucket.

    Args:
        target: Where and what.
        shapes: Bucket length -> ``(B, S)``.
        threads: CPU threads.
    """

    def __init__(
        self, target: RemoteTarget, shapes: Mapping[int, tuple[int, int]], threads: int
    ) -> None:
        device = self.device = target.device
        self.threads = threads
        self.pool = GraphPool(device)
        self._features = target.features
        self._input_ids = {
            length: torch.zeros(shape, dtype=torch.int64, device=device)
            for length, shape in shapes.items()
        }
        self._output: Tensor | None = None
        steps = {
            length: (f"target {length} on {device}", partial(self._step, length))
            for length in shapes
        }
        self.steps = StepSet(steps, self.pool, memory_hint=MEMORY_HINT)

    def prepare(self, report: Callable[[str], None]) -> None:
        """Warm up and capture every bucket, largest first, on the calling thread."""
        enter_thread(self.device, self.threads)
        self.pool.wait_for_device()
        self.steps.warm_up(report)
        self.steps.capture()

    def _step(self, length: int) -> None:
        found = self._features(self._input_ids[length])
        if self._output is None:
            # Of the largest bucket, which warms up first: all others use its beginning.
            self._output = torch.empty_like(found).flatten()
        self._output[: found.numel()].copy_(found.flatten())

    def run(self, length: int, slot: InputSlot) -> None:
        """Enqueue the features of a slot's samples into the slot, on the current stream."""
        assert self._output is not None, "prepare first"
        self._input_ids[length].copy_(slot.host["input_ids"], non_blocking=True)
        self.steps.run(length)
        features = slot.staged["features"]
        slot.write("features", self._output[: features.numel()].view(features.shape))

    def teardown(self) -> None:
        """Free the graphs."""
        self.steps.teardown()


class TargetWorker(threading.Thread):
    """Runs one target over its share of all ranks' steps.

    Args:
        index: Which of the targets.
        targets: How many there are.
        replica: The device's static steps.
        inlets: Of each rank: filled slots.
        outlets: Of each rank: slots with features.
        items: Of each rank: slots of the run.
    """

    def __init__(
        self,
        *,
        index: int,
        targets: int,
        replica: TargetReplica,
        inlets: Sequence[Lane[tuple[Step, InputSlot]]],
        outlets: Sequence[Lane[tuple[Step, InputSlot]]],
        items: int,
    ) -> None:
        super().__init__(name=f"target-{index} ({replica.device})", daemon=True)
        self.replica = replica
        self.served = 0
        """Samples turned into features; a last batch that is not full counts whole."""
        self.seconds = 0.0
        """From the thread's start to the last item served."""
        self._ends = [
            (rank, inlets[rank].channels[index], outlets[rank].channels[index])
            for rank in range(len(inlets))
        ]
        self._numbers = range(index, items * len(inlets), targets)

    def run(self) -> None:
        """Serve until the last step, a stop, or an error, which every worker then raises."""
        try:
            self._run()
        except BaseException as error:
            for _, _, outlet in self._ends:
                outlet.fail(error)

    def _run(self) -> None:
        enter_thread(self.replica.device, self.replica.threads)
        began = time.monotonic()
        with self.replica.pool.activated():
            for number in self._numbers:
                _, inlet, outlet = self._ends[number % len(self._ends)]
                step, slot = inlet.get()
                self.replica.run(step.bucket, slot)
                if not outlet.put((step, slot)):
                    return
                self.served += len(slot.host["input_ids"])
                self.seconds = time.monotonic() - began
        self.replica.pool.synchronize()

    @property
    def starved_s(self) -> float:
        """Seconds without a slot to fill."""
        return sum(inlet.get_waited_s for _, inlet, _ in self._ends)

    @property
    def blocked_s(self) -> float:
        """Seconds before a worker that had not yet taken what was there."""
        return sum(outlet.put_waited_s for _, _, outlet in self._ends)
