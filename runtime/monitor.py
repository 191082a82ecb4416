"""One thread a process: passes stops and failures on between the processes of a run.

A stop asked of any process ends all after the same step: each closes its gate, publishes the
furthest step that its ranks have begun, and opens the gate up to the furthest of all.
"""

import contextlib
import signal
import threading
import time

from runtime.errors import WorkerError
from runtime.processes import POLL_S, Processes
from runtime.worker import Coordinator

AGREE_S = 10.0
"""How long the others may take to say how far they are."""

SILENCE_S = 60.0
"""How long a process may give no sign of life. No launcher need tell of one that died on another
host, and a collective within a graph has no time limit."""


class Monitor(threading.Thread):
    """Keeps the coordinators of several processes in step.

    Args:
        processes: All processes.
        coordinator: Of this process's ranks.
    """

    def __init__(self, processes: Processes, coordinator: Coordinator) -> None:
        super().__init__(name="monitor", daemon=True)
        self.processes = processes
        self.coordinator = coordinator
        self._cause: signal.Signals | None = None
        self._closed_at: float | None = None
        self._ended = threading.Event()
        self._beats = 0
        self._seen: str | None = None
        self._seen_at = time.monotonic()

    def stop(self, cause: signal.Signals) -> None:
        """End the run of all processes after the step that the furthest rank is in."""
        self._cause = self._cause or cause

    def run(self) -> None:
        """Look into the store until the run ends."""
        try:
            while not self._ended.wait(POLL_S) and not self.coordinator.failed.is_set():
                self._poll()
        except Exception as error:
            self.coordinator.fail(error)

    def _poll(self) -> None:
        failure = self.processes.failure()
        if failure is not None:
            raise failure
        self._watch_next()
        if self._cause is not None:
            self.processes.put_first("stop", str(int(self._cause)))
        if self._closed_at is None:
            cause = self.processes.peek("stop")
            if cause is not None:
                self.coordinator.signal = signal.Signals(int(cause))
                self.processes.publish("begun", str(self.coordinator.close()))
                self._closed_at = time.monotonic()
        elif not self.coordinator.is_open:
            self._agree(time.monotonic() - self._closed_at)

    def _watch_next(self) -> None:
        """Give a sign of life, and look for that of the next process, so that one watches each."""
        self._beats += 1
        self.processes.publish("beat", str(self._beats))
        following = (self.processes.rank + 1) % self.processes.size
        seen, now = self.processes.peek(f"beat/{following}"), time.monotonic()
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        elif now - self._seen_at > SILENCE_S:
            raise WorkerError(
                f"process {following} has given no sign of life for {SILENCE_S:.0f} s; it is dead "
                "or its host is unreachable"
            )

    def _agree(self, waited_s: float) -> None:
        begun = self.processes.published("begun")
        if begun is not None:
            self.coordinator.open_until(max(map(int, begun)) + 1)
        elif waited_s > AGREE_S:
            raise WorkerError(
                f"a stop was asked for, and after {AGREE_S:.0f} s not every process has said how "
                "far it is: one is dead or stuck"
            )

    def end(self) -> None:
        """Stop looking; a process that stops later still learns how far this one came."""
        if not self.coordinator.failed.is_set():
            with contextlib.suppress(RuntimeError):
                self.processes.publish("begun", str(self.coordinator.close()))
        self._ended.set()
        self.join()
