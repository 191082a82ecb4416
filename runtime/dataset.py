"""A folder of tokenised samples: written by ``runtime.prepare``, read by training and evaluation.

``meta.json`` describes the folder. ``{split}.safetensors`` holds every token of a split end to
end: ``input_ids`` int32 ``[T]``, ``loss_mask`` uint8 ``[T]``, ``prompt_lens`` int32 ``[n]`` and
``offsets`` int64 ``[n + 1]``, and, where ``runtime.prepare`` wrote it, what another split is made
from: ``identities`` uint8 ``[n, 32]``, ``files`` int32 ``[n]`` and ``indices`` int64 ``[n]``.
``{split}.features.safetensors`` holds the target's hidden states beside them, ``features`` bfloat16
``[T, K * H]``, where they are stored. ``meta.json`` names the SHA-256 of every such file, and
opening a split checks those of its own.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime.errors import DatasetError

FORMAT = 1
SPLITS = ("train", "heldout")
META = "meta.json"
FILES = {META, *(f"{split}{kind}.safetensors" for split in SPLITS for kind in ("", ".features"))}
"""Everything that a folder may hold."""
LIKE: Mapping[str, Any] = {
    "sha256": {},
    "features": "online",
    "context": 64,
    "layer_ids": [1],
    "feature_scale": [1.0],
    "target": {"name": "a", "digest": "0"},
    "template": {"chat_template": "target", "keywords": {}},
    "counts": {},
    "dropped": {},
    "noted": {},
    "places": {},
    "split": {},
}
"""Of which kinds the values of ``meta.json`` are that are read again."""
MAY_LACK = {"template", "counts", "dropped", "noted", "places", "split"}
"""What ``runtime.prepare`` writes and no run needs."""
PREPARE = "run: python -m runtime.prepare --config FILE"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One tokenised sample of S tokens."""

    input_ids: Tensor
    """int32 ``[S]``."""
    loss_mask: Tensor
    """uint8 ``[S]``, 1 on the tokens to be learned (answers, their end token included)."""
    prompt_len: int
    """Leading tokens that a drafting test starts from."""
    features: Tensor | None = None
    """Target hidden states bfloat16 ``[S, K * H]``, None where they are not stored."""
    identity: str = ""
    """SHA-256 of its prompt in hex, which decides the split; empty where it is not known."""
    file: int = 0
    """Which of the prompt files it is from."""
    index: int = 0
    """Its place among the samples of all splits."""


