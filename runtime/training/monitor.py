"""One thread a process: passes stops, saves and failures on between the processes of a run.

What is asked of any process, all do at the same step: each closes its gate, publishes the furthest
step that its ranks have begun, and opens the gate knowing the furthest of all. This is one round;
what is asked meanwhile is for the next.
"""

import contextlib
import signal
import threading
from collections import deque

from runtime.ranks.processes import POLL_S, Processes
from runtime.training.worker import Coordinator

SAVE = "save"
FINISH = "finish"


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
        self._asked: deque[str] = deque()
        self._finishing = False
        self._round = 0
        self._request: str | None = None
        self._ended = threading.Event()

    def stop(self, cause: signal.Signals) -> None:
        """End the run of all processes after the step that the furthest rank is in."""
        self._asked.append(str(int(cause)))

    def finish(self) -> None:
        """End it as ``stop`` does, of its own accord; asked again, do nothing."""
        if not self._finishing:
            self._asked.append(FINISH)
        self._finishing = True

    def save(self) -> None:
        """Let all processes save the same step, and go on."""
        self._asked.append(SAVE)

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
        if self._request is not None:
            self._agree(self._request)
            return
        key = f"asked/{self._round}"
        if self._asked and self.processes.put_first(key, self._asked[0]) == self._asked[0]:
            self._asked.popleft()
        self._request = self.processes.peek(key)
        if self._request is None:
            return
        if self._request not in (SAVE, FINISH):
            cause = signal.Signals(int(self._request))
            self.coordinator.signal = self.coordinator.signal or cause
        self.processes.publish(f"begun/{self._round}", str(self.coordinator.close()))

    def _agree(self, request: str) -> None:
        """End the round, once all have said how far they are."""
        begun = self.processes.published(f"begun/{self._round}")
        ended = self.processes.published("ended-at")
        steps = [now or at_end for now, at_end in zip(begun, ended, strict=True)]
        if None in steps:
            return
        furthest = max(int(step) for step in steps if step is not None)
        if request == SAVE:
            self.coordinator.save_after(furthest + 1)
            self.coordinator.open_until()
        else:
            self.coordinator.open_until(furthest + 1)
        self._round += 1
        self._request = None

    def end(self) -> None:
        """Stop looking; whoever asks for something later still learns how far this one came."""
        if not self.coordinator.failed.is_set():
            with contextlib.suppress(RuntimeError):
                self.processes.publish("ended-at", str(self.coordinator.close()))
        self._ended.set()
        self.join()
