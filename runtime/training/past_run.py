"""What a run left in its folder, read back: settings, metrics and its evaluation."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cache.causes import naming
from maskgen.progress import say
from runtime.errors import ConfigError, TrainingError
from runtime.files.sealed import DamagedError, read_sealed
from runtime.training.evaluation import RESULT_FILE
from runtime.training.metrics import METRICS_FILE, read_metrics
from runtime.training.run_folder import FORMAT, RUN_FILE
from runtime.training.saved_state import LATER


@dataclass(frozen=True, kw_only=True)
class PastRun:
    """One run folder."""

    folder: Path
    record: Mapping[str, Any]
    """``run.json``."""
    rows: Mapping[int, Mapping[str, Any]]
    """Step -> what ``metrics.jsonl`` says of it, held-out scores included; ascending."""
    evaluation: Mapping[str, Any] | None
    """``evaluate.json``; None where there is none."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings: section -> key -> value."""
        config: Mapping[str, Any] = self.record["config"]
        return config

    @property
    def method(self) -> str:
        """As ``run.method`` spells it; the first runs said nothing."""
        return str(self.config["run"].get("method", "dflash"))

    @property
    def steps(self) -> int:
        """The last step that metrics speak of."""
        return max(self.rows, default=0)

    def usual(self, key: str) -> float | None:
        """The median of a number over the intervals; None where no row has it."""
        values = [row[key] for row in self.rows.values() if row.get(key) is not None]
        return median(values) if values else None


def read_past_run(folder: Path) -> PastRun:
    """Read a run folder.

    Raises:
        ConfigError: It is none.
        TrainingError: Its ``run.json`` is damaged.
        LaterFormatError: It is of a later release.
    """
    try:
        record = read_sealed(folder / RUN_FILE, FORMAT, LATER)
        record["config"]["run"]["folder"]
    except (FileNotFoundError, NotADirectoryError) as error:
        rule = f"must be a run folder, in which runtime.train left {RUN_FILE}"
        raise ConfigError("RUN", str(folder), rule) from error
    except DamagedError as error:
        raise TrainingError(f"{error}; the settings of the run are not known") from error
    except (LookupError, TypeError) as error:
        raise TrainingError(f"{folder / RUN_FILE} is damaged: it has no settings") from error
    rows: dict[int, dict[str, Any]] = {}
    # A held-out score has a row of its own beside the interval's.
    for row in sorted(read_metrics(folder / METRICS_FILE), key=_step):
        rows.setdefault(row["step"], {}).update(row)
    return PastRun(folder=folder, record=record, rows=rows, evaluation=_evaluation(folder))


def _step(row: Mapping[str, Any]) -> int:
    return int(row["step"])


def _evaluation(folder: Path) -> Mapping[str, Any] | None:
    path = folder / RESULT_FILE
    try:
        with naming(path):
            found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        say(f"{path} is no evaluation and is passed over: {error}")
        return None
    if isinstance(found, dict):
        return found
    say(f"{path} is no evaluation and is passed over: it must be an object")
    return None


def common_steps(runs: Sequence[PastRun]) -> list[int]:
    """Steps that the metrics of all runs speak of, ascending."""
    return sorted(set.intersection(*(set(run.rows) for run in runs)))
