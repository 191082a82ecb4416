"""Signs of life: each process of a job gives one every second, and one other watches for it.

They come from a thread of its own, so a process that loads, compiles or saves for minutes has
them too. A process that is gone is known from one that was stopped, as by Ctrl-Z or a debugger.
"""

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

from runtime.errors import WorkerError, first_line
from runtime.ranks.awake import AwakeTime

BEAT_S = 1.0
"""Between two signs of life."""

SILENCE_S = 60.0
"""How long a process may give none while the one that watches it is awake. No launcher need tell of
one that died on another host, and a collective within a graph has no time limit."""

LEFT = "left"
"""The last sign of a process that is through."""


class Pulse(threading.Thread):
    """Gives signs of life, and watches for those of the next process.

    Args:
        store: Shared by all processes; this takes a client of its own.
        rank: This process.
        size: How many there are.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(name="pulse", daemon=True)
        self.lost: WorkerError | None = None
        """That the next process is dead, or that the store is out of reach."""
        self._store = store.clone()
        self._rank = rank
        self._following = (rank + 1) % size
        self._beats = 0
        self._seen = ""
        self._silent = AwakeTime(2 * BEAT_S)
        self._ended = threading.Event()

    def run(self) -> None:
        """Beat until the end."""
        try:
            self._beat()
            while not self._ended.wait(BEAT_S):
                self._beat()
                if self.lost is None:
                    self._watch()
        except RuntimeError as error:
            self.lost = WorkerError(f"lost touch with the other processes: {first_line(error)}")

    def end(self) -> None:
        """Say that this process is through, and stop."""
        self._ended.set()
        self.join()
        with contextlib.suppress(RuntimeError):
            self._store.set(f"beat/{self._rank}", LEFT)

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self._rank}", f"{self._beats} {_processes_seen()} {os.getpid()}")

    def _next_beat(self) -> str:
        key = f"beat/{self._following}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _watch(self) -> None:
        seen, silent_s = self._next_beat(), self._silent.look()
        if seen != self._seen or seen == LEFT:
            self._seen = seen
            self._silent.restart()
            return
        state = _state(seen)
        if state in STOPPED:
            self._silent.restart()
        elif state in GONE and self._next_beat() == seen:
            self.lost = WorkerError(f"process {self._following} (pid {_pid(seen)}) was killed")
        elif silent_s > SILENCE_S:
            self.lost = WorkerError(
                f"process {self._following} has given no sign of life for {SILENCE_S:.0f} s; it is "
                "dead or its host is unreachable"
            )


STOPPED = ("T", "t")
"""States in which a process waits for somebody to let it go on: a signal, a debugger."""
GONE = ("Z", "X", "none")
"""States of a process that has ended."""


def _processes_seen() -> str:
    """What other processes must share for this one to see them by number; empty without Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _pid(beat: str) -> str:
    return beat.rpartition(" ")[2]


def _state(beat: str) -> str:
    """How the operating system has the process of a beat: a letter, or empty if it is not seen."""
    _, _, where = beat.partition(" ")
    seen, _, pid = where.rpartition(" ")
    if not seen or seen != _processes_seen():
        return ""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return "none"
    except OSError:
        return ""
    # After the name, which stands in brackets and may hold any.
    return line.rpartition(")")[2].split()[0]
