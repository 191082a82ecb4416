"""The files of a drafter folder: which may be there, and for which target the drafter was trained.

``config.json`` and ``model.safetensors`` are what servers read. ``target.json`` stands beside them
for this product alone: ``{"name", "digest", "template"}``, as the prepared data named them. A
folder of another trainer has none.
"""

import fnmatch
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cache.causes import naming
from runtime.errors import CheckpointError

if TYPE_CHECKING:
    from runtime.drafter_config import DrafterConfig
    from runtime.target import Target

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TARGET_FILE = "target.json"
WRITTEN = "name a folder that runtime.train or runtime.export wrote"
TRAIN = "run: python -m runtime.train --config FILE"
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


def read_network(folder: Path) -> "DrafterConfig":
    """The network of a drafter folder.

    Raises:
        CheckpointError: There is no drafter, ``config.json`` says something that the network here
            does not do, or another file would change it. The message names the file.
    """
    from runtime.drafter_config import DrafterConfig
    from runtime.errors import ConfigError

    path = folder / CONFIG_FILE
    published = _read_object(path, "a drafter's config")
    if published is None:
        raise CheckpointError(f"there is no drafter in {folder} (no {path.name}); {WRITTEN}")
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


def target_record(meta: Mapping[str, Any]) -> dict[str, Any]:
    """``target.json`` of a drafter that is trained on prepared data.

    Args:
        meta: The data's ``meta.json``.
    """
    template = {"template": meta["template"]} if "template" in meta else {}
    return {**meta["target"], **template}


def read_target_record(folder: str | Path) -> dict[str, Any] | None:
    """``target.json`` of a drafter folder; None where there is none.

    Raises:
        CheckpointError: It cannot be read, or its name or digest is no text.
    """
    path = Path(folder) / TARGET_FILE
    record = _read_object(path, "a target's name and digest")
    if record is not None:
        for key in ("name", "digest"):
            if not isinstance(record.get(key), str):
                raise _unreadable(path, f"an object with a text {key!r}", record.get(key))
    return record


def same_target(folder: str | Path, target: "Target", report: Callable[[str], None]) -> bool | None:
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


def replace_files(folder: Path, files: Mapping[str, Callable[[Path], object] | None]) -> None:
    """Replace files of a folder by new ones that belong together.

    The last is removed first and comes last: what is there beside it always belongs to it.

    Args:
        folder: Made where it is missing.
        files: Name -> what writes the file to a path; None for a file that must not be there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    beside = {name: folder / f".{name}.partial" for name in files}
    try:
        for name, write in files.items():
            if write is not None:
                with naming(folder / name):
                    write(beside[name])
    except BaseException:
        for path in beside.values():
            path.unlink(missing_ok=True)
        raise
    (folder / list(files)[-1]).unlink(missing_ok=True)
    for name, write in files.items():
        if write is None:
            (folder / name).unlink(missing_ok=True)
        else:
            beside[name].replace(folder / name)


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
    return CheckpointError(f"{path} must be {what} ({found}); {WRITTEN}")
