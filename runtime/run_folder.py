"""The folder of a run: one process at a time, what shaped the run, and what a run leaves there."""

import contextlib
import fcntl
import functools
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from cache.address import without_secrets_in
from cache.causes import naming
from runtime.checkpoint import META_FILE, Checkpoint, latest_state
from runtime.config import Config
from runtime.differences import told_differences
from runtime.drafter_folder import CONFIG_FILE
from runtime.errors import CheckpointError, ConfigError, TrainingError
from runtime.export import export_checkpoint
from runtime.picture import PICTURE_FILE, draw_run
from runtime.progress import say
from runtime.session import Session, shaping_settings

RUN_FILE = "run.json"
UNTOLD = "settings, data or masks"
"""What changed where ``run.json`` cannot tell."""


@contextlib.contextmanager
def held(name: str) -> Iterator[None]:
    """Make the run folder and hold it for this process alone.

    What was made is removed again at the end, unless something was written there.

    Raises:
        ConfigError: It is no folder or cannot be made.
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
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
    finally:
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()


def _take(lock: IO[str], path: Path) -> None:
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            say(
                f"the file system of {path.parent} has no locks ({error.strerror}): see that no "
                "other process trains there"
            )
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


def write_run_file(folder: Path, config: Config, session: Session) -> None:
    """Write ``run.json``: the settings, and what else shaped the run."""
    record = {
        "config": config.as_dict(),
        "mask_version": session.mask_version,
        "masks": session.shaping["masks"],
        "data": session.shaping["data"],
        "fingerprint": session.fingerprint,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    # An address of masks may hold a token.
    text = without_secrets_in(json.dumps(record, indent=1, default=str))
    with naming(folder / RUN_FILE):
        (folder / RUN_FILE).write_text(text + "\n", encoding="utf-8")


def resumed_state(
    folder: Path, session: Session, report: Callable[[str], None]
) -> tuple[int, dict[str, Tensor]] | None:
    """As ``latest_state``; the error says what changed, as far as ``run.json`` tells.

    Raises:
        CheckpointError: As ``latest_state``.
    """
    what_differs = functools.partial(_what_differs, folder, session)
    return latest_state(folder / "checkpoints", session.fingerprint, report, what_differs)


def _what_differs(folder: Path, session: Session, fingerprint: str) -> str:
    """What shapes this run otherwise than the run of ``fingerprint``, in words."""
    shaping = session.shaping
    try:
        record = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        # It is of a later run where one was killed while it started over.
        if record["fingerprint"] != fingerprint:
            return UNTOLD
        was = {
            **shaping_settings(record["config"]),
            "masks": record.get("masks", shaping["masks"]),
            "data": record.get("data", shaping["data"]),
        }
        versions = (record["mask_version"][:12], session.mask_version[:12])
        masks = " (cache version {} -> {})".format(*versions)
        return told_differences(was, shaping, "{name} {was} -> {now}", masks) or UNTOLD
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return UNTOLD


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
