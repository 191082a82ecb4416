"""DFlash's loss: weighted cross entropy over the frozen head, in chunks of rows.

Slots are weighed by their position alone, or by D-PACE.

Shape legend: B samples, N anchors, K trained slots of a draft block, S context, H hidden, V vocab,
R = B N K rows.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.dflash.dpace import dpace_weights

CHUNK_ROWS = 4096


class Targets(NamedTuple):
    """What every trained slot should predict, and how much it counts."""

    labels: Tensor
    """int64 ``[B, N, K]``, token at ``anchor + k`` for k = 1..K."""
    weights: Tensor
    """float32 ``[B, N, K]``; 0 where the slot is not trained."""
    anchors_kept: Tensor
    """float32 ``[B]``, anchors that carry weight."""


def block_targets(
    input_ids: Tensor,
    loss_mask: Tensor,
    anchors: Tensor,
    n_valid: Tensor,
    *,
    draft_block_size: int,
    gamma: float,
) -> Targets:
    """Gather labels and weights of all draft blocks.

    An anchor counts when it is valid, supervised, and followed by a supervised token; slot k
    predicts the token at ``anchor + k`` and weighs ``exp(-(k-1)/gamma)``. Slot 0 holds the anchor's
    own token and is not trained. Source: DFlash, arXiv 2602.06036, equation 4.

    Args:
        input_ids: int64 ``[B, S]``, right padded.
        loss_mask: bool ``[B, S]``, False in the padding.
        anchors: int32 ``[B, N]``.
        n_valid: int32 ``[B]``.
        draft_block_size: Tokens of a draft block, slot 0 included.
        gamma: Decay length in slots; 0 weighs every slot alike.
    """
    S = input_ids.shape[1]
    slots = torch.arange(1, draft_block_size, device=input_ids.device)
    positions = anchors.long()[..., None] + slots
    inside = positions < S
    flat = positions.clamp(max=S - 1).flatten(1)
    labels = input_ids.gather(1, flat).view_as(positions)
    supervised = loss_mask.gather(1, flat).view_as(positions) & inside
    order = torch.arange(anchors.shape[1], device=input_ids.device)
    kept = (order < n_valid[:, None]) & loss_mask.gather(1, anchors.long()) & supervised[..., 0]
    decay = (
        torch.exp((1 - slots).float() / gamma)
        if gamma
        else torch.ones_like(slots, dtype=torch.float)
    )
    weights = (supervised & kept[..., None]) * decay
    return Targets(labels, weights, kept.sum(dim=1, dtype=torch.float32))


class HeadLoss(NamedTuple):
    """Sums over the rows of one rank; a mean is taken after the sums of all ranks are added."""

    loss: Tensor
    """float32 scalar, sum of weight times cross entropy; differentiable."""
    correct: Tensor
    """float32 ``[R]``, 1 where the largest logit is the label and the weight is positive."""
    cross_entropy: Tensor | None = None
    """float32 scalar, the same sum with the weights that were given, where D-PACE took others;
    None where it is the loss itself."""


def head_loss(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    slots: int = 1,
    dpace_alpha: float | None = None,
) -> HeadLoss:
    """Weighted cross entropy of rows through a frozen head, without keeping the logits.

    The gradient with respect to ``hidden`` is computed with the loss, chunk by chunk, since the
    head takes none: ``weight * (softmax @ head_weight - head_weight[label])``.

    Args:
        hidden: ``[R, H]``.
        head_weight: ``[V, H]``, frozen, of the same dtype.
        labels: int64 ``[R]``.
        weights: float32 ``[R]``; with D-PACE 1 where a row is supervised, else 0.
        slots: Consecutive rows that no chunk cuts: D-PACE's K, which divides R.
        dpace_alpha: Weigh by ``dpace_weights`` instead, computed from this cross entropy.
    """
    return HeadLoss(
        *_FrozenHeadLoss.apply(hidden, head_weight, labels, weights, slots, dpace_alpha)  # type: ignore[no-untyped-call]
    )


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        labels: Tensor,
        weights: Tensor,
        slots: int,
        dpace_alpha: float | None,
    ) -> tuple[Tensor, ...]:
        rows = hidden.shape[0]
        chunk_rows = slots * max(1, CHUNK_ROWS // slots)
        chunks = math.ceil(rows / chunk_rows)
        losses, corrects, grads, given = [], [], [], []
        for chunk in range(chunks):
            span = slice(chunk * chunk_rows, min(rows, (chunk + 1) * chunk_rows))
            x, label, weight = hidden[span], labels[span], weights[span]
            logits = (x @ head_weight.T).float()
            log_norm = torch.logsumexp(logits, dim=-1)
            picked = logits.gather(1, label[:, None])[:, 0]
            factor = weight
            if dpace_alpha is not None:
                blocks = (log_norm - picked).view(-1, slots)
                supervised = (weight > 0).view(-1, slots)
                factor = dpace_weights(blocks, supervised, dpace_alpha).flatten()
                given.append(((log_norm - picked) * weight).sum())
            losses.append(((log_norm - picked) * factor).sum())
            corrects.append((logits.argmax(dim=-1) == label) & (weight > 0))
            scaled = torch.exp(logits - log_norm[:, None]) * factor[:, None]
            pull = head_weight[label] * factor[:, None].to(hidden.dtype)
            grads.append(scaled.to(hidden.dtype) @ head_weight - pull)
        ctx.save_for_backward(torch.cat(grads))
        shown = [torch.cat(corrects).float()]
        if given:
            shown.append(torch.stack(given).sum())
        ctx.mark_non_differentiable(*shown)
        return torch.stack(losses).sum(), *shown

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *of_the_others: Tensor) -> tuple[Any, ...]:
        del of_the_others
        (grad_hidden,) = ctx.saved_tensors
        return grad_hidden * grad_loss.to(grad_hidden.dtype), None, None, None, None, None
