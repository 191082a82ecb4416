"""Two runs beside each other: what was set otherwise, and what became of it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from runtime.config import Config
from runtime.errors import ConfigError
from runtime.training.differences import differing
from runtime.training.past_run import PastRun, common_steps
from runtime.training.plots import Plot

CONDITIONS = (
    "prompts",
    "without_prompt",
    "repetitive",
    "max_new_tokens",
    "draft_block_size",
    "confidence",
    "documents",
    "predictions",
    "dtype",
)
"""Of an evaluation: what must be equal for its scores to compare."""
SCORES = ("tau", "before", "after")
"""Of an evaluation: what is shown where it is equal, too."""
NAMES = ("A", "B")

T = TypeVar("T")
Pair = tuple[Any, Any]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Of runs A and B; every pair is in this order, with None for what one of them lacks."""

    runs: tuple[str, str]
    """The folders."""
    method: str
    settings: Mapping[str, Pair]
    """Settings that differ, and after them what differs in data and masks."""
    course: Mapping[str, Pair]
    """Steps, their time, and versions."""
    steps: Sequence[int]
    """Of which both have metrics."""
    curves: Mapping[str, tuple[Sequence[float | None], Sequence[float | None]]]
    """Key of a metrics row -> its values at ``steps``, ends of intervals included."""
    evaluation: Mapping[str, Pair]
    """Scores of ``evaluate.json``, and what else differs there."""
    notes: Sequence[str]
    """What compares and what does not, a sentence each."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def compare_runs(
    first: PastRun, second: PastRun, kind: type[Config], plots: Sequence[Plot]
) -> Comparison:
    """Compare two runs of one method.

    Args:
        first: A.
        second: B.
        kind: Of their run files: keys that an older run lacks had its defaults.
        plots: What of a metrics row people see.

    Raises:
        ConfigError: They are of different methods.
    """
    if first.method != second.method:
        rule = f"both runs must be of one method, and {first.folder} is of {first.method!r}"
        raise ConfigError("run.method", second.method, f"{rule}; {second.folder} is not")
    runs = (first, second)
    # As run.json has them, with lists for tuples.
    defaults = json.loads(json.dumps(kind().as_dict(), default=str))
    settings = _differing(*(_settings(run, defaults) for run in runs))
    settings.pop("run.folder", None)
    made = _differing(*(_made(run) for run in runs))
    steps = common_steps(runs)
    keys = [key for plot in plots for key in (plot.key, *(plot.ends or ()))]
    curves = {key: (_curve(first, key, steps), _curve(second, key, steps)) for key in keys}
    shown = {
        key: pair for key, pair in curves.items() if any(set(curve) - {None} for curve in pair)
    }
    return Comparison(
        runs=(str(first.folder), str(second.folder)),
        method=first.method,
        settings={**settings, **made},
        course={
            "steps": (first.steps, second.steps),
            "train.steps": _pair(runs, lambda run: run.config["train"]["steps"]),
            "ms a step": _pair(runs, lambda run: run.usual("step_ms")),
            "tokens/s": _pair(runs, lambda run: run.usual("tokens_per_s")),
            "torch": _pair(runs, lambda run: run.record.get("torch")),
            "python": _pair(runs, lambda run: run.record.get("python")),
        },
        steps=steps,
        curves=shown,
        evaluation=_evaluations(first.evaluation, second.evaluation),
        notes=[*_notes(runs, settings, made, steps, plots)],
    )


def _pair(runs: tuple[PastRun, PastRun], read: Callable[[PastRun], T]) -> tuple[T, T]:
    return (read(runs[0]), read(runs[1]))


def _curve(run: PastRun, key: str, steps: Sequence[int]) -> list[float | None]:
    return [run.rows[step].get(key) for step in steps]


def _differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Pair]:
    return {name: (old, new) for name, old, new in differing("", was, now)}


def _settings(run: PastRun, defaults: Mapping[str, Any]) -> dict[str, Any]:
    settings = {
        section: {**(table if section != "masks" else {}), **run.config.get(section, {})}
        for section, table in defaults.items()
    }
    masks = settings.pop("masks")
    entries = masks.pop("entry", [])
    masks |= {f"entry {entry.get('name')}": entry for entry in entries}
    return {**settings, "masks": masks}


def _made(run: PastRun) -> dict[str, Any]:
    return {
        "prepared data": run.record.get("data", {}),
        "built masks": run.record.get("masks", {}),
        "began from": run.record.get("began_from", {}).get("files", {}),
    }


def _evaluations(
    first: Mapping[str, Any] | None, second: Mapping[str, Any] | None
) -> dict[str, Pair]:
    ours, theirs = dict(_leaves(first or {})), dict(_leaves(second or {}))
    return {
        name: (ours.get(name), theirs.get(name))
        for name in {**ours, **theirs}
        if name.rpartition(".")[2] in SCORES or ours.get(name) != theirs.get(name)
    }


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            yield f"{prefix}{key}", value


def _notes(
    runs: tuple[PastRun, PastRun],
    settings: Mapping[str, Pair],
    made: Mapping[str, Pair],
    steps: Sequence[int],
    plots: Sequence[Plot],
) -> Iterator[str]:
    if not steps:
        yield "no step is in the metrics of both"
    elif "train.log_every" in settings:
        yield "train.log_every differs: a row is the mean of other steps"
    others = [name for name in made if name.startswith("prepared data.")]
    unlike = f"the prepared data differ ({', '.join(others)})" if others else ""
    for plot in (plot for plot in plots if plot.ends):
        last = next((s for s in reversed(steps) if _has_interval(runs, s, plot)), None)
        if last is None:
            continue
        (low, high), (other_low, other_high) = (
            [run.rows[last][key] for key in plot.ends or ()] for run in runs
        )
        apart = high < other_low or other_high < low
        yield (
            f"{plot.key} at step {last}: the intervals "
            + ("are apart" if apart else "overlap, so neither run is shown to be better")
            + ("; evaluate.samples differs" if "evaluate.samples" in settings else "")
            + (f"; {unlike}" if unlike else "")
        )
    evaluations = [run.evaluation for run in runs]
    lacking = [str(run.folder) for run in runs if run.evaluation is None]
    if lacking:
        yield f"not evaluated: {', '.join(lacking)}; run python -m runtime.evaluate"
        return
    ours, theirs = (found or {} for found in evaluations)
    conditions = [key for key in CONDITIONS if ours.get(key) != theirs.get(key)]
    reasons = [f"{key} {ours.get(key)} and {theirs.get(key)}" for key in conditions]
    reasons += [unlike] if unlike else []
    if reasons:
        yield f"the evaluations are not of the same samples and lengths: {'; '.join(reasons)}"
    else:
        yield (
            "the evaluations are of the same samples and lengths; evaluate.json keeps no interval, "
            "so see the held-out scores for how far chance goes"
        )


def _has_interval(runs: Sequence[PastRun], step: int, plot: Plot) -> bool:
    keys = (plot.key, *(plot.ends or ()))
    return all(run.rows[step].get(key) is not None for run in runs for key in keys)
