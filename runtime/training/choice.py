"""Which checkpoint of a run is exported: the newest, that of a step, or that of the best score."""

from collections.abc import Callable, Sequence
from pathlib import Path

from maskgen.progress import say
from runtime.errors import CheckpointError
from runtime.training.checkpoint import TRAIN, find_checkpoints, newest_good
from runtime.training.saved_state import Checkpoint


def choose_checkpoint(root: Path, step: int | None, *, best: bool = False) -> Checkpoint:
    """The newest good checkpoint, or that of a step, or that of the best held-out score.

    Args:
        root: Folder of all checkpoints.
        step: Of one.
        best: Whether the best is meant where no step is; the newest where none was scored.

    Raises:
        CheckpointError: There is none.
    """
    found = find_checkpoints(root)
    chosen = [item for item in found if step in (None, item.step)]
    if not chosen:
        steps = ", ".join(str(item.step) for item in found) or "none"
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        advice = "choose one of them with --step" if found else TRAIN
        raise CheckpointError(f"{root} must hold {wanted}, found {steps}; {advice}")
    if step is not None:
        return chosen[0]
    good = newest_good((best and _scored(chosen)) or chosen, _checked)
    if good is None:
        raise CheckpointError(f"{root} holds damaged checkpoints only; {TRAIN}")
    return good


def best_checkpoint(
    root: Path, fingerprint: str, report: Callable[[str], None] = say
) -> Checkpoint | None:
    """The good checkpoint of a run that has its best held-out score; None where none was scored.

    Args:
        root: Folder of all checkpoints.
        fingerprint: What shaped the run.
        report: Takes a line for each that is passed over.
    """
    found = find_checkpoints(root, report)
    ours = [item for item in found if item.fingerprint == fingerprint]
    return newest_good(_scored(ours), _checked, report)


def _scored(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Those with a score, the best first, and the earliest of equals."""
    scored = [(item.merit, item) for item in checkpoints if item.merit is not None]
    return [item for _, item in sorted(scored, key=lambda pair: (-pair[0], pair[1].step))]


def _checked(checkpoint: Checkpoint) -> Checkpoint:
    checkpoint.check()
    return checkpoint
