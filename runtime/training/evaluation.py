"""What an evaluation found, as the run around it sees it, and where it is kept."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from runtime.files.writing import write_file
from runtime.training.picture import draw_run
from runtime.training.plots import Plot

RESULT_FILE = "evaluate.json"


class Evaluation(Protocol):
    """What a method measured on held-out data."""

    @property
    def exact(self) -> bool:
        """Whether what was measured agrees with itself; the command exits with 3 if not."""
        return True

    @property
    def ends(self) -> Mapping[str, tuple[float, float]]:
        """Key of a plot -> its value before the first step and after the last."""
        return {}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        ...

    def table(self) -> str:
        """For people."""
        return "\n".join(f"{name} {value}" for name, value in self.as_dict().items())


def keep_evaluation(folder: Path, found: Evaluation, plots: Sequence[Plot] | None) -> None:
    """Write ``evaluate.json`` into a run folder.

    Args:
        folder: Made where it is missing.
        found: What was measured.
        plots: Of the run's picture, drawn again with both ends; None where it stays.

    Raises:
        OSError: The file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found.as_dict(), indent=1) + "\n"
    write_file(folder / RESULT_FILE, text.encode())
    if plots is not None:
        draw_run(folder, plots, found.ends)