class Dataset:
    """One split of a prepared folder. Safe to read from several threads."""

    def __init__(
        self, folder: Path, split: str, meta: Mapping[str, Any], arrays: Mapping[str, Tensor]
    ) -> None:
        self.folder = folder
        self.split = split
        self.meta: Mapping[str, Any] = meta
        """The parsed ``meta.json``."""
        self._arrays = arrays
        self._offsets: list[int] = arrays["offsets"].tolist()
        self._features: Any = None
        path = folder / f"{split}.features.safetensors"
        if meta["features"] == "stored" and len(self):
            try:
                opened: Any = safe_open(path, framework="pt")
                self._features = opened.get_slice("features")
                rows = self._features.get_shape()[0]
            except (OSError, SafetensorError) as error:
                raise DatasetError(f"{path} cannot be read ({error}); {PREPARE}") from error
            if rows != self._offsets[-1]:
                raise DatasetError(
                    f"{path} must hold {self._offsets[-1]} rows, one a token, found {rows}; "
                    f"{PREPARE}"
                )

    @classmethod
    def open(cls, folder: str | Path, split: str) -> "Dataset":
        """Open ``train`` or ``heldout``.

        Raises:
            DatasetError: The folder is missing, of another format, or damaged. Every byte of the
                split is read to tell, features too.
        """
        folder = Path(folder)
        meta = read_meta(folder)
        if meta is None:
            raise DatasetError(f"{folder} holds no prepared data (no {META}); {PREPARE}")
        if split not in SPLITS:
            raise DatasetError(f"a split must be one of {', '.join(SPLITS)}, found {split!r}")
        path = folder / f"{split}.safetensors"
        _check_digest(path, meta)
        try:
            arrays = load_file(path)
        except (OSError, SafetensorError) as error:
            raise DatasetError(f"{path} cannot be read ({error}); {PREPARE}") from error
        if meta["features"] == "stored" and arrays["offsets"].numel() > 1:
            _check_digest(folder / f"{split}.features.safetensors", meta)
        return cls(folder, split, meta, arrays)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [b - a for a, b in zip(self._offsets, self._offsets[1:], strict=False)]

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Target layers whose outputs are the features, 0-based."""
        return tuple(self.meta["layer_ids"])

    @property
    def feature_scale(self) -> tuple[float, ...]:
        """Root mean square of each layer's features over the train split."""
        return tuple(self.meta["feature_scale"])

    @property
    def has_features(self) -> bool:
        """Whether ``sample`` returns features."""
        return self._features is not None

    def sample(self, i: int) -> Sample:
        """The i-th sample.

        Raises:
            IndexError: There is no such sample.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)} in {self.folder} ({self.split})")
        a, b = self._offsets[i], self._offsets[i + 1]
        origin: dict[str, Any] = {}
        if "identities" in self._arrays:
            origin["identity"] = bytes(self._arrays["identities"][i].tolist()).hex()
            origin["file"] = int(self._arrays["files"][i])
            origin["index"] = int(self._arrays["indices"][i])
        return Sample(
            input_ids=self._arrays["input_ids"][a:b],
            loss_mask=self._arrays["loss_mask"][a:b],
            prompt_len=int(self._arrays["prompt_lens"][i]),
            features=None if self._features is None else self._features[a:b],
            **origin,
        )

    def check_target(self, digest: str, layer_ids: Sequence[int]) -> None:
        """Refuse another target than the one the data was prepared with.

        Raises:
            DatasetError: The target's digest or the feature layers differ.
        """
        if digest != self.meta["target"]["digest"]:
            raise DatasetError(
                f"{self.folder} was prepared with target {self.meta['target']['name']!r} "
                f"({self.meta['target']['digest'][:12]}), the run's target is {digest[:12]}; "
                f"{PREPARE}"
            )
        if tuple(layer_ids) != self.layer_ids:
            raise DatasetError(
                f"{self.folder} holds features of layers {list(self.layer_ids)}, the run asks for "
                f"{list(layer_ids)}; {PREPARE}"
            )


def read_meta(folder: Path) -> dict[str, Any] | None:
    """The parsed ``meta.json`` of a folder; None when there is none.

    Raises:
        DatasetError: It is no JSON, or of another format version.
    """
    try:
        meta: Any = json.loads((folder / META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DatasetError(f"{folder / META} cannot be read ({error}); {PREPARE}") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        found = meta.get("format") if isinstance(meta, dict) else None
        raise DatasetError(
            f"{folder / META} must be of format {FORMAT}, found {found!r}; {PREPARE}"
        )
    wrong = _unlike(meta, LIKE, "")
    if wrong is None and len(meta["feature_scale"]) != len(meta["layer_ids"]):
        wrong = "feature_scale has not a number for each of layer_ids"
    if wrong is not None:
        raise DatasetError(f"{folder / META} must be as it was written: {wrong}; {PREPARE}")
    return meta


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


def read_samples(folder: Path) -> list[Sample]:
    """The samples of all splits, in the order in which they were prepared.

    Raises:
        DatasetError: As ``Dataset.open``.
    """
    splits = [Dataset.open(folder, split) for split in SPLITS]
    samples = [split.sample(i) for split in splits for i in range(len(split))]
    return sorted(samples, key=lambda sample: sample.index)


def check_replaceable(folder: Path) -> None:
    """Refuse to write over anything but an earlier dataset, be it a damaged one.

    Raises:
        DatasetError: ``folder`` is there, and neither empty nor just a dataset's files.
    """
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {folder.name}
    # Other tools write a meta.json too: alone it does not show whose folder this is.
    if names and not (META in names and len(names) > 1 and names <= FILES):
        raise DatasetError(
            f"{folder} must be empty or hold prepared data, found other files; "
            "choose another [data] folder"
        )


def write_dataset(
    folder: Path, splits: Mapping[str, Sequence[Sample]], meta: Mapping[str, Any]
) -> None:
    """Write a folder whole: beside, then in one rename, replacing an earlier dataset.

    Args:
        folder: Where it goes; see ``check_replaceable``.
        splits: Samples of ``train`` and ``heldout``; all with features when
            ``meta["features"]`` is ``stored``.
        meta: Everything in ``meta.json`` but format and digests, which are added here.

    Raises:
        DatasetError: ``folder`` holds something else.
    """
    check_replaceable(folder)
    beside = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    sha256 = {}
    for split in SPLITS:
        samples = splits[split]
        path = beside / f"{split}.safetensors"
        save_file(_join(samples), path)
        sha256[path.name] = _sha256(path)
        if meta["features"] == "stored" and samples:
            features = torch.cat([_stored_features(sample) for sample in samples])
            path = beside / f"{split}.features.safetensors"
            save_file({"features": features}, path)
            sha256[path.name] = _sha256(path)
    document = {"format": FORMAT, **meta, "sha256": sha256}
    (beside / META).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    beside.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _join(samples: Sequence[Sample]) -> dict[str, Tensor]:
    none = torch.zeros(0, dtype=torch.int32, device="cpu")
    lengths = [0, *(sample.input_ids.numel() for sample in samples)]
    prompts = [sample.prompt_len for sample in samples]
    origin = {}
    if all(sample.identity for sample in samples):
        identities = [list(bytes.fromhex(sample.identity)) for sample in samples]
        origin = {
            "identities": torch.tensor(identities, dtype=torch.uint8, device="cpu").reshape(-1, 32),
            "files": torch.tensor([s.file for s in samples], dtype=torch.int32, device="cpu"),
            "indices": torch.tensor([s.index for s in samples], dtype=torch.int64, device="cpu"),
        }
    return {
        "input_ids": torch.cat([none, *(s.input_ids for s in samples)]).to(torch.int32),
        "loss_mask": torch.cat([none, *(s.loss_mask for s in samples)]).to(torch.uint8),
        "prompt_lens": torch.tensor(prompts, dtype=torch.int32, device="cpu"),
        "offsets": torch.tensor(lengths, dtype=torch.int64, device="cpu").cumsum(0),
        **origin,
    }


def _stored_features(sample: Sample) -> Tensor:
    if sample.features is None:
        raise DatasetError("every sample must have features where features are stored")
    return sample.features.to(torch.bfloat16)


def _check_digest(path: Path, meta: Mapping[str, Any]) -> None:
    try:
        found = _sha256(path)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read ({error}); {PREPARE}") from error
    if found != meta["sha256"].get(path.name):
        raise DatasetError(f"{path} is not the file that {META} names by SHA-256; {PREPARE}")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
