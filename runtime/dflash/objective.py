"""One DFlash training step of one bucket on one device, over static tensors only.

features -> labels and draft inputs -> drafter -> loss -> gradients -> all-reduce -> AdamW -> sums
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.dflash.drafter import Drafter
from runtime.dflash.loss import HeadLoss, block_targets, head_loss
from runtime.static.attention import Attention, dense_attention, flex_attention_over
from runtime.static.buffers import Field, StaticInputs
from runtime.static.exchange import GradientExchange
from runtime.training.entries import BucketMasks


@dataclass(frozen=True, kw_only=True, eq=False)
class FrozenTarget:
    """What a step needs of the target on its device."""

    embed_weight: Tensor
    """``[V, H]``."""
    head_weight: Tensor
    """``[V, H]``."""
    feature_scale: Tensor
    """float32 ``[K]``, see ``Drafter.fuse``."""
    features: Callable[[Tensor], Tensor] | None
    """Input ids ``[B, S]`` to features ``[B, S, K*H]`` in the step; None when they come with its
    inputs."""
    remote_dtype: torch.dtype | None = None
    """Of features that a target on another device writes into the inputs; None when they come with
    the samples, in bfloat16."""


class Sums:
    """Names of the floats that are reduced along with the gradients, in order.

    Args:
        draft_block_size: Slots of a draft block, slot 0 included.
    """

    def __init__(self, draft_block_size: int) -> None:
        slots = range(1, draft_block_size)
        self.names = (
            "loss",
            "weight",
            "anchors",
            "anchors_kept",
            "tokens",
            "blocks",
            "accepted",
            *(f"correct_{slot}" for slot in slots),
            *(f"count_{slot}" for slot in slots),
        )

    def __len__(self) -> int:
        return len(self.names)


COUNTERS = ("steps", "skipped", "skips_in_a_row", "worst_skips_in_a_row", "grad_norm")
"""Kept on the device after the sums: steps begun, steps without update, and the last norm."""


class DraftStep:
    """The step of one bucket.

    Args:
        drafter: Its parameters are views into the optimizer's flat tensors.
        target: Frozen parts.
        masks: The bucket's masks.
        exchange: Takes the gradients; shared by all buckets of the device.
        totals: float32 ``[len(sums) + len(COUNTERS)]``; what is added up between two reads.
        gamma: Loss decay.
    """

    def __init__(
        self,
        *,
        drafter: Drafter,
        target: FrozenTarget,
        masks: BucketMasks,
        exchange: GradientExchange,
        totals: Tensor,
        gamma: float,
        objective: Callable[..., HeadLoss],
    ) -> None:
        self.drafter = drafter
        self.target = target
        self.masks = masks
        self.optimizer = exchange.optimizer
        self.exchange = exchange
        self.totals = totals
        self.gamma = gamma
        self.objective = objective
        self.device = totals.device
        self.context = masks.entry.bucket.KV_LEN - masks.entry.bucket.Q_LEN
        self.inputs = StaticInputs(self._fields(), self.device)
        self._attention: Attention | None = None
        if self.device.type == "cuda":
            self._attention = flex_attention_over(masks.block_mask())

    def _fields(self) -> Mapping[str, Field]:
        B, S, N = self.masks.batch, self.context, self.masks.num_anchors
        fields = {
            "input_ids": Field((B, S), torch.int64),
            "loss_mask": Field((B, S), torch.bool),
        }
        if self.masks.entry.kind == "layouts":
            fields["layout"] = Field((B,), torch.int64)
        else:
            fields["anchors"] = Field((B, N), torch.int32)
            fields["n_valid"] = Field((B,), torch.int32)
        if self.target.features is None:
            width = self.drafter.fc.in_features
            remote = self.target.remote_dtype
            fields["features"] = Field((B, S, width), remote or torch.bfloat16, remote is None)
        return fields

    def __call__(self) -> None:
        """Run the step; every input and output is a static tensor."""
        inputs = self.inputs.tensors
        if "layout" in inputs:
            self.masks.use_layouts(inputs["layout"])
        else:
            self.masks.use_anchors(inputs["anchors"], inputs["n_valid"])
        features = inputs.get("features")
        if self.target.features is not None:
            features = self.target.features(inputs["input_ids"])
        loss, correct, weights, kept = self._forward(features)
        self.exchange.backward(loss)
        with torch.no_grad():
            self._write_sums(loss.detach(), correct, weights, kept)
            self.exchange.finish()
            self._finish()

    def _forward(self, features: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs, masks = self.inputs.tensors, self.masks
        targets = block_targets(
            inputs["input_ids"],
            inputs["loss_mask"],
            masks.anchors,
            masks.n_valid,
            draft_block_size=masks.draft_block_size,
            gamma=self.gamma,
        )
        result = self.objective(
            self.drafter,
            self.target,
            inputs["input_ids"],
            features,
            masks.anchors,
            targets.labels,
            targets.weights,
            self._attention or dense_attention(masks.dense()),
        )
        correct = result.correct.view_as(targets.weights)
        return result.loss, correct, targets.weights, targets.anchors_kept

    def _write_sums(self, loss: Tensor, correct: Tensor, weights: Tensor, kept: Tensor) -> None:
        trained = (weights > 0).float()
        whole = trained.prod(dim=-1)
        accepted = ((correct * trained).cumprod(dim=-1).sum(dim=-1) + 1) * whole
        per_slot = (trained.sum(dim=(0, 1)), correct.sum(dim=(0, 1)))
        singles = torch.stack(
            (
                loss,
                weights.sum(),
                self.masks.n_valid.sum().float(),
                kept.sum(),
                trained.sum(),
                whole.sum(),
                accepted.sum(),
            )
        )
        self.optimizer.sums.copy_(torch.cat((singles, per_slot[1], per_slot[0])))

    def _finish(self) -> None:
        num_sums = len(self.optimizer.sums)
        sums, counters = self.totals[:num_sums], self.totals[num_sums:]
        steps, skips, in_a_row, worst, norm = counters.unbind()
        skipped = self.optimizer.step(self.optimizer.sums[1], steps)
        # A step without a supervised token is skipped too, but it is no fault.
        faulty = skipped * (self.optimizer.sums[1] != 0)
        sums.add_(torch.where(faulty > 0, 0.0, self.optimizer.sums))
        steps.add_(1)
        skips.add_(faulty)
        in_a_row.copy_((in_a_row + 1) * faulty)
        worst.copy_(torch.maximum(worst, in_a_row))
        norm.copy_(self.optimizer.grad_norm)


def draft_objective(
    drafter: Drafter,
    target: FrozenTarget,
    input_ids: Tensor,
    features: Tensor,
    anchors: Tensor,
    labels: Tensor,
    weights: Tensor,
    attention: Attention,
    *,
    head_loss: Callable[..., HeadLoss] = head_loss,
) -> HeadLoss:
    """Draft all blocks of a batch and compare with the labels.

    Args:
        drafter: The network.
        target: Its frozen embedding, head and feature scale.
        input_ids: int64 ``[B, S]``.
        features: ``[B, S, K*H]``.
        anchors: int32 ``[B, N]``.
        labels: int64 ``[B, N, slots]``, see ``block_targets``.
        weights: float32 ``[B, N, slots]``.
        attention: Holds the mask.
        head_loss: ``runtime.dflash.loss.head_loss``, or a compiled form of it.
    """
    size = drafter.config.draft_block_size
    S = input_ids.shape[1]
    positions = anchors.long()[..., None] + torch.arange(size, device=anchors.device)
    x = drafter.block_inputs(input_ids.gather(1, anchors.long()), target.embed_weight)
    # Nobody reads this gradient; with it the first layer is compiled in the form of all others.
    x.requires_grad_()
    hidden = drafter(
        x,
        drafter.fuse(features, target.feature_scale),
        torch.arange(S, device=anchors.device),
        positions.flatten(1),
        attention,
    )
    rows = hidden.unflatten(1, (-1, size))[:, :, 1:].flatten(0, 2)
    return head_loss(rows, target.head_weight, labels.flatten(), weights.flatten())
