"""What a drafter makes of held-out text, sample by sample, drafts checked against the text.

Eager and dense: no part of what is measured is used to measure it but the network itself.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from maskgen.families.dflash import dflash
from runtime.data.dataset import Dataset
from runtime.dflash.drafter import Drafter
from runtime.dflash.heldout import whole_blocks
from runtime.dflash.objective import draft_rows
from runtime.dflash.saved_drafter import load_published
from runtime.static.attention import dense_attention
from runtime.target.frozen import FrozenTarget
from runtime.target.model import Target

COLUMNS = ("tokens of a call", "calls", "overlap", "slots", "tokens of a sampled call")
"""Sums over a sample's draft blocks: greedy tokens, blocks, min(p, q), slots, and the tokens that a
call would give if drafts were drawn and accepted by chance: 1 + the sum of products of overlaps."""


@torch.inference_mode()
def scores(target: Target, folder: str | Path, dataset: Dataset) -> NDArray[np.float64]:
    """Score a published drafter on every supervised position that a whole draft block follows.

    Args:
        target: In float32.
        folder: The drafter's.
        dataset: Held-out samples.

    Returns:
        ``[samples, 5]``, see ``COLUMNS``; samples without such a position are left out.
    """
    drafter = load_published(folder, device=target.device, dtype=torch.float32)
    found = [_score(target, drafter, dataset, number) for number in range(len(dataset))]
    return np.array([row for row in found if row is not None])


def _score(
    target: Target, drafter: Drafter, dataset: Dataset, number: int
) -> Sequence[float] | None:
    sample = dataset.sample(number)
    size = drafter.config.draft_block_size
    found = whole_blocks(sample.loss_mask.numpy(), size)
    if not len(found):
        return None
    device = target.device
    ids = torch.as_tensor(sample.input_ids, device="cpu").long().to(device)[None]
    anchors = torch.from_numpy(found).to(device, torch.int32)[None]
    layers = (*drafter.config.target_layer_ids, target.num_layers)
    features = target.features(ids, layers)
    H = target.hidden_size
    last = features[0, :, -H:]
    Q_LEN = anchors.shape[1] * size
    mask = dflash(Q_LEN, ids.shape[1] + Q_LEN, draft_block_size=size, anchors=anchors).dense()
    frozen = FrozenTarget(
        embed_weight=target.embed_weight,
        head_weight=target.head_weight,
        feature_scale=torch.ones(len(layers) - 1, device=device),
        features=None,
    )
    attention = dense_attention(mask)
    rows = draft_rows(drafter, frozen, ids, features[..., :-H], anchors, attention)
    positions = anchors[0].long()[:, None] + torch.arange(1, size, device=device)
    logits = rows @ target.head_weight.T
    teacher = last[positions - 1].flatten(0, 1) @ target.head_weight.T
    labels = ids[0][positions]
    if drafter.markov_head is not None:
        # The true token before, which the draft before is as long as drafts are right.
        rows_before = drafter.markov_head.rows(ids[0][positions - 1].flatten())
        logits = logits + drafter.markov_head.logits(rows_before)
    right = (logits.argmax(dim=-1).view_as(labels) == labels).float()
    p, q = teacher.softmax(dim=-1), logits.softmax(dim=-1)
    overlap = torch.minimum(p, q).sum(dim=-1).view_as(right)
    blocks = len(found)
    return (
        blocks + float(right.cumprod(dim=1).sum()),
        blocks,
        float(overlap.sum()),
        overlap.numel(),
        blocks + float(overlap.cumprod(dim=1).sum()),
    )
