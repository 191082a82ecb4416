"""The folder of a run: one process at a time, what shaped the run, and what a run leaves there."""

import contextlib
import fcntl
import functools
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from cache.address import without_secrets_in
from maskgen.errors import MaskSpecError
from maskgen.progress import say
from maskgen.spec import read_specs
from runtime.config import Config
from runtime.errors import ConfigError, TrainingError
from runtime.files.sealed import DamagedError, read_sealed, write_sealed
from runtime.shaping import shaping_settings, with_left_out
from runtime.training.checkpoint import has_checkpoints, newest_good, own_checkpoints
from runtime.training.cycles import Cycles
from runtime.training.differences import describe_differences
from runtime.training.entries import lines_of_before
from runtime.training.inputs import Inputs, fingerprint_of
from runtime.training.saved_state import LATER, Checkpoint

FORMAT = 2
RUN_FILE = "run.json"
UNKNOWN = "settings, data or masks"
"""What changed where ``run.json`` does not say."""


@contextlib.contextmanager
def taken(name: str) -> Iterator[None]:
    """Make the run folder and keep it for this process alone.

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
            lock = path.open("a")
        except OSError as error:
            raise ConfigError("run.folder", name, f"must be a writable folder ({error})") from error
        with lock:
            _take(lock, path)
            with contextlib.suppress(OSError):
                # Whoever wants to signal the run finds it by this number.
                os.ftruncate(lock.fileno(), 0)
                os.write(lock.fileno(), f"{os.getpid()}\n".encode())
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
        # Who locked it may have removed it since it was opened here, and another made a new one.
        ours = os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except OSError:
        ours = False
    if not ours:
        raise TrainingError(
            f"another process trains in {path.parent}; wait for it, or use another run.folder"
        )


def write_run_file(folder: Path, config: Config, inputs: Inputs, cycles: Cycles = ()) -> None:
    """Write ``run.json``, a sealed document: the settings, and what else shaped the run."""
    record = {
        "config": config.as_dict(),
        "mask_version": inputs.mask_version,
        "masks": inputs.shaping["masks"],
        "data": inputs.shaping["data"],
        **({"began_from": dict(inputs.began_from)} if inputs.began_from else {}),
        "fingerprint": inputs.fingerprint,
        "cycles": list(cycles or (config.train.steps,)),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    # An address of masks may hold a token.
    text = without_secrets_in(json.dumps({"format": FORMAT, **record}, default=str))
    write_sealed(folder / RUN_FILE, json.loads(text))


def starting_point(
    folder: Path, inputs: Inputs, report: Callable[[str], None]
) -> tuple[Checkpoint, dict[str, Tensor]] | None:
    """The newest good checkpoint of a run and its state; None to begin at the start.

    Args:
        folder: The run folder, taken by this process.
        inputs: Of this run.
        report: Takes a line for each checkpoint that is passed over.

    Raises:
        CheckpointError: The run folder is of another run; the message says what changed, as far as
            ``run.json`` says. Or it cannot be read or written.
        LaterFormatError: It is of a later release.
    """
    root = folder / "checkpoints"
    record = _read_run_file(folder, report)
    what_differs = functools.partial(_what_differs, record, inputs)

    def is_ours(checkpoint: Checkpoint) -> bool:
        first, *_ = _cycles(checkpoint, record, inputs)
        return checkpoint.fingerprint == fingerprint_of(inputs.shaping, first)

    checkpoints = [
        replace(checkpoint, cycles=_cycles(checkpoint, record, inputs))
        for checkpoint in own_checkpoints(root, is_ours, report, what_differs)
    ]
    found = newest_good(checkpoints, lambda item: (item, item.load()), report)
    if found is None and has_checkpoints(root):
        report(f"no checkpoint in {root} can be used: starting at step 1")
    return found


def _cycles(checkpoint: Checkpoint, record: Mapping[str, Any], inputs: Inputs) -> Cycles:
    """Those of a checkpoint; of one of before they had cycles the one that ``run.json`` says."""
    if checkpoint.cycles:
        return checkpoint.cycles
    steps: int = inputs.shaping["train"]["steps"]
    if record.get("fingerprint") == checkpoint.fingerprint:
        with contextlib.suppress(LookupError, TypeError, ValueError):
            steps = int((record.get("cycles") or [record["config"]["train"]["steps"]])[0])
    return (steps,)


def kept_beginning(folder: Path) -> Mapping[str, Any]:
    """What the run in a folder began from, see ``Method.began_from``; empty where it is not known.

    Raises:
        LaterFormatError: The run is of a later release.
    """
    found: Mapping[str, Any] = _read_run_file(folder, lambda line: None).get("began_from", {})
    return found


def _read_run_file(folder: Path, report: Callable[[str], None]) -> Mapping[str, Any]:
    try:
        return read_sealed(folder / RUN_FILE, FORMAT, LATER)
    except FileNotFoundError:
        return {}
    except OSError as error:
        report(f"passing over {folder / RUN_FILE}: it cannot be read ({error.strerror})")
    except DamagedError as error:
        report(f"passing over the record of the last run: {error}")
    return {}


def _what_differs(record: Mapping[str, Any], inputs: Inputs, fingerprint: str) -> str:
    """What shapes this run otherwise than the run of ``fingerprint``, in words."""
    shaping = inputs.shaping
    try:
        # It is of a later run where one was killed while it started over.
        if record["fingerprint"] != fingerprint:
            return UNKNOWN
        settings = shaping_settings(record["config"], inputs.config_type)
        # Other steps alone would be the same run.
        settings["train"]["steps"] = shaping["train"]["steps"]
        was = {
            **settings,
            "masks": record.get("masks", shaping["masks"]),
            "data": record.get("data", shaping["data"]),
            **({"began_from": record["began_from"]["files"]} if "began_from" in record else {}),
        }
        masks = _masks_note(record, inputs)
        was, shaping = (with_left_out(each, inputs.config_type) for each in (was, shaping))
        return describe_differences(was, shaping, "{name} {was} -> {now}", masks) or UNKNOWN
    except (LookupError, TypeError, AttributeError):
        return UNKNOWN


def _masks_note(record: Mapping[str, Any], inputs: Inputs) -> str:
    """What to say of masks that differ: their versions, or their digests where that is one."""
    was, now = record.get("masks", {}), inputs.shaping["masks"]
    versions = (record["mask_version"][:12], inputs.mask_version[:12])
    note = "cache version {} -> {}".format(*versions)
    if versions[0] == versions[1]:
        changed = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        pairs = ((name, *(_digest(of.get(name)) for of in (was, now))) for name in changed)
        note = ", ".join(f"{name}: {old} -> {new}" for name, old, new in pairs)
    before = _lines_of_before(record, inputs)
    return f" ({note})" + (f"; {before}" if before else "")


def _digest(sha256: str | None) -> str:
    return "none" if sha256 is None else sha256[:12]


def _lines_of_before(record: Mapping[str, Any], inputs: Inputs) -> str:
    """What to write where both run files ask alike, and other defaults made other masks."""
    was = record.get("masks", {})
    try:
        asked = {spec.digest for spec in read_specs({"masks": record["config"]["masks"]})}
    except MaskSpecError:
        return ""
    return lines_of_before(
        entry.spec
        for length, entry in inputs.entries.items()
        if entry.spec.digest in asked and was.get(str(length)) != entry.sha256
    )
