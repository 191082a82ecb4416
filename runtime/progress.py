"""What a command tells while it works; of long work a bar on a terminal, or about ten lines."""

import contextlib
import sys
import time
from types import TracebackType
from typing import Any, Self


def say(line: str) -> None:
    """Tell the user a line, on standard error and at once; where that fails, work goes on."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201


class Progress:
    """Counts steps of work on standard error; a context manager.

    Args:
        label: What is being done.
        total: Steps in all.
    """

    def __init__(self, label: str, total: int) -> None:
        self.label = label
        self.total = total
        self._done = 0
        self._shown = 0
        self._began = time.perf_counter()
        self._bar: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self.total, desc=self.label, file=sys.stderr)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, steps: int = 1) -> None:
        """Count ``steps`` more."""
        self._done += steps
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.update(steps)
            return
        tenth = self._done * 10 // max(1, self.total)
        if tenth > self._shown:
            self._shown = tenth
            seconds = time.perf_counter() - self._began
            say(f"{self.label}: {self._done * 100 // self.total} % ({seconds:.0f} s)")
