"""Training state on disk: whole or not at all, with a digest, resumed from the newest good one.

A checkpoint is a folder ``step-000500`` with ``state.safetensors`` (fp32 masters, moments,
counters) and ``meta.json`` (step, fingerprint of the run, digest of the state file).
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cache.atomic import move_folder, staging_folder, temp_prefix, write_synced
from cache.causes import naming, why
from runtime.errors import CheckpointError

FORMAT = 1
STATE_FILE = "state.safetensors"
META_FILE = "meta.json"


@dataclass(frozen=True)
class Checkpoint:
    """One saved state, found but not read."""

    folder: Path
    step: int
    """Finished steps."""
    fingerprint: str
    """What shaped the run; a resume needs the same."""
    sha256: str
    """Of the state file."""
    drafter: Mapping[str, Any]
    """The network's published config, with ``feature_scale`` beside it."""

    def load(self) -> dict[str, Tensor]:
        """Read the state, checking its digest.

        Raises:
            CheckpointError: The file is missing, cut or changed.
        """
        path = self.folder / STATE_FILE
        try:
            found = file_digest(path)
            if found != self.sha256:
                raise CheckpointError(
                    f"{path} is damaged: its SHA-256 must be {self.sha256[:12]}..., found "
                    f"{found[:12]}..."
                )
            state: dict[str, Tensor] = load_file(path)
            return state
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def file_digest(path: Path) -> str:
    """SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_checkpoint(
    root: Path,
    state: Mapping[str, Tensor],
    *,
    step: int,
    fingerprint: str,
    drafter: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write one checkpoint beside the others and drop the oldest over ``keep``.

    Args:
        root: Folder of all checkpoints.
        state: Tensors on the CPU.
        step: Finished steps.
        fingerprint: What shaped the run.
        drafter: What an export needs beside the weights.
        keep: Checkpoints kept.

    One process at a time saves in a folder; what a killed one left half written is removed.

    Raises:
        CheckpointError: The disk refuses; what was there stays.
    """
    target = root / f"step-{step:08d}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for left in root.glob(f"{temp_prefix(root / 'step-*')}*"):
            shutil.rmtree(left, ignore_errors=True)
        with naming(target), staging_folder(target) as staging:
            folder = staging / target.name
            folder.mkdir()
            save_file(
                {name: tensor.contiguous() for name, tensor in state.items()}, folder / STATE_FILE
            )
            with (folder / STATE_FILE).open("rb") as file:
                os.fsync(file.fileno())
            meta = {
                "format": FORMAT,
                "step": step,
                "fingerprint": fingerprint,
                "drafter": dict(drafter),
                "sha256": file_digest(folder / STATE_FILE),
            }
            write_synced(folder / META_FILE, json.dumps(meta, indent=1).encode())
            if target.exists():
                shutil.rmtree(target)
            move_folder(folder, target)
    except (OSError, SafetensorError) as error:
        what, helps = why(error, str(target))
        raise CheckpointError(
            f"cannot save {target}: {what}; {helps}, then run the same command again: it goes on "
            "from the newest checkpoint"
        ) from error
    for old in find_checkpoints(root)[keep:]:
        shutil.rmtree(old.folder, ignore_errors=True)
    return target


def find_checkpoints(root: Path) -> list[Checkpoint]:
    """Complete checkpoints, newest first; folders without a readable ``meta.json`` are not."""
    found = []
    for folder in root.glob("step-*") if root.is_dir() else ():
        try:
            meta = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
            if meta["format"] != FORMAT:
                continue
            found.append(
                Checkpoint(
                    folder,
                    int(meta["step"]),
                    str(meta["fingerprint"]),
                    str(meta["sha256"]),
                    dict(meta["drafter"]),
                )
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda checkpoint: checkpoint.step, reverse=True)


def find_finished(root: Path, fingerprint: str, steps: int) -> Checkpoint | None:
    """The checkpoint of this run's last step, if the run came that far."""
    for checkpoint in find_checkpoints(root):
        if checkpoint.fingerprint == fingerprint and checkpoint.step >= steps:
            return checkpoint
    return None


def latest_state(
    root: Path,
    fingerprint: str,
    report: Callable[[str], None],
    what_differs: Callable[[str], str],
) -> tuple[int, dict[str, Tensor]] | None:
    """The newest good state of this run, and its step; a damaged one is reported and passed over.

    Args:
        root: Folder of all checkpoints.
        fingerprint: What shapes this run.
        report: Takes a line for the user.
        what_differs: Fingerprint of another run -> what differs between the two, in words.

    Raises:
        CheckpointError: The folder holds checkpoints, and they are of another run.
    """
    checkpoints = find_checkpoints(root)
    ours = [item for item in checkpoints if item.fingerprint == fingerprint]
    if checkpoints and not ours:
        raise CheckpointError(
            f"{root} holds checkpoints of another run; changed: "
            f"{what_differs(checkpoints[0].fingerprint)}; use --fresh to start over there, or "
            "another run.folder"
        )
    for checkpoint in ours:
        try:
            return checkpoint.step, checkpoint.load()
        except CheckpointError as error:
            report(f"passing over a checkpoint: {error}")
    return None
