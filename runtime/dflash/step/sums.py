"""The sums that a drafter's metrics are made of."""

import torch
from torch import Tensor

from runtime.dflash.loss.head import HeadLoss, Targets
from runtime.dflash.network.config import DrafterConfig
from runtime.dflash.step.recipe import Recipe


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


@torch.no_grad()
def loss_sums(result: HeadLoss, targets: Targets, n_valid: Tensor) -> Tensor:
    """The floats of ``sum_names``, float32.

    Args:
        result: Of all draft blocks of a batch.
        targets: What they were compared with.
        n_valid: int32 ``[B]``, anchors drawn.
    """
    correct = result.correct.view_as(targets.weights)
    trained = (targets.weights > 0).float()
    whole, accepted = accepted_tokens(correct, trained)
    loss = result.loss if result.cross_entropy is None else result.cross_entropy
    singles = torch.stack(
        (
            loss.detach(),
            targets.weights.sum(),
            n_valid.sum().float(),
            targets.anchors_kept.sum(),
            trained.sum(),
            whole.sum(),
            accepted.sum(),
        )
    )
    sums = [singles, correct.sum(dim=(0, 1)), trained.sum(dim=(0, 1))]
    if result.overlap is not None:
        sums.append((result.overlap * (targets.weights.flatten() > 0)).sum()[None])
    if result.confidence is not None:
        sums.append(result.confidence[None])
    return torch.cat(sums)


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
