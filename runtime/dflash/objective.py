"""DFlash's loss over one bucket's static inputs.

features -> labels and draft inputs -> drafter -> loss, and the sums that the metrics are made of
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.dflash.config import DrafterConfig
from runtime.dflash.drafter import Drafter
from runtime.dflash.loss import HeadLoss, block_targets, head_loss
from runtime.dflash.markov import tokens_before, with_confidence
from runtime.dflash.recipe import Recipe
from runtime.dflash.teacher import teacher_rows
from runtime.dflash.vocabulary import SeenTokens
from runtime.static.attention import Attention, backend_of
from runtime.static.buffers import Field
from runtime.static.masks import BucketMasks
from runtime.target.frozen import FrozenTarget


def sum_names(network: DrafterConfig, recipe: Recipe) -> tuple[str, ...]:
    """Names of the floats that are summed over ranks and steps, in order."""
    slots = range(1, network.reach)
    return (
        "loss",
        "weight",
        "anchors",
        "anchors_kept",
        "tokens",
        "blocks",
        "accepted",
        *(f"correct_{slot}" for slot in slots),
        *(f"count_{slot}" for slot in slots),
        *(("overlap",) if recipe.has_teacher else ()),
        *(("confidence",) if recipe.has_teacher and network.confidence_head else ()),
    )


class DraftBucket:
    """One bucket's static inputs, and what a drafter reads of them.

    Args:
        drafter: Its parameters are views into the optimizer's flat tensors.
        target: Frozen parts.
        masks: The bucket's masks.
        context: Tokens of a row.
        teacher: Whether the target's last hidden state is read too; features end with it then.
        sliding: Masks of the sliding layers over the same anchors, where the drafter has some.
    """

    def __init__(
        self,
        *,
        drafter: Drafter,
        target: FrozenTarget,
        masks: BucketMasks,
        context: int,
        teacher: bool = False,
        sliding: BucketMasks | None = None,
    ) -> None:
        self.drafter = drafter
        self.target = target
        self.masks = masks
        self.context = context
        self.teacher = teacher
        self.sliding = sliding

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

    def update_masks(self, inputs: Mapping[str, Tensor]) -> None:
        """Write a batch's masks; those of sliding layers read the same fields."""
        self.masks.update(inputs)
        if self.sliding is not None:
            self.sliding.update(inputs)

    def sliding_attention(self) -> Attention | None:
        """Attention of the sliding layers, where there are some."""
        return None if self.sliding is None else self.sliding.attention()

    def hidden_states(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """The target's hidden states, computed here, or come with the inputs.

        Returns:
            The drafter's features ``[B, S, K*H]``, and the last hidden state ``[B, S, H]`` where
            there is a teacher.
        """
        if self.target.features is not None:
            found = self.target.features(inputs["input_ids"])
        else:
            found = inputs["features"]
        width = self.drafter.fc.in_features
        return found[..., :width], found[..., width:] if self.teacher else None


class DraftObjective(DraftBucket):
    """The loss of one bucket.

    Its weight is the sum of the weights that ``block_targets`` gives, known before the forward
    pass. With D-PACE, whose own weights follow the logits, that is the number of supervised slots:
    the sum of its own would undo what it says of a block, and with slots, not blocks, counted, the
    gradients that ``train.clip`` sees keep their scale where answers end inside a block.

    Args:
        recipe: Of the loss.
        loss_of: ``draft_loss``, or another form of it, see ``loss_on_device``.
        seen: The tokens that the loss is taken over, on the target's device; None for all.
        bucket: As ``DraftBucket``.
    """

    def __init__(
        self,
        *,
        recipe: Recipe,
        loss_of: Callable[..., HeadLoss],
        seen: SeenTokens | None = None,
        **bucket: Any,
    ) -> None:
        super().__init__(teacher=recipe.has_teacher, **bucket)
        self.recipe = recipe
        self.loss_of = loss_of
        self.seen = seen
        self._scored = self.target
        if seen is not None:
            self._scored = replace(self.target, head_weight=self.target.head_weight[seen.ids])

    def __call__(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The summed loss with its graph, and the sums of ``sum_names``."""
        self.update_masks(inputs)
        features, last = self.hidden_states(inputs)
        anchors, n_valid = self.masks.params["anchors"], self.masks.params["n_valid"]
        targets = block_targets(
            inputs["input_ids"],
            inputs["loss_mask"],
            anchors,
            n_valid,
            draft_block_size=self.drafter.config.reach,
            gamma=self.recipe.gamma,
        )
        result = self.loss_of(
            self.drafter,
            self._scored,
            inputs["input_ids"],
            features,
            anchors,
            targets.labels,
            targets.weights,
            self.masks.attention(),
            **self._teacher(last, anchors),
            sliding=self.sliding_attention(),
            seen=self.seen,
        )
        with torch.no_grad():
            correct = result.correct.view_as(targets.weights)
            shown = result.loss if result.cross_entropy is None else result.cross_entropy
            sums = _sums(shown, correct, targets.weights, n_valid, targets.anchors_kept)
            if result.overlap is not None:
                supervised = targets.weights.flatten() > 0
                sums = torch.cat((sums, (result.overlap * supervised).sum()[None]))
            if result.confidence is not None:
                sums = torch.cat((sums, result.confidence[None]))
        return result.loss, sums

    def _teacher(self, last: Tensor | None, anchors: Tensor) -> dict[str, Tensor]:
        if last is None:
            return {}
        rows = teacher_rows(last, anchors, self.drafter.config.reach)
        return {"teacher": rows.to(self.target.head_weight.dtype)}


def _sums(loss: Tensor, correct: Tensor, weights: Tensor, n_valid: Tensor, kept: Tensor) -> Tensor:
    trained = (weights > 0).float()
    whole, accepted = accepted_tokens(correct, trained)
    singles = torch.stack(
        (
            loss.detach(),
            weights.sum(),
            n_valid.sum().float(),
            kept.sum(),
            trained.sum(),
            whole.sum(),
            accepted.sum(),
        )
    )
    return torch.cat((singles, correct.sum(dim=(0, 1)), trained.sum(dim=(0, 1))))


def loss_on_device(drafter: Drafter, recipe: Recipe) -> Callable[..., HeadLoss]:
    """``draft_loss`` as the steps of a drafter's device take it: compiled where it attends so."""
    if backend_of(drafter.fc.weight.device).compiled:
        return compiled_loss(drafter, recipe)
    return _draft_loss_by(head_loss, drafter, recipe)


def accepted_tokens(correct: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
    """What a target call would give of each draft block if drafts were checked against the data.

    Args:
        correct: float32 ``[B, N, slots]``, 1 where a draft is right.
        trained: float32 ``[B, N, slots]``, 1 where there is a token to compare with.

    Returns:
        float32 ``[B, N]`` each: 1 where all of a block's slots are trained, and there 1 plus the
        drafts right in a row.
    """
    whole = trained.prod(dim=-1)
    return whole, ((correct * trained).cumprod(dim=-1).sum(dim=-1) + 1) * whole


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
