"""D-PACE's weights: how much each slot of a draft block adds to the length that is accepted."""

import torch
from torch import Tensor


def dpace_weights(cross_entropy: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """Weigh the slots of draft blocks by what the drafter now makes of them.

    A slot is right with probability ``c = exp(-cross entropy)``, smoothed to
    ``s = (1 - alpha) c + alpha``. A block is accepted up to slot m with ``P_m``, the product of s
    over its slots up to m, so that ``sum of P_m`` is a length; slot k weighs the sum of P_m over
    m >= k, which is the derivative of that length by ``log s_k``. A slot that is not supervised is
    passed over: its factor is 1, and it adds nothing. Source: D-PACE, arXiv 2605.18810, equations
    7 and 8.

    Args:
        cross_entropy: float32 ``[blocks, K]`` of the labels, slots 1..K of each block.
        supervised: bool ``[blocks, K]``.
        alpha: In (0, 1]. 1 weighs each slot by the number of supervised ones from it on.

    Returns:
        float32 ``[blocks, K]``, a constant of the loss; 0 where not supervised.
    """
    confidence = torch.exp(-cross_entropy.detach())
    smoothed = torch.where(supervised, (1 - alpha) * confidence + alpha, 1.0)
    accepted = smoothed.cumprod(dim=-1) * supervised
    return accepted.flip(-1).cumsum(dim=-1).flip(-1) * supervised
