"""One thread, one device: takes filled slots, replays steps, reports; and what keeps ranks in step.

The functions here know nothing of what a step computes.
"""

import signal
import threading
from collections.abc import Callable
from typing import Protocol

import torch

from runtime.batches import Step
from runtime.buffers import HostSlot
from runtime.devices import enter_thread
from runtime.graph import GraphPool


class Stepper(Protocol):
    """What a worker drives: one device's static steps."""

    device: torch.device
    threads: int
    pool: GraphPool

    def run(self, step: Step, slot: HostSlot) -> None:
        """Enqueue the copies out of the slot and the step."""
        ...


class Source(Protocol):
    """Where a worker takes its inputs from."""

    def get(self) -> tuple[Step, HostSlot]:
        """Block until the next step's slot is filled."""
        ...


class Coordinator:
    """Lets every rank take the same number of steps, whenever a stop is asked for.

    A stop fixes the last step as the furthest that any rank has begun; ranks behind it go on up to
    there, so no rank waits for ever in a collective.
    """

    def __init__(self, last_step: int) -> None:
        self._lock = threading.Lock()
        self._limit = last_step
        self._begun = -1
        self._stopping = False
        self.signal: signal.Signals | None = None
        self.error: BaseException | None = None
        self.failed = threading.Event()

    def may_begin(self, step: int) -> bool:
        """Whether a rank may begin this step, counted from 0."""
        with self._lock:
            if step >= self._limit or self.failed.is_set():
                return False
            if step > self._begun:
                if self._stopping:
                    return False
                self._begun = step
            return True

    def stop(self, cause: signal.Signals) -> None:
        """End the run after the step that the furthest rank is in."""
        with self._lock:
            self._stopping = True
            self.signal = self.signal or cause

    def fail(self, error: BaseException) -> None:
        """End the run now; the first error is kept."""
        with self._lock:
            if self.error is None:
                self.error = error
        self.failed.set()


class Worker(threading.Thread):
    """Runs one replica's steps.

    Args:
        rank: Names the thread.
        stepper: The device's static steps.
        source: Filled slots in the order of the plan.
        coordinator: Shared by all workers.
        first_step: Where to begin.
        after_step: Called with (finished steps, step) in this thread; rank 0 logs and saves there.
    """

    def __init__(
        self,
        *,
        rank: int,
        stepper: Stepper,
        source: Source,
        coordinator: Coordinator,
        first_step: int,
        after_step: Callable[[int, Step], None] | None = None,
    ) -> None:
        super().__init__(name=f"worker-{rank} ({stepper.device})", daemon=True)
        self.stepper = stepper
        self.source = source
        self.coordinator = coordinator
        self.finished = first_step
        self.after_step = after_step

    def run(self) -> None:
        """Step until the last step, a stop or an error."""
        try:
            self._run()
        except BaseException as error:
            self.coordinator.fail(error)

    def _run(self) -> None:
        enter_thread(self.stepper.device, self.stepper.threads)
        with self.stepper.pool.activated():
            while self.coordinator.may_begin(self.finished):
                step, slot = self.source.get()
                self.stepper.run(step, slot)
                self.finished += 1
                if self.after_step is not None:
                    self.after_step(self.finished, step)
        self.stepper.pool.synchronize()
