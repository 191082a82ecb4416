"""One picture of a run: loss, and tokens per target call, over the steps."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cache.causes import naming
from maskgen.faults import told
from maskgen.progress import say
from runtime.training.metrics import METRICS_FILE, read_metrics

PICTURE_FILE = "metrics.png"
SERIES = {
    "tau_forced": ("drafts checked against the data", "tab:green", "-"),
    "tau": ("draft-and-verify on held-out prompts", "tab:red", "o"),
}
"""Key of a row -> its label, colour and style in the lower plot."""


def draw_metrics(rows: Iterable[Mapping[str, Any]], path: str | Path) -> Path:
    """Draw the rows of ``metrics.jsonl`` into a PNG.

    Args:
        rows: Each with ``step`` and any of ``loss``, ``tau_forced`` and ``tau``.
        path: The PNG.

    Returns:
        The path.
    """
    # A command that draws nothing should not pay for matplotlib; Agg needs no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(rows)
    figure = Figure(figsize=(8, 7), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(*_series(rows, "loss"), color="tab:blue")
    above.set_ylabel("loss (weighted mean cross entropy)")
    for key, (label, colour, style) in SERIES.items():
        steps, values = _series(rows, key)
        if steps:
            below.plot(steps, values, style, color=colour, label=label)
    below.set_ylabel("tau (tokens per target call)")
    below.set_xlabel("step")
    if below.get_legend_handles_labels()[1]:
        below.legend(loc="best")
    for axes in (above, below):
        axes.grid(visible=True, alpha=0.3)
    where = Path(path)
    where.parent.mkdir(parents=True, exist_ok=True)
    with naming(where):
        figure.savefig(where, dpi=110)
    return where


def draw_run(folder: Path, taus: tuple[float, float] | None = None) -> None:
    """Draw a run's metrics; what prevents that is reported and costs no more than the picture.

    Args:
        folder: The run folder.
        taus: What draft-and-verify measured before the first step and after the last.
    """
    try:
        rows = read_metrics(folder / METRICS_FILE)
        if taus is not None:
            last = max((row["step"] for row in rows), default=0)
            rows += [{"step": step, "tau": tau} for step, tau in zip((0, last), taus, strict=True)]
        draw_metrics(rows, folder / PICTURE_FILE)
    except Exception as error:
        say(f"no picture of the run: {told(error)}")


def _series(rows: Iterable[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]
