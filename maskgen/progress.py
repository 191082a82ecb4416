"""What a command says while it works, on standard error: lines, and how far long work has come.

Of long work there is a bar on a terminal, elsewhere about ten lines. Where nothing can be shown,
work goes on.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

LINE_INTERVAL_S = 5.0
"""Shortest time between two lines of one work; its last one is always written."""

OnItem = Callable[[str, int, int], None]
"""Called after each item with its name, the number done and the number in all."""


def say(line: str) -> None:
    """Write a line at once; where that fails, work goes on."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201


class Progress:
    """Counts steps of work; a context manager.

    A line says what was done last where that has a name, ``build: 3/64 causal/q1024-kv1024``, and
    else the time, ``evaluate: 30 % (12 s)``.

    Args:
        label: What is being done.
        total: Steps in all.
        unit: Of a step, for a bar.
        leave: Whether a bar stays when the work is done.
    """

    def __init__(self, label: str, total: int, *, unit: str = "it", leave: bool = True) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.leave = leave
        self.done = 0
        self._tenths = 0
        self._began = self._written = time.perf_counter()
        self._bar: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=self.total,
                desc=self.label,
                unit=self.unit,
                leave=self.leave,
                file=sys.stderr,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, steps: int = 1, name: str = "") -> None:
        """Count ``steps`` more.

        Args:
            steps: How many.
            name: What was done, where it has a name.
        """
        self.done += steps
        if self._bar is not None:
            self._bar.total = self.total
            if name:
                self._bar.set_postfix_str(name, refresh=False)
            with contextlib.suppress(OSError):
                self._bar.update(steps)
            return
        tenths, now = self.done * 10 // max(1, self.total), time.perf_counter()
        is_due = tenths > self._tenths and now - self._written >= LINE_INTERVAL_S
        if is_due or (steps and self.done >= self.total):
            self._tenths, self._written = tenths, now
            share, seconds = self.done * 100 // max(1, self.total), now - self._began
            say(
                f"{self.label}: {self.done}/{self.total} {name}"
                if name
                else f"{self.label}: {share} % ({seconds:.0f} s)"
            )


@contextlib.contextmanager
def show_progress(label: str) -> Iterator[OnItem]:
    """Yield a function that shows how far work on masks has come.

    Args:
        label: The work: ``build``.
    """
    with Progress(label, 0, unit="mask", leave=False) as shown:

        def on_item(name: str, done: int, total: int) -> None:
            shown.total = total
            shown.advance(done - shown.done, name)

        yield on_item
