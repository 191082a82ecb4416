"""The folder of a run: one process at a time, what shaped the run, and what a run leaves there."""

import contextlib
import fcntl
import json
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch

from runtime.checkpoint import META_FILE, Checkpoint
from runtime.config import Config
from runtime.errors import CheckpointError, ConfigError, TrainingError
from runtime.export import CONFIG_FILE, export_checkpoint
from runtime.metrics import METRICS_FILE, read_metrics
from runtime.picture import PICTURE_FILE, draw_metrics


@contextlib.contextmanager
def held(name: str) -> Iterator[None]:
    """Make the run folder and hold it for this process alone.

    What was made is removed again at the end, unless something was written there.

    Raises:
        ConfigError: It is no folder, cannot be made, or refuses what the run writes.
        TrainingError: Another process trains there.
    """
    if not name:
        # As a path it would be the current folder.
        raise ConfigError("run.folder", name, "must name a folder")
    folder = Path(name)
    path = folder / ".lock"
    missing: list[Path] = []
    try:
        try:
            whole = folder.resolve()
            missing += [made for made in (whole, *whole.parents) if not made.exists()]
            whole.mkdir(parents=True, exist_ok=True)
            lock = path.open("w")
        except OSError as error:
            raise ConfigError("run.folder", name, f"must be a writable folder ({error})") from error
        with lock:
            _take(lock, path)
            try:
                yield
            except OSError as error:
                if error.filename is None or folder not in Path(str(error.filename)).parents:
                    raise
                rule = f"must hold what a run writes ({error.strerror}: {error.filename})"
                raise ConfigError("run.folder", name, rule) from error
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
    finally:
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()


def _take(lock: IO[str], path: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who held it may have removed it since it was opened here, and another made a new one.
        ours = os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except OSError:
        ours = False
    if not ours:
        raise TrainingError(
            f"another process trains in {path.parent}; wait for it, or use another run.folder"
        )


def remove_checkpoints(folder: Path) -> None:
    """Forget the run's checkpoints.

    Raises:
        CheckpointError: The disk refuses.
    """
    try:
        shutil.rmtree(folder / "checkpoints")
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"cannot remove {folder / 'checkpoints'}: {error}") from error


def write_run_file(folder: Path, config: Config, mask_version: str, fingerprint: str) -> None:
    """Write ``run.json``: the settings, and what else shaped the run."""
    record = {
        "config": config.as_dict(),
        "mask_version": mask_version,
        "fingerprint": fingerprint,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    text = json.dumps(record, indent=1, default=str)
    (folder / "run.json").write_text(text + "\n", encoding="utf-8")


def draw_run(folder: Path) -> None:
    """Draw the run's metrics."""
    draw_metrics(read_metrics(folder / METRICS_FILE), folder / PICTURE_FILE)


def export_if_older(checkpoint: Checkpoint, folder: Path) -> None:
    """Write what a run that was ended between its last step and its export still owes."""
    saved = (checkpoint.folder / META_FILE).stat().st_mtime

    def older(path: Path) -> bool:
        return not path.exists() or path.stat().st_mtime < saved

    # The config is the last file of an export.
    if older(folder / "drafter" / CONFIG_FILE):
        export_checkpoint(checkpoint, folder / "drafter")
    if older(folder / PICTURE_FILE):
        draw_run(folder)
