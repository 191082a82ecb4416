"""A batch as a drafter reads it, and the rows that it makes of its draft blocks.

Shape legend: B samples, N anchors, S context, K feature layers, H hidden; slots are those that
draft, one less than ``DrafterConfig.reach``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from runtime.dflash.network.drafter import Drafter
from runtime.static.attention import Attention
from runtime.target.frozen import FrozenTarget


class DraftBatch(NamedTuple):
    """What a drafter, its loss and its heads read of a batch."""

    input_ids: Tensor
    """int64 ``[B, S]``."""
    features: Tensor
    """``[B, S, K*H]``."""
    anchors: Tensor
    """int32 ``[B, N]``."""
    attention: Attention
    """With the mask inside."""
    sliding: Attention | None = None
    """That of the sliding layers, where the drafter has some."""
    teacher: Tensor | None = None
    """``[B*N*slots, H]``, see ``teacher_rows``."""

    @property
    def anchor_tokens(self) -> Tensor:
        """int64 ``[B, N]``."""
        return self.input_ids.gather(1, self.anchors.long())


def draft_rows(drafter: Drafter, target: FrozenTarget, batch: DraftBatch) -> Tensor:
    """What the head reads of all slots that draft, ``[B*N*slots, H]``.

    Args:
        drafter: The network.
        target: Its frozen embedding and feature scale.
        batch: On the same device.
    """
    size, device = drafter.config.draft_block_size, batch.anchors.device
    positions = batch.anchors.long()[..., None] + torch.arange(size, device=device)
    x = drafter.block_inputs(batch.anchor_tokens, target.embed_weight)
    if torch.is_grad_enabled():
        # Nobody reads this gradient; with it the first layer is compiled as all others are.
        x.requires_grad_()
    hidden = drafter(
        x,
        drafter.fuse(batch.features, target.feature_scale),
        torch.arange(batch.input_ids.shape[1], device=device),
        positions.flatten(1),
        batch.attention,
        batch.sliding,
    )
    rows: Tensor = hidden.unflatten(1, (-1, size))[:, :, 1 - drafter.config.reach :].flatten(0, 2)
    return rows
