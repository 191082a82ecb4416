"""A sample in the making, which may still be answered, cut or dropped."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.data.dataset import Sample


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidate:
    """A sample in the making."""

    identity: str
    """SHA-256 of its prompt; decides the split."""
    source: str
    file: int = 0
    """Which of the prompt files it is from."""
    input_ids: list[int]
    loss_mask: list[int]
    prompt_len: int
    features: Tensor | None = None
    is_open: bool = False
    """Whether it still has to be answered."""


def to_samples(candidates: Sequence[Candidate]) -> list[Sample]:
    """What is written of candidates."""
    return [
        Sample(
            input_ids=torch.tensor(candidate.input_ids, dtype=torch.int32, device="cpu"),
            loss_mask=torch.tensor(candidate.loss_mask, dtype=torch.uint8, device="cpu"),
            prompt_len=candidate.prompt_len,
            features=candidate.features,
            identity=candidate.identity,
            file=candidate.file,
            index=index,
        )
        for index, candidate in enumerate(candidates)
    ]
