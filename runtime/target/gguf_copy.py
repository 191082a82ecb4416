"""A copy of a small GGUF target in transformers' own format, made at its first use.

transformers parses a GGUF file three times over, in Python: 46 s for SmolLM2-135M on two cores,
each time a command starts. The copy, float32 as the file unpacks, loads in a second.
"""

import glob
import importlib.metadata
import shutil
from pathlib import Path

import torch

from cache.atomic import move_folder, staging_folder, temp_prefix
from cache.causes import naming
from maskgen.progress import say
from runtime.errors import TargetNotFoundError
from runtime.files.digests import user_cache
from runtime.files.lock import folder_lock
from runtime.files.writing import sync_file
from runtime.target.files import TargetFiles
from runtime.target.reader import plain_model, quiet_transformers, read_model, read_outline

LARGEST = 256 << 20
"""Bytes of a GGUF file; the copy of a larger one would take too much of the user's disk."""

WHOLE = "copy.sha256"
"""Holds the copy's own digest, so that a damaged one is made again."""


def copies() -> Path:
    """Where the copies are kept: ``flex-mask-compiler/targets`` in the user's cache folder."""
    return user_cache() / "targets"


def unpacked(files: TargetFiles, name: str) -> TargetFiles:
    """The same target as a transformers folder.

    Args:
        files: From ``find_target(name)``.
        name: As the user gave it.

    Returns:
        ``files`` themselves where they are no GGUF file, a large one, or cannot be copied.

    Raises:
        TargetNotFoundError: As ``read_outline`` and ``read_model``.
    """
    if files.gguf_file is None or (files.folder / files.gguf_file).stat().st_size > LARGEST:
        return files
    # Another transformers may read a GGUF file otherwise.
    version = importlib.metadata.version("transformers")
    folder = copies() / f"{files.digest[:16]}-transformers-{version}"
    plain = TargetFiles(folder=folder, gguf_file=None)
    if _is_whole(plain):
        return plain
    try:
        with folder_lock(folder.parent) as is_locked:
            # Another process may have made it meanwhile.
            if not _is_whole(plain):
                if is_locked:
                    _sweep(folder)
                _unpack(files, name, folder)
    except OSError as error:
        # A target that cannot be read is an OSError, too.
        if isinstance(error, TargetNotFoundError):
            raise
        if not _is_whole(plain):
            say(f"no copy of {files.gguf_file} is kept, so each start unpacks it again ({error})")
            return files
    return plain


def _unpack(files: TargetFiles, name: str, folder: Path) -> None:
    say(f"unpacking {files.gguf_file} into {folder}, this once")
    outline = read_outline(files, name)
    model = read_model(files, outline, torch.device("cpu"), torch.float32)
    with naming(folder), staging_folder(folder) as staging, quiet_transformers():
        made = staging / "made"
        outline.tokenizer.save_pretrained(made)
        plain_model(model).save_pretrained(made)
        digest = TargetFiles(folder=made, gguf_file=None).digest
        (made / WHOLE).write_text(digest, encoding="ascii")
        for path in made.rglob("*"):
            if path.is_file():
                sync_file(path)
        if folder.exists():
            folder.rename(staging / "damaged")
        move_folder(made, folder)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left of this copy, which may be a gigabyte each time."""
    for left in folder.parent.glob(f"{glob.escape(temp_prefix(folder))}*"):
        shutil.rmtree(left, ignore_errors=True)


def _is_whole(copied: TargetFiles) -> bool:
    try:
        return copied.digest == (copied.folder / WHOLE).read_text(encoding="ascii")
    except (OSError, ValueError, TargetNotFoundError):
        return False
