"""A copy of a small GGUF target in transformers' own format, made at its first use.

transformers parses a GGUF file three times over, in Python: 46 s for SmolLM2-135M on two cores,
each time a command starts. The copy, float32 as the file unpacks, loads in a second.
"""

import copy
import importlib.metadata
from pathlib import Path
from typing import Any

import torch

from cache.atomic import staging_folder
from cache.causes import naming
from runtime.errors import TargetNotFoundError
from runtime.file_digests import user_cache
from runtime.progress import say
from runtime.target_files import TargetFiles
from runtime.target_reader import quiet_transformers, read_model, read_outline

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
    say(f"unpacking {files.gguf_file} into {folder}, this once")
    outline = read_outline(files, name)
    model = read_model(files, outline, torch.device("cpu"), torch.float32)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with naming(folder), staging_folder(folder) as staging, quiet_transformers():
            made = staging / "made"
            outline.tokenizer.save_pretrained(made)
            _plain(model).save_pretrained(made)
            digest = TargetFiles(folder=made, gguf_file=None).digest
            (made / WHOLE).write_text(digest, encoding="ascii")
            if folder.exists() and not _is_whole(plain):
                folder.rename(staging / "damaged")
            made.rename(folder)
    except OSError as error:
        # Another process may have been first.
        if not _is_whole(plain):
            say(f"no copy of {files.gguf_file} is kept, so each start unpacks it again ({error})")
            return files
    return plain


def _is_whole(copied: TargetFiles) -> bool:
    try:
        return copied.digest == (copied.folder / WHOLE).read_text(encoding="ascii")
    except (OSError, ValueError, TargetNotFoundError):
        return False


def _plain(model: Any) -> Any:
    """The same model, which transformers saves; it calls what came of a GGUF file quantized."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain
