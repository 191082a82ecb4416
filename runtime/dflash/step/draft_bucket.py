"""One bucket's static inputs, and all that a drafter reads of them: in training and in scoring."""

from collections.abc import Mapping

import torch
from torch import Tensor

from maskgen.entry import MaskEntry
from runtime.dflash.loss.head import Targets, block_targets
from runtime.dflash.loss.teacher import teacher_rows
from runtime.dflash.network.drafter import Drafter
from runtime.dflash.step.buckets import context_of
from runtime.dflash.step.draft_batch import DraftBatch
from runtime.dflash.step.samples import bucket_masks
from runtime.static.buffers import Field
from runtime.target.frozen import FrozenTarget


class DraftBucket:
    """The inputs of a batch, and what is made of them before the drafter runs.

    Args:
        drafter: In training its parameters are views into the optimizer's flat tensors.
        target: Frozen parts on the same device.
        entry: The bucket's mask.
        batch: Rows of a step.
        sliding: The mask of the sliding layers over the same anchors, where there are some.
        teacher: Whether the target's last hidden state is read too; features end with it then.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: FrozenTarget,
        entry: MaskEntry,
        batch: int,
        *,
        sliding: MaskEntry | None = None,
        teacher: bool = False,
    ) -> None:
        self.drafter = drafter
        self.target = target
        self.context = context_of(entry.spec)
        self.masks = bucket_masks(drafter, entry, batch)
        self.sliding = None if sliding is None else bucket_masks(drafter, sliding, batch)
        self.teacher = teacher

    @property
    def fields(self) -> Mapping[str, Field]:
        """``input_ids``, ``loss_mask``, what the masks need, and features that come from afar."""
        B, S = self.masks.batch, self.context
        fields = {
            "input_ids": Field((B, S), torch.int64),
            "loss_mask": Field((B, S), torch.bool),
            **self.masks.fields,
        }
        if self.target.features is None:
            width = self.drafter.fc.in_features
            width += self.target.head_weight.shape[1] if self.teacher else 0
            remote = self.target.remote_dtype
            fields["features"] = Field((B, S, width), remote or torch.bfloat16, remote is None)
        return fields

    @property
    def anchors(self) -> Tensor:
        """int32 ``[B, N]``, of the batch that was read last."""
        return self.masks.params["anchors"]

    @property
    def n_valid(self) -> Tensor:
        """int32 ``[B]``, how many of a row's anchors count."""
        return self.masks.params["n_valid"]

    def read(self, inputs: Mapping[str, Tensor]) -> DraftBatch:
        """Write a batch's masks, and take or compute what a drafter reads of it."""
        self.masks.update(inputs)
        if self.sliding is not None:
            self.sliding.update(inputs)
        if self.target.features is not None:
            found = self.target.features(inputs["input_ids"])
        else:
            found = inputs["features"]
        width, rows = self.drafter.fc.in_features, None
        if self.teacher:
            rows = teacher_rows(found[..., width:], self.anchors, self.drafter.config.reach)
            rows = rows.to(self.target.head_weight.dtype)
        return DraftBatch(
            inputs["input_ids"],
            found[..., :width],
            self.anchors,
            self.masks.attention(),
            sliding=None if self.sliding is None else self.sliding.attention(),
            teacher=rows,
        )

    def targets(self, inputs: Mapping[str, Tensor], *, gamma: float) -> Targets:
        """What the slots should predict of the batch that was read, see ``block_targets``."""
        return block_targets(
            inputs["input_ids"],
            inputs["loss_mask"],
            self.anchors,
            self.n_valid,
            draft_block_size=self.drafter.config.reach,
            gamma=gamma,
        )
