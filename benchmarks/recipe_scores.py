"""What a drafter makes of held-out text, sample by sample, drafts checked against the text.

Eager and dense: no part of what is measured is used to measure it but the network itself.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskgen.families.dflash import dflash
from runtime.data.dataset import Dataset
from runtime.dflash.folder.saved_drafter import load_published
from runtime.dflash.network.drafter import Drafter, DrafterConfig
from runtime.dflash.step.draft_batch import DraftBatch, draft_rows
from runtime.dflash.step.heldout import whole_blocks
from runtime.static.attention import dense_attention
from runtime.target.frozen import FrozenTarget
from runtime.target.model import Target

COLUMNS = ("tokens of a call", "calls", "overlap", "slots", "tokens of a sampled call")
"""Sums over a sample's draft blocks: greedy tokens, blocks, min(p, q), slots, and the tokens that a
call would give if drafts were drawn and accepted by chance: 1 + the sum of products of overlaps."""


@torch.inference_mode()
def scores(target: Target, folder: Path, dataset: Dataset) -> NDArray[np.float64]:
    """Score a published drafter on every supervised position that a whole draft block follows.

    Args:
        target: In float32.
        folder: The drafter's.
        dataset: Held-out samples.

    Returns:
        ``[samples, 5]``, see ``COLUMNS``; samples without such a position are left out.
    """
    drafter = load_published(folder, device=target.device, dtype=torch.float32)
    network = drafter.config
    frozen = FrozenTarget(
        embed_weight=target.embed_weight,
        head_weight=target.head_weight,
        feature_scale=torch.ones(len(network.target_layer_ids), device=target.device),
        features=None,
    )
    texts = (_text(target, dataset, number, network) for number in range(len(dataset)))
    return np.array([_score(frozen, drafter, text) for text in texts if text is not None])


class Text(NamedTuple):
    """A sample, and what the target makes of it."""

    batch: DraftBatch
    positions: Tensor
    """``[blocks, slots]``, of the drafted tokens."""
    p: Tensor
    """``[rows, V]``."""


def _text(target: Target, dataset: Dataset, number: int, network: DrafterConfig) -> Text | None:
    sample, size = dataset.sample(number), network.draft_block_size
    found = whole_blocks(sample.loss_mask.numpy(), size)
    if not len(found):
        return None
    device = target.device
    ids = torch.as_tensor(sample.input_ids, device="cpu").long().to(device)[None]
    anchors = torch.from_numpy(found).to(device, torch.int32)[None]
    features = target.features(ids, (*network.target_layer_ids, target.num_layers))
    H = target.hidden_size
    Q_LEN = len(found) * size
    mask = dflash(Q_LEN, ids.shape[1] + Q_LEN, draft_block_size=size, anchors=anchors).dense()
    positions = anchors[0].long()[:, None] + torch.arange(1, size, device=device)
    teacher = features[0, :, -H:][positions - 1].flatten(0, 1) @ target.head_weight.T
    batch = DraftBatch(ids, features[..., :-H], anchors, dense_attention(mask))
    return Text(batch, positions, teacher.softmax(dim=-1))


def _score(frozen: FrozenTarget, drafter: Drafter, text: Text) -> Sequence[float]:
    ids = text.batch.input_ids[0]
    rows = draft_rows(drafter, frozen, text.batch)
    logits = rows @ frozen.head_weight.T
    if drafter.markov_head is not None:
        # The true token before, which the draft before is as long as drafts are right.
        before = ids[text.positions - 1].flatten()
        logits = logits + drafter.markov_head.logits(drafter.markov_head.rows(before))
    labels = ids[text.positions]
    right = (logits.argmax(dim=-1).view_as(labels) == labels).double()
    overlap = torch.minimum(text.p, logits.softmax(dim=-1)).sum(dim=-1).double().view_as(right)
    blocks = torch.tensor(float(len(labels)), dtype=torch.float64, device=labels.device)
    sums = (
        blocks + right.cumprod(dim=1).sum(),
        blocks,
        overlap.sum(),
        blocks * labels.shape[1],
        blocks + overlap.cumprod(dim=1).sum(),
    )
    values: list[float] = torch.stack(sums).tolist()
    return values
