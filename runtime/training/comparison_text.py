"""Two runs beside each other, as a page of tables for people."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cache.address import without_secrets_in
from maskgen.listing import optional, text_table
from runtime.training.comparison import NAMES, Comparison, Pair
from runtime.training.plots import Plot

MOST_STEPS = 12
"""Rows of the curves' table; the first and the last step are among them."""
WIDEST = 40
"""Characters of a setting."""


def comparison_text(found: Comparison, plots: Sequence[Plot]) -> str:
    """Settings that differ, how the runs went, their curves, their evaluations, and notes."""
    parts = ["\n".join(f"{name} = {run}" for name, run in zip(NAMES, found.runs, strict=True))]
    settings = _pairs("setting", found.settings, _setting)
    parts.append(settings if found.settings else "no setting differs, but for run.folder")
    parts.append(_pairs("run", found.course, _number))
    if found.steps:
        parts.append(_curves(found, plots))
    if found.evaluation:
        parts.append(_pairs("evaluation", found.evaluation, _number))
    parts.append("\n".join(f"- {note}" for note in found.notes))
    return without_secrets_in("\n\n".join(parts))


def _pairs(title: str, pairs: Mapping[str, Pair], shown: Any) -> str:
    rows = [(name, shown(ours), shown(theirs)) for name, (ours, theirs) in pairs.items()]
    return text_table((title, *NAMES), rows)


def _curves(found: Comparison, plots: Sequence[Plot]) -> str:
    drawn = [plot for plot in plots if plot.key in found.curves]
    titles = ["step", *(f"{plot.key} {name}" for plot in drawn for name in NAMES)]
    rows = [
        [
            str(found.steps[index]),
            *(_point(found, plot, run, index) for plot in drawn for run in range(len(NAMES))),
        ]
        for index in _spread(len(found.steps), MOST_STEPS)
    ]
    return text_table(titles, rows)


def _point(found: Comparison, plot: Plot, run: int, index: int) -> str:
    value = found.curves[plot.key][run][index]
    ends = [found.curves[key][run][index] for key in plot.ends or () if key in found.curves]
    if not ends or value is None or None in ends:
        return _number(value)
    return f"{_number(value)} ({_number(ends[0])} to {_number(ends[1])})"


def _spread(count: int, most: int) -> list[int]:
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _number(value: Any) -> str:
    if not isinstance(value, float):
        return optional(value)
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


def _setting(value: Any) -> str:
    text = optional(value) if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
