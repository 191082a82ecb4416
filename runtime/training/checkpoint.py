"""The checkpoints of a run, in one folder: saved, found, resumed from, dropped.

One process at a time writes there. What appears is whole, what goes is renamed aside first, and
only what is whole costs an older one its place.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from cache.atomic import move_folder, staging_folder
from cache.causes import naming, why
from maskgen.progress import say
from runtime.errors import CheckpointError, LaterFormatError
from runtime.training.checkpoint_folders import checkpoint_folders, leftovers
from runtime.training.cycles import Cycles
from runtime.training.saved_state import Checkpoint, folder_name, read_checkpoint, write_checkpoint

R = TypeVar("R")

TRAIN = "run: python -m runtime.train --config FILE"
REPLACED = "replaced"
"""Where in a staging folder the checkpoint lies whose place another takes."""


def save_checkpoint(
    root: Path,
    state: Mapping[str, Tensor],
    *,
    step: int,
    fingerprint: str,
    published: Mapping[str, Any],
    keep: int,
    heldout: Mapping[str, Any] = MappingProxyType({}),
    spare: int | None = None,
    cycles: Cycles = (),
) -> Path:
    """Write one checkpoint beside the others and drop the oldest over ``keep``.

    Args:
        root: Folder of all checkpoints, or a link to it.
        state: Tensors on the CPU.
        step: Finished steps.
        fingerprint: What shaped the run.
        published: What an export needs beside the weights.
        keep: Good checkpoints of this run kept; what is older goes, damaged or not.
        heldout: How the run stands on held-out data.
        spare: Step whose checkpoint stays however old it is.
        cycles: Of the learning rate.

    One process at a time saves in a folder; what a killed one left half written is removed.

    Raises:
        CheckpointError: The disk refuses; what was there stays.
    """
    target = root / folder_name(step)
    try:
        heal(root)
        # Of a link that leads nowhere yet, what it names is made.
        Path(os.path.realpath(root)).mkdir(parents=True, exist_ok=True)
        with naming(target), staging_folder(target) as staging:
            folder = staging / target.name
            write_checkpoint(
                folder,
                state,
                step=step,
                fingerprint=fingerprint,
                published=published,
                heldout=heldout,
                cycles=cycles,
            )
            _place(folder, target, staging / REPLACED)
    except (OSError, SafetensorError) as error:
        what, helps = why(error, str(target))
        raise CheckpointError(
            f"cannot save {target}: {what}; {helps}, then run the same command again: it goes on "
            "from the newest checkpoint"
        ) from error
    with contextlib.suppress(OSError):
        stays = {target.name, folder_name(step if spare is None else spare)}
        _drop_oldest(root, stays, fingerprint, keep)
    return target


def check_writable(root: Path) -> None:
    """Refuse now what ``save_checkpoint`` would refuse once steps are done.

    Raises:
        CheckpointError: The folder is there, or a link to it, and cannot be written.
    """
    if not os.path.lexists(root):
        return
    try:
        Path(os.path.realpath(root)).mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritable(root, error) from error


def find_checkpoints(root: Path, report: Callable[[str], None] = say) -> list[Checkpoint]:
    """Checkpoints whose ``meta.json`` is whole, newest first.

    Args:
        root: Folder of all checkpoints.
        report: Takes a line for each that is passed over.

    Raises:
        CheckpointError: The folder cannot be read.
        LaterFormatError: One is of a later release, which this one must not pass over.
    """
    found = []
    try:
        folders = checkpoint_folders(root)
    except OSError as error:
        raise CheckpointError(f"{root} cannot be read ({error.strerror})") from error
    for folder in folders:
        try:
            found.append(read_checkpoint(folder))
        except CheckpointError as error:
            _pass_over(error, report)
    return found


def newest_good(
    checkpoints: list[Checkpoint],
    use: Callable[[Checkpoint], R],
    report: Callable[[str], None] = say,
) -> R | None:
    """What ``use`` makes of the first checkpoint that it does not refuse.

    Args:
        checkpoints: In the order in which they are tried.
        use: Raises a ``CheckpointError`` where one is damaged.
        report: Takes a line for each that is passed over.
    """
    for checkpoint in checkpoints:
        try:
            return use(checkpoint)
        except CheckpointError as error:
            _pass_over(error, report)
    return None


def own_checkpoints(
    root: Path,
    is_ours: Callable[[Checkpoint], bool],
    report: Callable[[str], None],
    what_differs: Callable[[str], str],
) -> list[Checkpoint]:
    """The checkpoints of this run, newest first; what a killed one left is put in order before.

    Args:
        root: Folder of all checkpoints; no other process may write there.
        is_ours: Whether one is of this run.
        report: Takes a line for each that is passed over.
        what_differs: Fingerprint of another run -> what differs between the two, in words.

    Raises:
        CheckpointError: The folder cannot be read or written, or all are of another run.
        LaterFormatError: As ``find_checkpoints``.
    """
    try:
        heal(root)
    except OSError as error:
        raise _unwritable(root, error) from error
    checkpoints = find_checkpoints(root, report)
    ours = [item for item in checkpoints if is_ours(item)]
    if checkpoints and not ours:
        raise CheckpointError(
            f"{root} holds checkpoints of another run; changed: "
            f"{what_differs(checkpoints[0].fingerprint)}; use --fresh to start over there, or "
            "another run.folder"
        )
    return ours


def has_checkpoints(root: Path) -> bool:
    """Whether there is any checkpoint, good or not.

    Raises:
        OSError: The folder cannot be read.
    """
    return bool(checkpoint_folders(root))


def remove_checkpoints(root: Path) -> None:
    """Forget all checkpoints, the newest last: a run that is killed meanwhile goes on from it.

    Args:
        root: Their folder, or a link to it, which stays.

    Raises:
        CheckpointError: The disk refuses.
    """
    try:
        for folder in reversed(checkpoint_folders(root)):
            _remove(folder)
        for left in leftovers(root):
            shutil.rmtree(left)
    except OSError as error:
        what, helps = why(error, str(root))
        raise CheckpointError(f"cannot remove {root}: {what}; {helps}") from error


def heal(root: Path) -> None:
    """Put into place what a killed save left whole, and remove what it left half written.

    Raises:
        OSError: The folder cannot be read or written.
    """
    for left in leftovers(root):
        place = root / left.name[1:].partition(".")[0]
        for folder in (left / place.name, left / REPLACED / place.name):
            if not place.exists() and _is_good(folder):
                move_folder(folder, place)
        shutil.rmtree(left)


def _place(folder: Path, target: Path, replaced: Path) -> None:
    """Rename a new checkpoint into place; what is there is renamed aside, never removed before."""
    if not os.path.lexists(target):
        move_folder(folder, target)
        return
    replaced.mkdir()
    aside = replaced / target.name
    target.rename(aside)
    try:
        move_folder(folder, target)
    except OSError:
        aside.rename(target)
        raise


def _drop_oldest(root: Path, stays: Set[str], fingerprint: str, keep: int) -> None:
    good = 0
    for folder in checkpoint_folders(root):
        try:
            ours = read_checkpoint(folder).fingerprint == fingerprint
        except CheckpointError:
            ours = False
        except LaterFormatError:
            continue
        if good < keep:
            # Only what is whole may cost an older one its place.
            good += ours and _is_good(folder)
        elif folder.name not in stays:
            _remove(folder)


def _remove(folder: Path) -> None:
    # Aside first: what is half removed is never taken for a checkpoint.
    with staging_folder(folder) as staging:
        folder.rename(staging / "removed")


def _is_good(folder: Path) -> bool:
    try:
        read_checkpoint(folder).check()
    except (CheckpointError, LaterFormatError):
        return False
    return True


def _unwritable(root: Path, error: OSError) -> CheckpointError:
    what, helps = why(error, str(root))
    return CheckpointError(f"{root} must take checkpoints: {what}; {helps}")


def _pass_over(error: CheckpointError, report: Callable[[str], None]) -> None:
    report(f"passing over a checkpoint: {error}")
