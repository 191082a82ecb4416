"""Held-out data that a run is scored on while it trains: what a method has to offer for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from maskgen.entry import MaskEntry
from runtime.data.dataset import Dataset
from runtime.static.score import Scorer


@dataclass(frozen=True, kw_only=True)
class HeldOutInputs:
    """Data and masks of the score."""

    dataset: Dataset
    """The held-out samples."""
    entries: Mapping[int, MaskEntry]
    """Bucket length -> entry."""
    beside: Mapping[str, Mapping[int, MaskEntry]] = field(default_factory=dict)
    """As ``Inputs.beside``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutRow:
    """One row of a scoring step."""

    bucket: int
    """Its length."""
    sample: int
    """Whose score it is part of; a sample may have many rows."""


class HeldOut(Protocol):
    """A score of a module: one sum over another, over all held-out samples.

    ``rows`` and what ``fill`` writes stay the same for a whole run, so that scores compare.
    """

    name: str
    """Of the score, such as ``tau``; a row of metrics has it as ``heldout_tau``."""
    more_is_better: bool

    @property
    def rows(self) -> Sequence[HeldOutRow]:
        """At least one, and of each sample at least one with weight."""
        ...

    def scorer(self, module: nn.Module, length: int, batch: int, index: int) -> Scorer:
        """The score of one bucket.

        Args:
            module: From ``Trainee.module``; its objectives were made before.
            length: Of the bucket.
            batch: Rows of a step.
            index: Which of the process's devices.
        """
        ...

    def fill(self, tensors: Mapping[str, Tensor], row: int, number: int) -> None:
        """Write one row into a slot's host tensors, which are 0.

        Args:
            tensors: ``[batch, ...]`` by field name.
            row: Where in the batch.
            number: Which of ``rows``.
        """
        ...
