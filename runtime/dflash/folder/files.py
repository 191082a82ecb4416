"""The files of a drafter folder: which may be there, and for which target the drafter was trained.

``config.json`` and ``model.safetensors`` are what servers read. ``target.json``, a sealed document
of format 2, stands beside them for this product alone: ``name``, ``digest`` and ``template`` as the
prepared data named them, ``files`` with the SHA-256 of the other two, ``run``, the fingerprint
and step that the drafter is from, and ``began_from``, folder and SHA-256 of the weights of the
drafter that it began as, if it did. Format 1 was the first three alone, unsealed, and is read. A
folder of another trainer has none.
"""

import fnmatch
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cache.atomic import staging_folder, sync_folder, temp_prefix
from cache.causes import naming
from runtime.dflash.network.config import DrafterConfig
from runtime.errors import CheckpointError, ConfigError
from runtime.files.digests import sha256_of_file
from runtime.files.lock import folder_lock
from runtime.files.sealed import UNSEALED, DamagedError, read_sealed, seal
from runtime.files.writing import sync_file
from runtime.target.model import Target

FORMAT = 2
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TARGET_FILE = "target.json"
AGAIN = (
    "copy or fetch the folder again, or export it again from the run that it came from (python -m "
    "runtime.export --config ITS_RUN_FILE)"
)
"""Another run's file than that of the command that failed, as far as is known."""
PUBLISHED = "name a folder of a published drafter, such as runtime.train and runtime.export write"
OF_THE_RUN = ("format", "files", "run", "began_from")
"""Of a record, what says nothing of the target."""
CHANGING: Mapping[str, str] = {
    "mask_embedding.pt": "a row of its own for the mask token",
    "adapter_config.json": "an adapter over other weights",
    "*.safetensors.index.json": "weights in several files; save them as one",
    "*quant*config.json": "quantised weights",
    **dict.fromkeys(
        ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.npz"), "more weights"
    ),
}
"""Files beside the two that would make another network of them, and what they would be."""
HARMLESS = (
    WEIGHTS_FILE,
    *("training_args.bin", "training_state.pt", "optimizer.*", "scheduler.*", "rng_state*"),
)
"""Of those, what a trainer leaves behind."""


def read_network(folder: Path) -> DrafterConfig:
    """The network of a drafter folder.

    Raises:
        CheckpointError: There is no drafter, ``config.json`` says something that the network here
            does not do, or another file would change it. The message names the file.
    """
    path = folder / CONFIG_FILE
    published = _read_object(path, "a drafter's config")
    if published is None:
        raise CheckpointError(f"there is no drafter in {folder} (no {path.name}); {PUBLISHED}")
    try:
        network = DrafterConfig.from_published(published)
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    for other in sorted(folder.iterdir()):
        if not any(fnmatch.fnmatch(other.name, name) for name in HARMLESS):
            for name, meaning in CHANGING.items():
                if fnmatch.fnmatch(other.name, name):
                    raise CheckpointError(
                        f"{other} would change the drafter ({meaning}): a drafter here is "
                        f"{CONFIG_FILE} and {WEIGHTS_FILE} alone; remove it if it has no part in "
                        "the drafter, else serve that with a program that reads it"
                    )
    return network


def target_record(
    meta: Mapping[str, Any], began_from: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """``target.json`` of a drafter that is trained on prepared data.

    Args:
        meta: The data's ``meta.json``.
        began_from: The published drafter that it began from, see ``Method.began_from``.
    """
    record = dict(meta["target"])
    if "template" in meta:
        record["template"] = meta["template"]
    if began_from:
        sha256 = began_from["files"][WEIGHTS_FILE]
        record["began_from"] = {"folder": began_from["folder"], "sha256": sha256}
    return record


def read_target_record(folder: str | Path) -> dict[str, Any] | None:
    """Name, digest and template of a drafter folder's target; None where there is no record.

    Raises:
        CheckpointError: It is damaged or cannot be read, or its name or digest is no text.
        LaterFormatError: It is of a later release.
    """
    record = _read_record(Path(folder))
    if record is None:
        return None
    return {key: value for key, value in record.items() if key not in OF_THE_RUN}


def check_files(folder: Path) -> None:
    """Refuse a drafter folder whose files are not those that were written together.

    A folder without a record, or with one of format 1, is taken as it is.

    Raises:
        CheckpointError: A file was changed, or as ``read_target_record``.
        LaterFormatError: As ``read_target_record``.
    """
    record = _read_record(folder) or {}
    for name, sha256 in record.get("files", {}).items():
        path = folder / name
        try:
            found = sha256_of_file(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}); {AGAIN}") from error
        if found != sha256:
            raise CheckpointError(
                f"{path} is not the file that {TARGET_FILE} names: its SHA-256 must be "
                f"{sha256[:12]}..., found {found[:12]}...; {AGAIN}, or remove {TARGET_FILE} if the "
                "change is wanted"
            )


