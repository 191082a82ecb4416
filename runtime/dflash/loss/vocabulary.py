"""The part of a vocabulary that a loss may be taken over: tokens that the training data hold."""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.data.dataset import Dataset

COMMON = 6000
"""Ids below it are always in: a tokenizer that merges pairs gives them to its commonest tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SeenTokens:
    """n tokens of V, and where each stands among them."""

    ids: Tensor
    """int64 ``[n]``, ascending."""
    rows: Tensor
    """int64 ``[V]``: the place of a token in ``ids``; 0 for one that is not there."""

    def to(self, device: torch.device) -> "SeenTokens":
        """The same on a device."""
        return SeenTokens(ids=self.ids.to(device), rows=self.rows.to(device))


def seen_tokens(dataset: Dataset, vocab_size: int) -> SeenTokens:
    """The tokens of all samples, and the common ones, on the CPU."""
    seen = torch.zeros(vocab_size, dtype=torch.bool, device="cpu")
    seen[:COMMON] = True
    for i in range(len(dataset)):
        seen[torch.as_tensor(dataset.sample(i).input_ids, device="cpu").long()] = True
    rows = (seen.cumsum(0) - 1).where(seen, torch.zeros((), dtype=torch.int64, device="cpu"))
    return SeenTokens(ids=seen.nonzero()[:, 0], rows=rows)
