"""A copy of a small GGUF target in transformers' own format, made at its first use.

transformers parses a GGUF file three times over, in Python: 46 s for SmolLM2-135M on two cores,
each time a command starts. The copy, float32 as the file unpacks, loads in a second.
"""

import copy
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import torch

from cache.atomic import staging_folder
from runtime.progress import say
from runtime.target_files import TargetFiles, quiet_transformers, read_target

LARGEST = 256 << 20
"""Bytes of a GGUF file; the copy of a larger one would take too much of the user's disk."""

DONE = "config.json"
"""Without it a folder is no model; a copy appears whole or not at all."""


def copies() -> Path:
    """Where the copies are kept: ``flex-mask-compiler/targets`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flex-mask-compiler" / "targets"


def unpacked(files: TargetFiles, name: str) -> TargetFiles:
    """The same target as a transformers folder.

    Args:
        files: From ``find_target(name)``.
        name: As the user gave it.

    Returns:
        ``files`` themselves where they are no GGUF file, a large one, or cannot be copied.

    Raises:
        TargetNotFoundError: As ``read_target``.
    """
    if files.gguf_file is None or (files.folder / files.gguf_file).stat().st_size > LARGEST:
        return files
    # Another transformers may read a GGUF file otherwise.
    version = importlib.metadata.version("transformers")
    folder = copies() / f"{files.digest[:16]}-transformers-{version}"
    plain = TargetFiles(folder=folder, gguf_file=None)
    if (folder / DONE).is_file():
        return plain
    say(f"unpacking {files.gguf_file} into {folder}, this once")
    model, tokenizer = read_target(files, name, torch.device("cpu"), torch.float32)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with staging_folder(folder) as staging, quiet_transformers():
            tokenizer.save_pretrained(staging)
            _plain(model).save_pretrained(staging)
            staging.rename(folder)
    except OSError as error:
        # Another process may have been first.
        if not (folder / DONE).is_file():
            say(f"no copy of {files.gguf_file} is kept, so each start unpacks it again ({error})")
            return files
    return plain


def _plain(model: Any) -> Any:
    """The same model, which transformers saves; it calls what came of a GGUF file quantized."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain
