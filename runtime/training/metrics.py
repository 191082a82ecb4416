"""What a run reports: one JSON line an interval, and the same on the terminal.

A number that is not finite, which JSON has no word for, is null in the file.
"""

import contextlib
import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, TextIO

from tqdm import tqdm

from cache.causes import naming
from maskgen.progress import say
from runtime.files.writing import write_file

METRICS_FILE = "metrics.jsonl"
LARGEST_STEP = 1 << 53


def interval_metrics(
    totals: Mapping[str, float],
    learned: Mapping[str, Any],
    *,
    step: int,
    lr: float,
    tokens: int,
    seconds: float,
    steps: int,
) -> dict[str, Any]:
    """Make a row of an interval.

    Args:
        totals: From ``Replica.read_totals``.
        learned: What the method makes of them; a mean of nothing, as where every step was skipped,
            is None.
        step: Finished steps.
        lr: Learning rate of the last step.
        tokens: Sample tokens of the interval, over all ranks.
        seconds: Length of the interval.
        steps: Steps of the interval.
    """
    return {
        "step": step,
        **learned,
        "lr": lr,
        "grad_norm": totals["grad_norm"],
        "skipped": int(totals["skipped"]),
        "tokens_per_s": tokens / seconds if seconds else 0.0,
        "step_ms": 1e3 * seconds / max(steps, 1),
    }


def ratio(numerator: float, denominator: float) -> float | None:
    """The mean of an interval; None of nothing."""
    return numerator / denominator if denominator else None


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(strict(row), allow_nan=False).encode() + b"\n"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


class MetricsLog:
    """Appends rows to ``metrics.jsonl`` and shows a bar on a terminal, plain lines elsewhere.

    Args:
        path: The file; rows past ``first_step`` from an interrupted run are dropped.
        first_step: Where this run begins.
        total_steps: Where it ends.
        shown: Name in the lines -> key of a row, left out where a row has none.
        legend: What the lines do not say of themselves.
        stream: For people; the standard error stream if left out.
    """

    def __init__(
        self,
        path: Path,
        *,
        first_step: int,
        total_steps: int,
        shown: Mapping[str, str],
        legend: str = "",
        stream: TextIO | None = None,
    ) -> None:
        self.path = path
        self.shown = shown
        self.total_steps = total_steps
        self._stream = stream or sys.stderr
        kept = [row for row in read_metrics(path) if row["step"] <= first_step]
        # Beside and renamed, so that a kill here loses no history.
        write_file(path, b"".join(map(_line, kept)))
        self._bar = (
            tqdm(total=total_steps, initial=first_step, desc="train", unit="step")
            if self._stream.isatty()
            else None
        )
        self._began = time.monotonic()
        if legend:
            self._show(legend)

    def _show(self, line: str) -> None:
        # A terminal that is gone, or a log on a full disk, is no reason to end a run.
        with contextlib.suppress(OSError):
            (self._bar or tqdm).write(line, file=self._stream)
            self._stream.flush()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row and show it.

        Raises:
            OSError: The file cannot be written.
        """
        self._append(row)
        named = ((name, row[key]) for name, key in self.shown.items() if key in row)
        shown = "".join(f"{name} {_shown(value)}  " for name, value in named)
        shown += f"{row['step_ms']:.0f} ms/step  {row['tokens_per_s']:,.0f} tokens/s"
        if row["skipped"]:
            shown += f"  {row['skipped']} steps skipped, not finite"
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.update(row["step"] - self._bar.n)
                self._bar.set_postfix_str(shown, refresh=False)
            return
        self._show_step(row["step"], shown)

    def write_score(self, row: Mapping[str, Any], line: str) -> None:
        """Append the row of a held-out score and show its line.

        Raises:
            OSError: The file cannot be written.
        """
        self._append(row)
        self._show_step(row["step"], line)

    def _append(self, row: Mapping[str, Any]) -> None:
        with naming(self.path), self.path.open("ab") as file:
            file.write(_line(row))

    def _show_step(self, step: int, line: str) -> None:
        passed = time.monotonic() - self._began
        self._show(f"step {step}/{self.total_steps}  {line}  {passed:.0f} s")

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a ``metrics.jsonl``; a line that is no row is reported, and costs no other.

    A killed run may leave its last line torn.

    Raises:
        OSError: The file is there and cannot be read.
    """
    try:
        with naming(path):
            lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_parse_row(line))
        except (ValueError, TypeError, RecursionError) as error:
            say(f"{path}, line {number}, is no row of metrics and is passed over: {error}")
    return rows


def _parse_row(line: bytes) -> dict[str, Any]:
    row = json.loads(line.decode())
    if not isinstance(row, dict):
        raise TypeError(f"must be an object, found {type(row).__name__}")
    step = row.get("step")
    if type(step) is not int or not 0 <= step <= LARGEST_STEP:
        raise ValueError(f"step must be 0 to {LARGEST_STEP}, found {step!r:.40}")
    for key, value in row.items():
        items = value if isinstance(value, list) else [value]
        if not all(type(item) in (int, float, NoneType) for item in items):
            raise TypeError(f"{key} must be a number or null, found {value!r:.40}")
    found: dict[str, Any] = strict(row)
    return found


def strict(value: Any) -> Any:
    """The value as JSON knows it, which has no NaN and no infinity."""
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
