"""The loss of packed rows: every document predicts its own next tokens."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from runtime.static.buffers import Field
from runtime.static.masks import BucketMasks

SUMS = ("loss", "weight", "tokens", "documents")
"""Of cross entropies in nats, of predictions, of tokens within documents, and of documents."""

LossOf = Callable[[Tensor, Tensor, Tensor], Tensor]


def summed_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Sum of weighted cross entropies.

    Args:
        logits: ``[R, V]``.
        labels: int64 ``[R]``.
        weights: float32 ``[R]``.
    """
    losses = functional.cross_entropy(logits.float(), labels, reduction="none")
    return (losses * weights).sum()


class PackedObjective:
    """The loss of one row length.

    Args:
        model: A causal LM of transformers that attends through ``packed_attention``.
        masks: Of the bucket; their runtime parameter is ``doc_offsets``.
        length: Tokens of a row.
        loss_of: ``summed_loss``, or a compiled form of it.
    """

    def __init__(self, *, model: Any, masks: BucketMasks, length: int, loss_of: LossOf) -> None:
        self.model = model
        self.masks = masks
        self.length = length
        self.loss_of = loss_of
        device = masks.starts.device
        self._positions = torch.arange(length, dtype=torch.int64, device=device)
        offsets = masks.params["doc_offsets"].shape
        self._offsets = torch.zeros(offsets, dtype=torch.int32, device=device)

    @property
    def fields(self) -> Mapping[str, Field]:
        """Tokens, which of them are learned, and the lengths of a row's documents."""
        B, documents = self.masks.batch, self._offsets.shape[1] - 2
        return {
            "input_ids": Field((B, self.length), torch.int64),
            "loss_mask": Field((B, self.length), torch.bool),
            "doc_lens": Field((B, documents), torch.int32),
        }

    def __call__(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The summed loss with its graph, and the sums of ``SUMS``."""
        input_ids, doc_lens = inputs["input_ids"], inputs["doc_lens"]
        # What is left of a row is one last document; a row of zeros is that one alone.
        torch.cumsum(doc_lens, dim=1, dtype=torch.int32, out=self._offsets[:, 1:-1])
        self._offsets[:, -1] = self.length
        self.masks.update({"doc_offsets": self._offsets})
        # A causal row's one span starts where its document does, and all the rest follows.
        doc_start = self.masks.starts[:, 0, 0]
        logits = self.model(
            input_ids,
            attention_mask=self.masks.mask(),
            position_ids=self._positions - doc_start,
            use_cache=False,
        ).logits
        predicts = (doc_start[:, 1:] == doc_start[:, :-1]) & inputs["loss_mask"][:, 1:]
        weights = predicts.flatten().float()
        labels = input_ids[:, 1:].flatten()
        loss = self.loss_of(logits[:, :-1].flatten(0, 1), labels, weights)
        with torch.no_grad():
            used = (doc_lens.sum(), (doc_lens > 0).sum())
            sums = torch.stack((loss.detach(), weights.sum(), *(count.float() for count in used)))
        return loss, sums
