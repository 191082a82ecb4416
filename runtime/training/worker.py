"""One thread, one device: takes filled slots, replays steps, reports; and what keeps ranks in step.

The functions here know nothing of what a step computes.
"""

import signal
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch

from runtime.data.plan import Step
from runtime.ranks.devices import enter_thread
from runtime.static.buffers import InputSlot
from runtime.static.graph import GraphPool


class Stepper(Protocol):
    """What a worker drives: one device's static steps."""

    device: torch.device
    threads: int
    pool: GraphPool

    def run(self, step: Step, slot: InputSlot) -> None:
        """Enqueue the copies out of the slot, and the step or a micro-batch of it."""
        ...


class Source(Protocol):
    """Where a worker takes its inputs from."""

    def get(self) -> tuple[Step, InputSlot]:
        """Block until the next slot is filled, of a step or of a micro-batch."""
        ...

    def stop(self) -> None:
        """End what waits here."""
        ...


class Coordinator:
    """Lets every rank take the same number of steps, whenever a stop is asked for.

    A stop fixes the last step as the furthest that any rank has begun; ranks behind it go on up to
    there, so no rank waits for ever in a collective. Where other processes take part, the gate is
    closed until they have said how far they are. So it is with a save that is asked for.
    """

    def __init__(self, last_step: int, first_step: int = 0) -> None:
        # Re-entrant, since a signal may come while the main thread holds it.
        self._changed = threading.Condition(threading.RLock())
        self._limit = last_step
        self._begun = first_step - 1
        self._open = True
        self._saves: set[int] = set()
        self.signal: signal.Signals | None = None
        self.error: BaseException | None = None
        self.failed = threading.Event()

    def may_begin(self, step: int) -> bool:
        """Whether a rank may begin this step, counted from 0; waits before a closed gate."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._open or step <= self._begun or self.failed.is_set()
            )
            if step >= self._limit:
                return False
            self._begun = max(self._begun, step)
            return True

    def stop(self, cause: signal.Signals) -> None:
        """End the run after the step that the furthest rank of this process is in."""
        with self._changed:
            self.signal = self.signal or cause
            self.finish()

    def finish(self) -> None:
        """End the run as ``stop`` does, of its own accord."""
        with self._changed:
            self.open_until(self.close() + 1)

    def save(self) -> None:
        """Let the ranks of this process save after the next step that none of them has begun."""
        with self._changed:
            self.save_after(self._begun + 1)

    def save_after(self, step: int) -> None:
        """Let the ranks save what they have after this step, which none has begun."""
        with self._changed:
            self._saves.add(step + 1)

    def saves(self, finished: int) -> bool:
        """Whether a save was asked for after so many steps."""
        return finished in self._saves

    def close(self) -> int:
        """Let no rank begin a step that none has begun; gives the furthest begun."""
        with self._changed:
            self._open = False
            return self._begun

    def open_until(self, limit: int | None = None) -> None:
        """Let the ranks go on, and end before step ``limit`` if there is one."""
        with self._changed:
            if limit is not None:
                self._limit = min(self._limit, limit)
            self._open = True
            self._changed.notify_all()

    def fail(self, error: BaseException, finished: int = 0) -> None:
        """End the run now; the first error is kept.

        Args:
            error: What ended a thread.
            finished: Steps of the rank that failed. Ranks behind it go on up to there, so that
                its state is that of a step which all have finished.
        """
        with self._changed:
            if self.error is None:
                self.error = error
                self._limit = min(self._limit, finished)
            self.failed.set()
            self._changed.notify_all()


class Worker(threading.Thread):
    """Runs one replica's steps.

    Args:
        rank: Names the thread.
        stepper: The device's static steps.
        source: Filled slots in the order of the plan.
        coordinator: Shared by all workers.
        first_step: Where to begin.
        after_step: Called with (finished steps, step) in this thread; rank 0 logs and saves there.
        at_end: Called with the finished steps in this thread, unless the run failed.
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
        at_end: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(name=f"worker-{rank} ({stepper.device})", daemon=True)
        self.stepper = stepper
        self.source = source
        self.coordinator = coordinator
        self.finished = first_step
        self.error: BaseException | None = None
        """What ended it, if an error did."""
        self.host_s = array("d")
        """Seconds spent on enqueuing each step: copies and replays."""
        self.after_step = after_step
        self.at_end = at_end

    def run(self) -> None:
        """Step until the last step, a stop or an error."""
        try:
            self._run()
        except BaseException as error:
            self.error = error
            self.coordinator.fail(error, self.finished)

    def _run(self) -> None:
        enter_thread(self.stepper.device, self.stepper.threads)
        with self.stepper.pool.activated():
            while self.coordinator.may_begin(self.finished):
                step = self._step()
                self.finished += 1
                if self.after_step is not None:
                    self.after_step(self.finished, step)
            if self.at_end is not None and not self.coordinator.failed.is_set():
                self.at_end(self.finished)
        self.stepper.pool.synchronize()

    def _step(self) -> Step:
        """Enqueue a whole step, micro-batch by micro-batch."""
        spent = 0.0
        rows: tuple[int, ...] = ()
        while True:
            part, slot = self.source.get()
            began = time.perf_counter()
            self.stepper.run(part, slot)
            spent += time.perf_counter() - began
            rows += part.rows
            if part.last:
                self.host_s.append(spent)
                return replace(part, rows=rows)
