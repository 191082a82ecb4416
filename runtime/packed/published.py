"""The fine-tuned model as a folder that transformers loads, and what it says of its run.

``trained.json``, a sealed document of format 1, stands beside transformers' own files: the run's
fingerprint and step, and the SHA-256 of every file.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from cache.atomic import move_folder, staging_folder
from cache.causes import naming
from runtime.errors import CheckpointError, LaterFormatError
from runtime.files.digests import sha256_of_file
from runtime.files.sealed import DamagedError, read_sealed, seal
from runtime.files.writing import sync_file
from runtime.target.model import Target
from runtime.target.reader import plain_model, quiet_transformers

FORMAT = 1
RECORD = "trained.json"
WRITTEN = "name a folder that runtime.train or runtime.export wrote"
AGAIN = (
    "copy or fetch the folder again, or export it again from the run that it came from (python -m "
    "runtime.export --config ITS_RUN_FILE)"
)
"""Another run's file than that of the command that failed, as far as is known."""


def save_model(
    folder: Path, target: Target, weights: Mapping[str, Tensor], run: Mapping[str, Any]
) -> Path:
    """Write a model; one that stood there is replaced as a whole, and files of others stay.

    Args:
        folder: Where to, made where it is missing; see ``check_destination``.
        target: The model that was trained, with its tokenizer; its weights are overwritten.
        weights: Float32, by parameter name; written in bfloat16.
        run: Fingerprint and step that they are from.

    Raises:
        CheckpointError: The weights are not exactly the model's parameters, or not finite, or the
            folder holds something else.
        OSError: The disk refuses.
    """
    folder = check_destination(folder)
    parameters = dict(target.model.named_parameters())
    unlike = sorted(
        name
        for name in parameters.keys() | weights.keys()
        if name not in parameters
        or name not in weights
        or parameters[name].shape != weights[name].shape
    )
    if unlike:
        raise CheckpointError(
            f"the weights must be the {len(parameters)} parameters of {target.name!r}; "
            f"{len(unlike)} differ, first {unlike[0]}"
        )
    broken = next((name for name, tensor in weights.items() if not tensor.isfinite().all()), None)
    if broken is not None:
        raise CheckpointError(f"the weights must be finite, and {broken} is not")
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name])
    with naming(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with naming(folder), staging_folder(folder) as staging, quiet_transformers():
        made = staging / "made"
        target.tokenizer.save_pretrained(made)
        plain_model(target.model).bfloat16().save_pretrained(made)
        files = sorted(path for path in made.rglob("*") if path.is_file())
        sha256 = {str(path.relative_to(made)): sha256_of_file(path) for path in files}
        record = made / RECORD
        record.write_bytes(seal({"format": FORMAT, "run": dict(run), "files": sha256}))
        for path in (*files, record):
            sync_file(path)
        _swap(made, folder, staging / "replaced")
    return folder


def check_destination(folder: Path, base: Path | None = None) -> Path:
    """Refuse a place where a model would take that of something else.

    Args:
        folder: Where a model is to be written.
        base: Folder of the model that is trained, which must stay.

    Returns:
        The folder, behind its links.

    Raises:
        CheckpointError: It is a file, a folder of other things, or the model that is trained.
    """
    where = Path(os.path.realpath(folder))
    if base is not None and where == Path(os.path.realpath(base)):
        raise CheckpointError(
            f"{folder} is the model that is trained, which stays as it is; choose another folder "
            "(run.folder, or --out)"
        )
    if where.is_dir() and ((where / RECORD).exists() or not any(where.iterdir())):
        return where
    if os.path.lexists(where):
        raise CheckpointError(
            f"{folder} must be a new or empty folder, or one that this command wrote (with "
            f"{RECORD}), and holds something else; choose another folder"
        )
    return where


def _swap(made: Path, folder: Path, aside: Path) -> None:
    if not folder.exists():
        move_folder(made, folder)
        return
    _carry_over(folder, made)
    folder.rename(aside)
    try:
        move_folder(made, folder)
    except OSError:
        aside.rename(folder)
        raise


def _carry_over(folder: Path, made: Path) -> None:
    """Move what others put into a model's folder into the one that takes its place."""
    try:
        own = set(read_sealed(folder / RECORD, FORMAT, AGAIN)["files"])
    except (OSError, DamagedError, LookupError, TypeError):
        own = set()
    for path in folder.iterdir():
        if path.name not in own and not (made / path.name).exists():
            path.rename(made / path.name)


def read_record(folder: Path) -> dict[str, Any] | None:
    """What a folder says of its run; None where it says nothing, or is not as it was written.

    Raises:
        LaterFormatError: It is of a later release.
    """
    try:
        record = read_sealed(folder / RECORD, FORMAT, AGAIN)
        files: Mapping[str, str] = record["files"]
        whole = all(sha256_of_file(folder / name) == sha256 for name, sha256 in files.items())
        return dict(record["run"]) if whole else None
    except (OSError, DamagedError, LookupError, TypeError, AttributeError):
        return None


def is_of(folder: Path, run: Mapping[str, Any]) -> bool:
    """Whether a whole model of this run and step lies in a folder."""
    try:
        return read_record(folder) == dict(run)
    except LaterFormatError:
        return False
