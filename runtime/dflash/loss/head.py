"""DFlash's loss over the frozen head, in chunks of rows: weighted cross entropy, or distillation.

Slots are weighed by their position alone, or by D-PACE.

Shape legend: B samples, N anchors, K trained slots of a draft block, S context, H hidden, V vocab,
r rank of a Markov head, R = B N K rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.dflash.loss.distillation import Distillation, divergence, overlap
from runtime.dflash.loss.dpace import dpace_weights

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
        draft_block_size: K + 1, see ``DrafterConfig.reach``.
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
    """float32 scalar, sum of weight times loss; differentiable."""
    correct: Tensor
    """float32 ``[R]``, 1 where the largest logit is the label and the weight is positive."""
    cross_entropy: Tensor | None = None
    """float32 scalar, sum of weight times cross entropy, with the weights that were given, where
    the loss is another; None where it is the loss itself."""
    overlap: Tensor | None = None
    """float32 ``[R]``, sum of min(p, q) over the target's distribution p and the drafter's q; None
    without a teacher."""
    confidence: Tensor | None = None
    """float32 scalar, what ``with_confidence`` added to the loss."""


def head_loss(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    slots: int = 1,
    dpace_alpha: float | None = None,
    teacher: Tensor | None = None,
    distill: Distillation | None = None,
    markov: tuple[Tensor, Tensor] | None = None,
) -> HeadLoss:
    """Weighted loss of rows through a frozen head, without keeping the logits.

    A row's loss is the cross entropy of its label, or with ``distill`` a mix with the distance to
    the target's distribution. All gradients are computed with the loss, chunk by chunk, since the
    head takes none: of plain cross entropy ``weight * (softmax @ head_weight -
    head_weight[label])``.

    Args:
        hidden: ``[R, H]``.
        head_weight: ``[V, H]``, frozen, of the same dtype.
        labels: int64 ``[R]``.
        weights: float32 ``[R]``; with D-PACE 1 where a row is supervised, else 0.
        slots: Consecutive rows that no chunk cuts: D-PACE's K, which divides R.
        dpace_alpha: Weigh by ``dpace_weights`` instead, computed from the cross entropy alone.
        teacher: ``[R, H]`` of the same dtype, what the target's head reads where it predicts the
            same token as the row; takes no gradient.
        distill: How to mix; needs a teacher.
        markov: ``(e, w)``, ``[R, r]`` and ``[V, r]`` of the same dtype: the row's logits are
            ``hidden @ head_weight.T + e @ w.T``. Both take gradients.

    Raises:
        ValueError: ``distill`` without a teacher.
    """
    if distill is not None and teacher is None:
        raise ValueError("distill compares with a teacher, and there is none")
    kind, share = (None, 0.0) if distill is None else (distill.kind, distill.share)
    e, w = (None, None) if markov is None else markov
    shown = list(
        _FrozenHeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden, head_weight, labels, weights, teacher, e, w, slots, dpace_alpha, kind, share
        )
    )
    loss, correct = shown[:2]
    overlaps = shown.pop() if teacher is not None else None
    return HeadLoss(loss, correct, shown[2] if len(shown) > 2 else None, overlaps)


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        labels: Tensor,
        weights: Tensor,
        teacher: Tensor | None,
        e: Tensor | None,
        w: Tensor | None,
        slots: int,
        dpace_alpha: float | None,
        kind: str | None,
        share: float,
    ) -> tuple[Tensor, ...]:
        rows, dtype = hidden.shape[0], hidden.dtype
        # Two distributions over the vocabulary take the memory of one.
        limit = CHUNK_ROWS if teacher is None else CHUNK_ROWS // 2
        chunk_rows = slots * max(1, limit // slots)
        losses, corrects, given, overlaps = [], [], [], []
        grads, grads_e, grad_w = [], [], None
        for start in range(0, rows, chunk_rows):
            span = slice(start, min(rows, start + chunk_rows))
            x, label, weight = hidden[span], labels[span], weights[span]
            logits = (x @ head_weight.T).float()
            if e is not None and w is not None:
                logits = logits + (e[span] @ w.T).float()
            log_norm = torch.logsumexp(logits, dim=-1)
            entropy = log_norm - logits.gather(1, label[:, None])[:, 0]
            factor = weight
            if dpace_alpha is not None:
                supervised = (weight > 0).view(-1, slots)
                blocks = entropy.view(-1, slots)
                factor = dpace_weights(blocks, supervised, dpace_alpha).flatten()
            if dpace_alpha is not None or kind is not None:
                given.append((entropy * weight).sum())
            corrects.append((logits.argmax(dim=-1) == label) & (weight > 0))
            # The loss, and its gradient by the logits but for the label's own share of it.
            log_q = logits - log_norm[:, None]
            loss, slope, pull = entropy, torch.exp(log_q), factor
            if teacher is not None:
                log_p = torch.log_softmax((teacher[span] @ head_weight.T).float(), dim=-1)
                overlaps.append(overlap(log_p.exp(), slope))
                if kind is not None:
                    distance, slope_to_target = divergence(kind, log_p, log_q)
                    loss = (1 - share) * entropy + share * distance
                    slope = (1 - share) * slope + share * slope_to_target
                    pull = (1 - share) * factor
            losses.append((loss * factor).sum())
            slope = slope * factor[:, None]
            if e is None or w is None:
                pulled = head_weight[label] * pull[:, None].to(dtype)
                grads.append(slope.to(dtype) @ head_weight - pulled)
                continue
            # Compared, not scattered: compiled, it is a part of what writes the slope anyway.
            is_label = torch.arange(len(head_weight), device=label.device) == label[:, None]
            slope = (slope - is_label * pull[:, None]).to(dtype)
            grads.append(slope @ head_weight)
            grads_e.append(slope @ w)
            of_chunk = (slope.T @ e[span]).float()
            grad_w = of_chunk if grad_w is None else grad_w + of_chunk
        saved = [torch.cat(grads)]
        if grad_w is not None:
            saved += [torch.cat(grads_e), grad_w]
        ctx.save_for_backward(*saved)
        shown = [torch.cat(corrects).float()]
        if given:
            shown.append(torch.stack(given).sum())
        if overlaps:
            shown.append(torch.cat(overlaps))
        ctx.mark_non_differentiable(*shown)
        return torch.stack(losses).sum(), *shown

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *of_the_others: Tensor) -> tuple[Any, ...]:
        del of_the_others
        grad_hidden, *of_markov = ctx.saved_tensors
        dtype = grad_hidden.dtype
        grad_e = of_markov[0] * grad_loss.to(dtype) if of_markov else None
        grad_w = (of_markov[1] * grad_loss).to(dtype) if of_markov else None
        grad_hidden = grad_hidden * grad_loss.to(dtype)
        return grad_hidden, None, None, None, None, grad_e, grad_w, None, None, None, None
