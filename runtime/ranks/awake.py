"""Waiting that counts only time in which this process ran.

A process that is stopped (Ctrl-Z, a paused container, a suspended machine, a debugger) has waited
for nobody: what it hears of on waking is not late.
"""

import time
from collections.abc import Callable

LOOK_S = 0.05
"""Between two looks at what is waited for."""


class AwakeTime:
    """Seconds, of which each look adds no more than ``longest_s``.

    Args:
        longest_s: What lies between two looks of a process that runs, with room for a busy machine.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._seconds = 0.0
        self._looked = time.monotonic()

    def look(self) -> float:
        """Seconds so far."""
        now = time.monotonic()
        self._seconds += min(now - self._looked, self._longest_s)
        self._looked = now
        return self._seconds


def wait_until(done: Callable[[], bool], limit_s: float, *, look_s: float = LOOK_S) -> bool:
    """Look again and again until ``done()``; gives whether it was within the limit."""
    waited = AwakeTime(10 * look_s)
    while not done():
        if waited.look() > limit_s:
            return False
        time.sleep(look_s)
    return True
