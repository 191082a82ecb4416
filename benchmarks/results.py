"""Rows of benchmarks/results.csv: one figure each, with where and on what it was measured."""

import csv
import datetime
import platform
import subprocess
from pathlib import Path

import torch

COLUMNS = (
    "date", "bench", "case", "metric", "value", "unit", "ratio", "machine", "versions", "commit"
)  # fmt: skip


class Results:
    """Prints figures as they come and, where a path is given, appends them to a CSV file."""

    def __init__(self, bench: str, path: str | None, device: str) -> None:
        self.bench = bench
        self.path = None if path is None else Path(path)
        self.machine = _machine(device)
        self.versions = _versions()
        self.commit = _commit()
        print(f"{bench} on {self.machine}; {self.versions}; commit {self.commit}")

    def add(
        self, case: str, metric: str, value: float, unit: str, ratio: float | None = None
    ) -> None:
        """Record one figure; ``ratio`` is to whatever the metric is measured against."""
        against = "" if ratio is None else f"   ratio {ratio:.3f}"
        print(f"{case:44s} {metric:34s} {value:11.4g} {unit}{against}", flush=True)
        if self.path is None:
            return
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if new:
                writer.writerow(COLUMNS)
            shown = "" if ratio is None else f"{ratio:.4g}"
            date = datetime.datetime.now(datetime.UTC).date().isoformat()
            figure = (date, self.bench, case, metric, f"{value:.5g}", unit, shown)
            writer.writerow((*figure, self.machine, self.versions, self.commit))


def _machine(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def _versions() -> str:
    names = [f"python {platform.python_version()}", f"torch {torch.__version__}"]
    try:
        from importlib.metadata import version

        names.append(f"triton {version('triton')}")
    except ImportError:
        pass
    return " ".join(names)


def _commit() -> str:
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return asked.stdout.strip() if asked.returncode == 0 else "uncommitted"
