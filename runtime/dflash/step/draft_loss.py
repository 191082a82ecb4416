"""The loss of a batch of draft blocks: drafter, frozen head and DSpark's heads, by a recipe."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from runtime.dflash.loss.head import HeadLoss, head_loss
from runtime.dflash.loss.vocabulary import SeenTokens
from runtime.dflash.network.drafter import Drafter
from runtime.dflash.network.markov import tokens_before, with_confidence
from runtime.dflash.step.draft_batch import DraftBatch, draft_rows
from runtime.dflash.step.recipe import Recipe
from runtime.static.attention import backend_of
from runtime.target.frozen import FrozenTarget


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
    batch: DraftBatch,
    labels: Tensor,
    weights: Tensor,
    *,
    seen: SeenTokens | None = None,
    head_loss: Callable[..., HeadLoss] = head_loss,
) -> HeadLoss:
    """Draft all blocks of a batch and compare with the labels.

    Args:
        drafter: The network.
        target: Its frozen embedding, head and feature scale; of the head the rows of ``seen``.
        batch: What it reads; a confidence head learns from a teacher.
        labels: int64 ``[B, N, slots]``, see ``block_targets``.
        weights: float32 ``[B, N, slots]``.
        seen: The tokens that the loss is taken over; None for all.
        head_loss: ``runtime.dflash.loss.head.head_loss``, compiled or by D-PACE or as it is.
    """
    rows = draft_rows(drafter, target, batch)
    more: dict[str, Any] = {} if batch.teacher is None else {"teacher": batch.teacher}
    markov, confident = drafter.markov_head, drafter.confidence_head
    flat = weights.flatten()
    places = labels.flatten() if seen is None else seen.rows[labels.flatten()]
    if markov is None:
        return head_loss(rows, target.head_weight, places, flat, **more)
    # After the layers, so that the backward pass finishes it before theirs.
    before = tokens_before(batch.anchor_tokens, labels)
    looked_up, w2 = markov.rows(before.flatten()), markov.markov_w2.weight
    more["markov"] = looked_up, w2 if seen is None else w2.index_select(0, seen.ids)
    result = head_loss(rows, target.head_weight, places, flat, **more)
    if confident is None or result.overlap is None:
        return result
    return with_confidence(result, confident(rows, looked_up), flat)
