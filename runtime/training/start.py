"""Where a run begins: at its first step, at a checkpoint, or after its last step."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from runtime.config import Config
from runtime.errors import TrainingError
from runtime.ranks.processes import Processes
from runtime.training.checkpoint import check_writable
from runtime.training.cycles import Cycles, described, planned
from runtime.training.differences import describe_differences
from runtime.training.inputs import Inputs
from runtime.training.method import Method
from runtime.training.outcome import StepCounts, step_counts
from runtime.training.picture import PICTURE_FILE, draw_run
from runtime.training.run_folder import starting_point
from runtime.training.saved_state import META_FILE, Checkpoint
from runtime.training.watch import has_given_up


@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """What all processes of a run begin with; only the first has read a checkpoint."""

    step: int
    """Finished steps."""
    checkpoint: Checkpoint | None
    state: Mapping[str, Tensor] | None
    """Of the checkpoint."""
    gave_up: bool
    """Whether the run had ended there since its held-out scores became no better."""
    cycles: Cycles
    """Of the learning rate."""

    @property
    def heldout(self) -> Mapping[str, Any]:
        """How the run stood on held-out data; known to the first process alone.

        With other cycles it waits anew for a better score.
        """
        past = self.checkpoint.heldout if self.checkpoint is not None else {}
        return {**past, "waited": 0} if past and self.change else past

    @property
    def change(self) -> str | None:
        """What ``train.steps`` does to the cycles of the checkpoint, in a line for people."""
        return described(self.checkpoint.cycles, self.cycles) if self.checkpoint else None

    def counts(self, processes: Processes) -> StepCounts:
        """What became of the steps of a finished run, whose state process 0 has read."""
        mine = None if self.state is None else json.dumps(step_counts(self.state).as_dict())
        return StepCounts(**json.loads(processes.from_leader("counts", mine)))


def find_start(
    config: Config,
    inputs: Inputs,
    processes: Processes,
    *,
    fresh: bool,
    report: Callable[[str], None],
) -> Start:
    """Find where to begin, the same on all processes.

    Args:
        config: The run file.
        inputs: Data and masks.
        processes: All of the run.
        fresh: Whether checkpoints are left aside.
        report: Takes a line for each checkpoint that is passed over.

    Raises:
        CheckpointError: The run folder is of another run, or cannot be read or written.
        ConfigError: ``train.steps`` would end a cosine early.
        LaterFormatError: It is of a later release.
        TrainingError: Another process has other settings, data or masks.
    """
    found = None
    folder = Path(config.run.folder)
    if processes.leads:
        if not fresh:
            found = starting_point(folder, inputs, report)
        check_writable(folder / "checkpoints")
    checkpoint, state = found or (None, None)
    first_step = checkpoint.step if checkpoint is not None else 0
    # What is saved when shapes no result, but at every save all ranks compare their weights.
    train, evaluate = config.train, config.evaluate
    saving = {**inputs.shaping["train"], "save_every": train.save_every, "export": train.export}
    saving["accumulate"] = train.accumulate
    scoring = {"every": evaluate.every, "patience": evaluate.patience}
    step = agree(processes, first_step, {**inputs.shaping, "train": saving, "evaluate": scoring})
    cycles: Cycles = (train.steps,)
    if checkpoint is not None:
        cycles = planned(checkpoint.cycles, checkpoint.step, train.steps)
    shared = processes.from_leader("cycles", json.dumps(cycles) if processes.leads else None)
    gave_up = False
    if evaluate.patience:
        waited = 0
        if checkpoint is not None and cycles == checkpoint.cycles:
            waited = checkpoint.heldout.get("waited", 0)
        mine = json.dumps(has_given_up(config, waited)) if processes.leads else None
        gave_up = json.loads(processes.from_leader("gave-up", mine))
    return Start(
        step=step,
        checkpoint=checkpoint,
        state=state,
        gave_up=gave_up,
        cycles=tuple(json.loads(shared)),
    )


def agree(processes: Processes, first_step: int, shaping: Mapping[str, Any]) -> int:
    """The step that process 0 begins with, if this process sees what that one sees."""
    mine = json.dumps({"step": first_step, "shaping": shaping}) if processes.leads else None
    start = json.loads(processes.from_leader("start", mine))
    pattern = "{name}: {now} here, {was} on process 0"
    differences = describe_differences(start["shaping"], shaping, pattern)
    if differences:
        raise TrainingError(
            f"process {processes.rank} has other settings, data or masks than process 0 "
            f"({differences}); give every host the same run file, data folder and mask cache"
        )
    return int(start["step"])


def finish(
    method: Method[Any], checkpoint: Checkpoint, folder: Path, report: Callable[[str], None]
) -> None:
    """Write what a run that was ended between its last step and its export still owes."""
    product, picture = folder / method.product, folder / PICTURE_FILE
    if not method.is_of(product, checkpoint.run):
        report(f"{product} holds no whole {method.product} of step {checkpoint.step}: exporting it")
        method.export_checkpoint(checkpoint, product)
    saved = (checkpoint.folder / META_FILE).stat().st_mtime
    if not picture.exists() or picture.stat().st_mtime < saved:
        draw_run(folder, method.plots)
