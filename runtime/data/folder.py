"""The files of a prepared data folder: their names, their digests, and how all change as one.

``meta.json``, a sealed document of format 2, names every other file by its SHA-256, and 16 digits
of that stand in the file's own name: ``train.0123456789abcdef.safetensors``. A new dataset is
written beside the old one in the same folder, which may be a link or a mount point; then
``meta.json`` is replaced in one step, and what it no longer names goes. So a reader finds the old
data or the new, wherever a writer is killed. Format 1 had plain names and no seal, and is read.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cache.atomic import replace_file, staging_folder, sync_folder, temp_prefix
from cache.causes import naming, why
from runtime.errors import DatasetError
from runtime.files.digests import sha256_of_file
from runtime.files.lock import folder_lock
from runtime.files.sealed import UNSEALED, DamagedError, read_sealed, seal
from runtime.files.writing import sync_file

FORMAT = 2
SPLITS = ("train", "heldout")
META = "meta.json"
PREPARE = "run: python -m runtime.prepare --config FILE"
OTHER = "choose another [data] folder"
DATA_FILE = re.compile(r"(?:train|heldout)(?:\.features)?(\.[0-9a-f]{16})?\.safetensors")
ADDED_BY_SYSTEMS = {"lost+found", ".snapshot", ".DS_Store"}
"""What may lie in a volume that is empty."""
STAGING = temp_prefix(Path(META))
"""How names begin that a killed writer left."""
LIKE: Mapping[str, Any] = {
    "sha256": {},
    "features": "online",
    "context": 64,
    "layer_ids": [1],
    "stored_layer_ids": [1],
    "feature_scale": [1.0],
    "target": {"name": "a", "digest": "0"},
    "template": {"chat_template": "target", "keywords": {}},
    "counts": {},
    "dropped": {},
    "noted": {},
    "places": {},
    "split": {},
    "settings": {},
}
"""Of which kinds the values of ``meta.json`` are that are read again."""
MAY_LACK = {
    *("template", "counts", "dropped", "noted", "places", "split", "settings"),
    "stored_layer_ids",
}
"""What ``runtime.prepare`` writes and no run needs; ``stored_layer_ids`` where the features have
more columns than those of ``layer_ids``."""


def read_meta(folder: Path) -> dict[str, Any] | None:
    """The parsed ``meta.json`` of a folder; None when there is none.

    Raises:
        DatasetError: It is damaged, or cannot be read.
        LaterFormatError: It is of a later release.
    """
    path = folder / META
    try:
        meta = read_sealed(path, FORMAT, OTHER)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error}); {PREPARE}") from error
    except DamagedError as error:
        raise DatasetError(f"{error}; {PREPARE}") from error
    wrong = _unlike(meta, LIKE, "")
    if wrong is None and len(meta["feature_scale"]) != len(meta["layer_ids"]):
        wrong = "feature_scale has not a number for each of layer_ids"
    if wrong is None and "stored_layer_ids" in meta:
        ids = meta["layer_ids"]
        if meta["stored_layer_ids"][: len(ids)] != ids:
            wrong = "stored_layer_ids do not begin with layer_ids"
    if wrong is not None:
        raise DatasetError(f"{path} must be as it was written: {wrong}; {PREPARE}")
    return {"format": UNSEALED, **meta}


def state_of(folder: Path) -> str:
    """What stands in a folder: a digest of ``meta.json``, empty when there is none.

    Raises:
        DatasetError: It cannot be read.
    """
    try:
        return sha256_of_file(folder / META)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise DatasetError(f"{folder / META} cannot be read ({error}); {PREPARE}") from error


def path_of(folder: Path, name: str, meta: Mapping[str, Any]) -> Path:
    """Where a file lies, such as ``train.safetensors``.

    Raises:
        DatasetError: The folder's ``meta.json`` does not name it.
    """
    sha256 = meta["sha256"].get(name)
    if not isinstance(sha256, str):
        raise DatasetError(f"{folder / META} is damaged: it must name {name} by SHA-256; {PREPARE}")
    if meta["format"] == UNSEALED:
        return folder / name
    stem, _, suffix = name.rpartition(".")
    return folder / f"{stem}.{sha256[:16]}.{suffix}"


def checked_path(folder: Path, name: str, meta: Mapping[str, Any]) -> Path:
    """As ``path_of``, once every byte of the file has been read.

    Raises:
        DatasetError: It is missing, or not the file that ``meta.json`` names.
    """
    path = path_of(folder, name, meta)
    try:
        found = sha256_of_file(path)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error}); {PREPARE}") from error
    if found != meta["sha256"][name]:
        raise DatasetError(f"{path} is not the file that {META} names by SHA-256; {PREPARE}")
    return path


def check_replaceable(folder: Path) -> None:
    """Refuse to write where there is anything but an earlier dataset, be it a damaged one.

    Raises:
        DatasetError: ``folder`` is there, and neither empty nor just a dataset's files.
        LaterFormatError: The dataset is of a later release.
    """
    if not folder.exists():
        return
    if folder.is_dir():
        names = {path.name for path in folder.iterdir() if not _is_passing(path.name)}
    else:
        names = {folder.name}
    found = {name: DATA_FILE.fullmatch(name) for name in names - {META}}
    # Other tools write a meta.json, and a train.safetensors: one alone does not show whose it is.
    ours = (
        bool(found)
        and all(found.values())
        and (META in names or all(m and m[1] for m in found.values()))
    )
    if names and not ours:
        raise DatasetError(
            f"{folder} must be empty or hold prepared data, found other files; {OTHER}"
        )
    with contextlib.suppress(DatasetError):
        read_meta(folder)


def check_writable(folder: Path) -> None:
    """Refuse now what ``replace_data`` would refuse once all is answered.

    Raises:
        DatasetError: As ``check_replaceable``, or the folder cannot be written.
        LaterFormatError: As ``check_replaceable``.
    """
    check_replaceable(folder)
    whole = Path(os.path.realpath(folder))
    missing = [made for made in (whole, *whole.parents) if not made.exists()]
    with _writing(folder):
        with staging_folder(folder / META) as staging:
            (staging / "made").touch()
            moved = staging.with_name(f"{staging.name}-moved")
            (staging / "made").replace(moved)
            moved.unlink()
        for made in missing:
            # Unless another process writes there by now.
            with contextlib.suppress(OSError):
                made.rmdir()


def replace_data(
    folder: Path,
    files: Mapping[str, Callable[[Path], object]],
    about: Mapping[str, Any],
    seen: str | None = None,
) -> dict[str, Any]:
    """Write a dataset, and let it take the place of an earlier one in one step.

    Args:
        folder: Made where it is missing; see ``check_replaceable``.
        files: Name -> what writes the file to a path.
        about: What ``meta.json`` says beside format and digests.
        seen: ``state_of`` the folder when the work on this dataset began; None to replace whatever
            is there.

    Returns:
        ``meta.json`` as it is now: of another process that wrote the same dataset meanwhile.

    Raises:
        DatasetError: As ``check_writable``, or another process wrote another dataset meanwhile.
        LaterFormatError: As ``check_replaceable``.
    """
    check_replaceable(folder)
    with _writing(folder), staging_folder(folder / META) as staging:
        other = _written_meanwhile(folder, about, seen)
        if other is not None:
            return other
        sha256 = {}
        for name, write in files.items():
            write(staging / name)
            sync_file(staging / name)
            sha256[name] = sha256_of_file(staging / name)
        rest = {key: value for key, value in about.items() if key not in ("format", "sha256")}
        meta = {"format": FORMAT, **rest, "sha256": sha256}
        document, paths = seal(meta), [path_of(folder, name, meta) for name in files]
        for name, path in zip(files, paths, strict=True):
            (staging / name).replace(path)
        sync_folder(folder)
        replace_file(folder / META, document, staging)
        # Nobody finds the old files any more; who has them open keeps them.
        for path in folder.iterdir():
            if DATA_FILE.fullmatch(path.name) and path not in paths:
                path.unlink()
        return meta


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        with naming(folder), folder_lock(folder) as is_locked:
            for path in folder.iterdir():
                if is_locked and path.name.startswith(STAGING):
                    _remove(path)
            yield
    except OSError as error:
        what, helps = why(error, str(folder))
        raise DatasetError(f"{folder} must take prepared data: {what}; {helps}") from error


def _written_meanwhile(
    folder: Path, about: Mapping[str, Any], seen: str | None
) -> dict[str, Any] | None:
    if seen is None or state_of(folder) == seen:
        return None
    other = read_meta(folder)
    if other is None:
        return None
    if any(other.get(key) != about.get(key) for key in ("key", "split")):
        raise DatasetError(
            f"another prepare wrote other data to {folder} while this one worked; run it again to "
            f"replace them (its answers are kept), or {OTHER}"
        )
    return other


def _unlike(found: Any, pattern: Any, where: str) -> str | None:
    """What of a JSON value is of another kind than the pattern has it; None where nothing is."""
    kind: Any = (int, float) if isinstance(pattern, float) else type(pattern)
    if not isinstance(found, kind) or isinstance(found, bool):
        return f"{where} is {found!r:.40}, not like {pattern!r}"
    parts: Iterable[tuple[Any, Any, str]] = ()
    if isinstance(pattern, list):
        parts = ((item, pattern[0], f"{where}[{i}]") for i, item in enumerate(found))
    elif isinstance(pattern, dict):
        missing = pattern.keys() - found.keys() - MAY_LACK
        if missing:
            return f"{where or 'the document'} has no {min(missing)!r}"
        parts = (
            (found[key], pattern[key], f"{where}.{key}".lstrip("."))
            for key in pattern.keys() & found.keys()
        )
    return next((wrong for part in parts if (wrong := _unlike(*part)) is not None), None)


def _is_passing(name: str) -> bool:
    return name in ADDED_BY_SYSTEMS or name.startswith((STAGING, ".nfs"))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
