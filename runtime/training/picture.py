"""One picture of a run: its loss, and what else its method shows, over the steps."""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from maskgen.faults import told
from maskgen.progress import say
from runtime.files.writing import write_file
from runtime.training.metrics import METRICS_FILE, read_metrics
from runtime.training.plots import Plot

PICTURE_FILE = "metrics.png"


def draw_metrics(
    rows: Iterable[Mapping[str, Any]], plots: Sequence[Plot], path: str | Path
) -> Path:
    """Draw the rows of ``metrics.jsonl`` into a PNG, one panel an axis.

    Args:
        rows: Each with ``step`` and any of the plots' keys.
        plots: What to draw.
        path: The PNG.

    Returns:
        The path.
    """
    return draw_runs({"": rows}, plots, path)


def draw_runs(
    runs: Mapping[str, Iterable[Mapping[str, Any]]], plots: Sequence[Plot], path: str | Path
) -> Path:
    """Draw the rows of several runs into the same panels; later ones dashed.

    Args:
        runs: Name of a run in the legend -> its rows.
        plots: What to draw.
        path: The PNG.

    Returns:
        The path.
    """
    # A command that draws nothing should not pay for matplotlib; Agg needs no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    of_runs = {name: list(rows) for name, rows in runs.items()}
    every = [row for rows in of_runs.values() for row in rows]
    plots = [plot for plot in plots if plot.always or _series(every, plot.key)[0]]
    axes_of = list(dict.fromkeys(plot.axis for plot in plots))
    figure = Figure(figsize=(8, 3.5 * len(axes_of)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(axes_of), 1, sharex=True, squeeze=False)[:, 0]
    for axis, panel in zip(axes_of, panels, strict=True):
        for plot in (plot for plot in plots if plot.axis == axis):
            for number, (name, rows) in enumerate(of_runs.items()):
                _draw_curve(panel, rows, plot, name, dashed=number > 0)
        panel.set_ylabel(axis)
        panel.grid(visible=True, alpha=0.3)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(loc="best")
    panels[-1].set_xlabel("step")
    where = Path(path)
    where.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110)
    write_file(where, drawn.getvalue())
    return where


def _draw_curve(
    panel: Any, rows: Sequence[Mapping[str, Any]], plot: Plot, name: str, *, dashed: bool
) -> None:
    steps, values = _series(rows, plot.key)
    if not steps:
        return
    label = ": ".join(filter(None, (name, plot.label))) or None
    style = plot.style.replace("-", "--") if dashed else plot.style
    panel.plot(steps, values, style, color=plot.colour, label=label)
    if plot.ends is not None:
        low, high = plot.ends
        whole = [row for row in rows if _has(row, low) and _has(row, high)]
        ends = [[row[key] for row in whole] for key in ("step", low, high)]
        panel.vlines(*ends, color=plot.colour, alpha=0.5)


def draw_run(
    folder: Path, plots: Sequence[Plot], ends: Mapping[str, tuple[float, float]] | None = None
) -> None:
    """Draw a run's metrics; what prevents that is reported and costs no more than the picture.

    Args:
        folder: The run folder.
        plots: What to draw.
        ends: Key -> what an evaluation measured before the first step and after the last.
    """
    try:
        rows = read_metrics(folder / METRICS_FILE)
        last = max((row["step"] for row in rows), default=0)
        for key, values in (ends or {}).items():
            rows += [{"step": step, key: v} for step, v in zip((0, last), values, strict=True)]
        draw_metrics(rows, plots, folder / PICTURE_FILE)
    except Exception as error:
        say(f"no picture of the run: {told(error)}")


def _series(rows: Iterable[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    found = [(row["step"], row[key]) for row in rows if _has(row, key)]
    return [step for step, _ in found], [value for _, value in found]


def _has(row: Mapping[str, Any], key: str) -> bool:
    return isinstance(row.get(key), (int, float))
