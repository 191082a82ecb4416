"""DFlash's loss over one bucket's static inputs.

features -> labels and draft inputs -> drafter -> loss and sums
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.dflash.draft_bucket import DraftBucket
from runtime.dflash.drafter import Drafter
from runtime.dflash.loss import HeadLoss, head_loss
from runtime.dflash.markov import tokens_before, with_confidence
from runtime.dflash.recipe import Recipe
from runtime.dflash.sums import loss_sums
from runtime.dflash.vocabulary import SeenTokens
from runtime.static.attention import Attention, backend_of
from runtime.static.buffers import Field
from runtime.target.frozen import FrozenTarget


class DraftObjective:
    """The loss of one bucket.

    Its weight is the sum of the weights that ``block_targets`` gives, known before the forward
    pass. With D-PACE, whose own weights follow the logits, that is the number of supervised slots:
    the sum of its own would undo what it says of a block, and with slots, not blocks, counted, the
    gradients that ``train.clip`` sees keep their scale where answers end inside a block.

    Args:
        bucket: With a teacher where the recipe has one.
        recipe: Of the loss.
        loss_of: ``draft_loss`` by that recipe, one for all buckets of a drafter, see
            ``loss_on_device``.
        seen: The tokens that the loss is taken over; None for all.
    """

    def __init__(
        self,
        bucket: DraftBucket,
        recipe: Recipe,
        loss_of: Callable[..., HeadLoss],
        *,
        seen: SeenTokens | None = None,
    ) -> None:
        self.bucket = bucket
        self.recipe = recipe
        self.loss_of = loss_of
        self.seen = None
        self._scored = bucket.target
        if seen is not None:
            head_weight = bucket.target.head_weight
            self.seen = seen.to(head_weight.device)
            self._scored = replace(bucket.target, head_weight=head_weight[self.seen.ids])

    @property
    def fields(self) -> Mapping[str, Field]:
        """The bucket's."""
        return self.bucket.fields

    def __call__(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The summed loss with its graph, and the sums of ``sum_names``."""
        bucket = self.bucket
        bucket.update_masks(inputs)
        features, teacher = bucket.hidden_states(inputs)
        targets = bucket.targets(inputs, gamma=self.recipe.gamma)
        result = self.loss_of(
            bucket.drafter,
            self._scored,
            inputs["input_ids"],
            features,
            bucket.anchors,
            targets.labels,
            targets.weights,
            bucket.attention(),
            sliding=bucket.sliding_attention(),
            teacher=teacher,
            seen=self.seen,
        )
        return result.loss, loss_sums(result, targets, bucket.n_valid)


def loss_on_device(drafter: Drafter, recipe: Recipe) -> Callable[..., HeadLoss]:
    """``draft_loss`` as the steps of a drafter's device take it: compiled where it attends so."""
    if backend_of(drafter.fc.weight.device).compiled:
        return compiled_loss(drafter, recipe)
    return _draft_loss_by(head_loss, drafter, recipe)


def compiled_loss(drafter: Drafter, recipe: Recipe) -> Callable[..., HeadLoss]:
    """``draft_loss`` for a drafter on a GPU: its layers compiled in place, and the head's loss.

    All layers share one compiled form. Compiling the whole step at once costs several times as
    much a bucket, and its replays gain a few percent at most (docs/design/compiling.md).
    """
    for layer in drafter.layers:
        layer.compile(fullgraph=True, dynamic=False)
    compiled = torch.compile(head_loss, fullgraph=True, dynamic=False)
    return _draft_loss_by(compiled, drafter, recipe)


def _draft_loss_by(
    head_loss: Callable[..., HeadLoss], drafter: Drafter, recipe: Recipe
) -> Callable[..., HeadLoss]:
    if recipe.dpace_alpha is not None:
        slots = drafter.config.reach - 1
        head_loss = partial(head_loss, slots=slots, dpace_alpha=recipe.dpace_alpha)
    if recipe.distill is not None:
        head_loss = partial(head_loss, distill=recipe.distill)
    return partial(draft_loss, head_loss=head_loss)


def draft_loss(
    drafter: Drafter,
    target: FrozenTarget,
    input_ids: Tensor,
    features: Tensor,
    anchors: Tensor,
    labels: Tensor,
    weights: Tensor,
    attention: Attention,
    *,
    sliding: Attention | None = None,
    teacher: Tensor | None = None,
    seen: SeenTokens | None = None,
    head_loss: Callable[..., HeadLoss] = head_loss,
) -> HeadLoss:
    """Draft all blocks of a batch and compare with the labels.

    Args:
        drafter: The network.
        target: Its frozen embedding, head and feature scale; of the head the rows of ``seen``.
        input_ids: int64 ``[B, S]``.
        features: ``[B, S, K*H]``.
        anchors: int32 ``[B, N]``.
        labels: int64 ``[B, N, slots]``, see ``block_targets``.
        weights: float32 ``[B, N, slots]``.
        attention: With the mask inside.
        sliding: That of the sliding layers, where the drafter has some.
        teacher: ``[B*N*slots, H]``, see ``teacher_rows``; a confidence head learns from it.
        seen: The tokens that the loss is taken over; None for all.
        head_loss: ``runtime.dflash.loss.head_loss``, compiled or by D-PACE or as it is.
    """
    rows = draft_rows(drafter, target, input_ids, features, anchors, attention, sliding)
    more: dict[str, Any] = {} if teacher is None else {"teacher": teacher}
    markov, confident = drafter.markov_head, drafter.confidence_head
    flat = weights.flatten()
    places = labels.flatten() if seen is None else seen.rows[labels.flatten()]
    if markov is None:
        return head_loss(rows, target.head_weight, places, flat, **more)
    # After the layers, so that the backward pass finishes it before theirs.
    before = tokens_before(input_ids.gather(1, anchors.long()), labels)
    looked_up, w2 = markov.rows(before.flatten()), markov.markov_w2.weight
    more["markov"] = looked_up, w2 if seen is None else w2.index_select(0, seen.ids)
    result = head_loss(rows, target.head_weight, places, flat, **more)
    if confident is None or result.overlap is None:
        return result
    return with_confidence(result, confident(rows, looked_up), flat)


def draft_rows(
    drafter: Drafter,
    target: FrozenTarget,
    input_ids: Tensor,
    features: Tensor,
    anchors: Tensor,
    attention: Attention,
    sliding: Attention | None = None,
) -> Tensor:
    """What the head reads of all slots that draft, ``[B*N*slots, H]``; see ``draft_loss``."""
    size = drafter.config.draft_block_size
    S = input_ids.shape[1]
    positions = anchors.long()[..., None] + torch.arange(size, device=anchors.device)
    x = drafter.block_inputs(input_ids.gather(1, anchors.long()), target.embed_weight)
    if torch.is_grad_enabled():
        # Nobody reads this gradient; with it the first layer is compiled as all others are.
        x.requires_grad_()
    hidden = drafter(
        x,
        drafter.fuse(features, target.feature_scale),
        torch.arange(S, device=anchors.device),
        positions.flatten(1),
        attention,
        sliding,
    )
    rows: Tensor = hidden.unflatten(1, (-1, size))[:, :, 1 - drafter.config.reach :].flatten(0, 2)
    return rows