def is_of(folder: Path, run: Mapping[str, Any]) -> bool:
    """Whether a whole drafter of this run and step lies in a folder.

    Args:
        folder: The drafter's.
        run: Fingerprint and step, as ``target.json`` has them.
    """
    try:
        check_files(folder)
        record = _read_record(folder)
    except CheckpointError:
        return False
    return record is not None and record.get("run") == run


def _read_record(folder: Path) -> dict[str, Any] | None:
    path = folder / TARGET_FILE
    try:
        record = read_sealed(path, FORMAT, "export the drafter again")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); {AGAIN}") from error
    except DamagedError as error:
        raise CheckpointError(f"{error}; {AGAIN}") from error
    for key in ("name", "digest"):
        if not isinstance(record.get(key), str):
            raise _unreadable(path, f"an object with a text {key!r}", record.get(key))
    return {"format": UNSEALED, **record}


def same_target(folder: str | Path, target: Target, report: Callable[[str], None]) -> bool | None:
    """Whether a drafter was trained for this target; None where its folder does not say.

    Args:
        folder: The drafter's.
        target: The one at hand.
        report: Takes a line where it is another: a quantised copy is a fair target, and a drafter
            of a model of equal sizes drafts next to nothing.
    """
    record = read_target_record(folder)
    if record is None:
        return None
    if record["digest"] == target.digest:
        return True
    report(
        f"warning: the drafter in {folder} was trained for target {record['name']!r} "
        f"({record['digest'][:12]}), and this is {target.name!r} ({target.digest[:12]}); it may "
        "draft far worse"
    )
    return False


def replace_files(
    folder: Path,
    files: Mapping[str, Callable[[Path], object]],
    record: Mapping[str, Any] | None,
) -> None:
    """Replace the files of a drafter folder by new ones that belong together.

    The config is removed first and comes last: what is there beside it always belongs to it.

    Args:
        folder: Made where it is missing.
        files: Name -> what writes the file to a path; the config last.
        record: ``target.json`` less format and ``files``; None for a folder without it.

    Raises:
        OSError: The disk refuses.
    """
    with naming(folder), folder_lock(folder) as is_locked:
        for left in folder.glob(f"{temp_prefix(Path(CONFIG_FILE))}*"):
            if is_locked:
                shutil.rmtree(left)
        with staging_folder(folder / CONFIG_FILE) as staging:
            for name, write in files.items():
                with naming(folder / name):
                    write(staging / name)
            if record is not None:
                sha256 = {name: sha256_of_file(staging / name) for name in files}
                document = {"format": FORMAT, **record, "files": sha256}
                (staging / TARGET_FILE).write_bytes(seal(document))
            made = [path.name for path in staging.iterdir()]
            for name in made:
                sync_file(staging / name)
            for name in (CONFIG_FILE, TARGET_FILE):
                (folder / name).unlink(missing_ok=True)
            for name in sorted(made, key=lambda name: name == CONFIG_FILE):
                (staging / name).replace(folder / name)
            sync_folder(folder)


def _read_object(path: Path, what: str) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, what, error) from error
    if not isinstance(found, dict):
        raise _unreadable(path, "a JSON object", type(found).__name__)
    return found


def _unreadable(path: Path, what: str, found: object) -> CheckpointError:
    return CheckpointError(f"{path} must be {what} ({found}); {AGAIN}")
