"""Tokenised samples in a folder: written by ``runtime.prepare``, read by training and evaluation.

``{split}.safetensors`` holds every token of a split end to end: ``input_ids`` int32 ``[T]``,
``loss_mask`` uint8 ``[T]``, ``prompt_lens`` int32 ``[n]`` and ``offsets`` int64 ``[n + 1]``, and,
where ``runtime.prepare`` wrote it, what another split is made from: ``identities`` uint8
``[n, 32]``, ``files`` int32 ``[n]`` and ``indices`` int64 ``[n]``.
``{split}.features.safetensors`` holds the target's hidden states beside them, ``features`` bfloat16
``[T, K * H]``, where they are stored; with the last hidden state ``[T, (K + 1) * H]``.
``runtime.data.folder`` says how the files are named and replaced.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from runtime.data.folder import (
    META,
    PREPARE,
    SPLITS,
    checked_path,
    path_of,
    read_meta,
    replace_data,
    state_of,
)
from runtime.errors import DatasetError
from runtime.files.tensors import save_tensors

LOOKS = 5
"""Times a folder is read again because another process replaces the data meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One tokenised sample of S tokens."""

    input_ids: Tensor
    """int32 ``[S]``."""
    loss_mask: Tensor
    """uint8 ``[S]``, 1 on the tokens to be learned (answers, their end token included)."""
    prompt_len: int
    """Leading tokens that an evaluation which writes on starts from."""
    features: Tensor | None = None
    """Target hidden states bfloat16 ``[S, K * H]``, and H columns more with its last hidden state;
    None where they are not stored."""
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
        if meta["features"] == "stored" and len(self):
            path = path_of(folder, f"{split}.features.safetensors", meta)
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
            DatasetError: The folder is missing or damaged. Every byte of the split is read to
                tell, features too.
            LaterFormatError: It is of a later release.
        """
        if split not in SPLITS:
            raise DatasetError(f"a split must be one of {', '.join(SPLITS)}, found {split!r}")
        (found,) = _open(Path(folder), (split,))
        return found

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

    @property
    def has_last_hidden(self) -> bool:
        """Whether these end with the target's last hidden state, after its final norm."""
        stored = self.meta.get("stored_layer_ids", self.layer_ids)
        return self.has_features and len(stored) > len(self.layer_ids)

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

    def check_target(self, digest: str, layer_ids: Sequence[int] | None = None) -> None:
        """Refuse another target than the one the data was prepared with.

        Args:
            digest: Of the run's target.
            layer_ids: The layers that the run reads, if it reads any.

        Raises:
            DatasetError: The target's digest or the feature layers differ.
        """
        if digest != self.meta["target"]["digest"]:
            raise DatasetError(
                f"{self.folder} was prepared with target {self.meta['target']['name']!r} "
                f"({self.meta['target']['digest'][:12]}), the run's target is {digest[:12]}; "
                f"{PREPARE}"
            )
        if layer_ids is not None and tuple(layer_ids) != self.layer_ids:
            raise DatasetError(
                f"{self.folder} holds features of layers {list(self.layer_ids)}, the run asks for "
                f"{list(layer_ids)}; {PREPARE}"
            )


def open_splits(folder: str | Path) -> tuple[Dataset, ...]:
    """Open all of ``SPLITS``, of one dataset though another takes its place meanwhile.

    Raises:
        DatasetError: As ``Dataset.open``.
        LaterFormatError: As ``Dataset.open``.
    """
    return _open(Path(folder), SPLITS)


def _open(folder: Path, splits: Sequence[str]) -> tuple[Dataset, ...]:
    for _ in range(LOOKS):
        state = state_of(folder)
        try:
            meta = read_meta(folder)
            return tuple(_open_split(folder, split, meta) for split in splits)
        except DatasetError:
            if state_of(folder) == state:
                raise
    raise DatasetError(f"{folder} does not stay as it is; see which processes write there")


def _open_split(folder: Path, split: str, meta: Mapping[str, Any] | None) -> Dataset:
    if meta is None:
        raise DatasetError(f"{folder} holds no prepared data (no {META}); {PREPARE}")
    path = checked_path(folder, f"{split}.safetensors", meta)
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DatasetError(f"{path} cannot be read ({error}); {PREPARE}") from error
    if meta["features"] == "stored" and arrays["offsets"].numel() > 1:
        checked_path(folder, f"{split}.features.safetensors", meta)
    return Dataset(folder, split, meta, arrays)


def read_samples(folder: Path) -> list[Sample]:
    """The samples of all splits, in the order in which they were prepared.

    Raises:
        DatasetError: As ``Dataset.open``.
        LaterFormatError: As ``Dataset.open``.
    """
    splits = open_splits(folder)
    samples = [split.sample(i) for split in splits for i in range(len(split))]
    return sorted(samples, key=lambda sample: sample.index)


def write_dataset(
    folder: Path,
    splits: Mapping[str, Sequence[Sample]],
    meta: Mapping[str, Any],
    seen: str | None = None,
) -> dict[str, Any]:
    """Write a folder, replacing an earlier dataset in one step; see ``data_folder.replace_data``.

    Args:
        folder: Where it goes.
        splits: Samples of ``train`` and ``heldout``; all with features when
            ``meta["features"]`` is ``stored``.
        meta: Everything in ``meta.json`` but format and digests, which are added here.
        seen: What stood there when the work began, see ``data_folder.state_of``.

    Returns:
        ``meta.json`` as it is in the folder now.

    Raises:
        DatasetError: ``folder`` holds something else, or cannot be written.
        LaterFormatError: ``folder`` holds data of a later release.
    """
    stores = meta["features"] == "stored"
    if stores and any(sample.features is None for split in splits.values() for sample in split):
        raise DatasetError("every sample must have features where features are stored")
    files = {}
    for split in SPLITS:
        samples = splits[split]
        files[f"{split}.safetensors"] = partial(_save, _join, samples)
        if stores and samples:
            files[f"{split}.features.safetensors"] = partial(_save, _features, samples)
    return replace_data(folder, files, meta, seen)


def _save(
    tensors: Callable[[Sequence[Sample]], dict[str, Tensor]], samples: Sequence[Sample], path: Path
) -> None:
    save_tensors(tensors(samples), path)


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


def _features(samples: Sequence[Sample]) -> dict[str, Tensor]:
    stored = [sample.features for sample in samples if sample.features is not None]
    return {"features": torch.cat([features.to(torch.bfloat16) for features in stored])}
