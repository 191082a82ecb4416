"""One scoring step of one bucket on one device: a forward pass alone, over static tensors only."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from runtime.static.buffers import Field, StaticInputs


class Scorer(Protocol):
    """How well a module does on the rows of one bucket."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The static inputs, by name."""
        ...

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Score rows; every tensor that outlives the call was made before it.

        Args:
            inputs: One tensor a field; a row of zeros has no weight.

        Returns:
            float32 ``[rows, 2]``: for each row a sum, and the weight that it is divided by once
            the rows are added up.
        """
        ...


class ScoreStep:
    """The step of one bucket; nothing is learned in it.

    Args:
        scorer: The score.
        rows: Of a step.
        device: Where it runs.
    """

    def __init__(self, scorer: Scorer, rows: int, device: torch.device) -> None:
        self.scorer = scorer
        self.inputs = StaticInputs(scorer.fields, device)
        self.found = torch.zeros(rows, 2, dtype=torch.float32, device=device)
        """What the scorer returned last."""

    def __call__(self) -> None:
        """Run the step; every input and output is a static tensor."""
        with torch.no_grad():
            self.found.copy_(self.scorer(self.inputs.tensors))
