"""tau on held-out text while a drafter trains, drafts checked against the text itself.

Every supervised position that a whole draft block follows is an anchor once: a sample's anchors go
in ascending order into as many rows as they need.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from maskgen.buckets import BucketPlan
from runtime.dflash.loss.head import CHUNK_ROWS
from runtime.dflash.network.config import DrafterConfig
from runtime.dflash.network.drafter import Drafter
from runtime.dflash.network.markov import tokens_before
from runtime.dflash.step.draft_batch import draft_rows
from runtime.dflash.step.draft_bucket import DraftBucket
from runtime.dflash.step.samples import fill_sample, sliding_entry
from runtime.dflash.step.sums import accepted_tokens
from runtime.errors import NoSamplesError
from runtime.static.buffers import Field
from runtime.target.frozen import FrozenTarget
from runtime.training.heldout import HeldOutInputs, HeldOutRow


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AnchorsRow(HeldOutRow):
    """Some of a sample's anchors."""

    anchors: NDArray[np.int64]
    """Ascending."""


class HeldOutDrafts:
    """See ``runtime.training.heldout.HeldOut``.

    Args:
        inputs: Held-out samples, and parametric entries by context.
        targets: Frozen parts, one for each of the process's devices.
        network: The drafter's.
        samples: The first so many are scored; 0 for all.

    Raises:
        NoSamplesError: None has an anchor.
    """

    name = "tau"
    more_is_better = True

    def __init__(
        self,
        inputs: HeldOutInputs,
        targets: Sequence[FrozenTarget],
        *,
        network: DrafterConfig,
        samples: int = 0,
    ) -> None:
        self.dataset, self.entries = inputs.dataset, inputs.entries
        self.beside = inputs.beside
        self.targets = targets
        buckets = BucketPlan(tuple(self.entries)).buckets_of(self.dataset.lengths)
        count = min(samples or len(self.dataset), len(self.dataset))
        self.rows: list[AnchorsRow] = []
        for sample in range(count):
            bucket = int(buckets[sample])
            size = self.entries[bucket].bucket.Q_LEN // network.draft_block_size
            loss_mask = self.dataset.sample(sample).loss_mask.numpy()
            found = whole_blocks(loss_mask, network.reach)
            self.rows += [
                AnchorsRow(bucket=bucket, sample=sample, anchors=found[start : start + size])
                for start in range(0, len(found), size)
            ]
        if not self.rows:
            raise NoSamplesError(
                f"{self.dataset.folder} must hold a held-out sample to score; choose others with "
                "data.heldout and data.heldout_from, or set evaluate.every = 0",
                {f"without {network.reach} supervised tokens in a row": count},
            )

    def scorer(self, module: nn.Module, length: int, batch: int, index: int) -> "DraftScorer":
        """Drafts of one bucket; the layers of a drafter on a GPU are compiled by its loss."""
        assert isinstance(module, Drafter)
        entry = self.entries[length]
        sliding = sliding_entry(self.beside, entry)
        return DraftScorer(DraftBucket(module, self.targets[index], entry, batch, sliding=sliding))

    def fill(self, tensors: Mapping[str, Tensor], row: int, number: int) -> None:
        """Write a sample and some of its anchors into one row."""
        which = self.rows[number]
        fill_sample(tensors, row, self.dataset, which.sample)
        tensors["anchors"][row, : len(which.anchors)] = torch.from_numpy(which.anchors)
        tensors["n_valid"][row] = len(which.anchors)


def whole_blocks(loss_mask: NDArray[np.uint8], reach: int) -> NDArray[np.int64]:
    """Positions of which a whole draft block is supervised, the anchor included.

    Args:
        loss_mask: uint8 ``[S]``, 1 where a token is trained on.
        reach: Of the drafter, see ``DrafterConfig.reach``.

    Returns:
        int64 ``[M]``, ascending.
    """
    if len(loss_mask) < reach:
        return np.zeros(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(loss_mask, reach)
    return np.flatnonzero(windows.all(axis=1))


class DraftScorer:
    """Tokens that a call of the target would give at each row's anchors, and how many anchors."""

    def __init__(self, bucket: DraftBucket) -> None:
        self.bucket = bucket

    @property
    def fields(self) -> Mapping[str, Field]:
        """The bucket's."""
        return self.bucket.fields

    def __call__(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """See ``runtime.static.score.Scorer``."""
        bucket = self.bucket
        batch = bucket.read(inputs)
        targets = bucket.targets(inputs, gamma=0)
        rows = draft_rows(bucket.drafter, bucket.target, batch)
        # The true tokens before, where decoding takes its own drafts: up to the first wrong draft
        # these are the same, and what comes after it does not count.
        before = tokens_before(batch.anchor_tokens, targets.labels)
        # In chunks, as the loss has them: the logits of all rows would be the largest tensor.
        chosen = torch.cat(
            [
                self._logits(*chunk).argmax(dim=-1)
                for chunk in zip(
                    torch.split(rows, CHUNK_ROWS),
                    torch.split(before.flatten(), CHUNK_ROWS),
                    strict=True,
                )
            ]
        )
        correct = (chosen.view_as(targets.labels) == targets.labels).float()
        whole, accepted = accepted_tokens(correct, targets.weights)
        return torch.stack((accepted.sum(dim=1), whole.sum(dim=1)), dim=1)

    def _logits(self, rows: Tensor, before: Tensor) -> Tensor:
        """``[R, V]`` of ``rows [R, H]`` and the tokens before them, ``[R]``."""
        logits = rows @ self.bucket.target.head_weight.T
        head = self.bucket.drafter.markov_head
        return logits if head is None else logits.float() + head.logits(head.rows(before))
