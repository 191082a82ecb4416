"""How far a drafter's distributions are from the target's, row by row, with gradients.

p is the target's distribution of a row's next token, a constant; q the drafter's; both at
temperature 1.

Shape legend: R rows, V vocab.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("l1", "kl", "lk")
LK_DECAY = 3.0
"""How fast ``lk`` turns from KL to total variation as the overlap grows."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """How much of a row's loss compares with the target's distribution instead of the label.

    Raises:
        ValueError: There is no such kind, or the share lies outside [0, 1].
    """

    kind: str
    """One of ``KINDS``, see ``divergence``."""
    share: float
    """The loss is ``(1 - share) * cross entropy + share * divergence``."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be at least 0 and at most 1, not {self.share}")


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Chance that a draft drawn from q is accepted by speculative sampling: sum of min(p, q).

    Args:
        p: ``[R, V]``.
        q: ``[R, V]``.

    Returns:
        ``[R]``, at most 1.
    """
    return torch.minimum(p, q).sum(dim=-1).clamp(max=1)


def divergence(kind: str, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Compare rows, and derive by the logits that q is the softmax of.

    ``l1`` is the sum of abs(p - q), twice the total variation TV = 1 - overlap; ``kl`` is
    KL(p, q); ``lk`` is ``lam * KL + (1 - lam) * TV`` with the constant
    ``lam = exp(-3 * overlap)``: KL far from the target, TV near it. Source of ``lk``: LK losses,
    arXiv 2602.23881.

    Args:
        kind: One of ``KINDS``.
        log_p: ``[R, V]``.
        log_q: ``[R, V]``.

    Returns:
        ``[R]``, and its gradient ``[R, V]``.
    """
    p, q = log_p.exp(), log_q.exp()
    common = overlap(p, q)
    if kind == "l1":
        return 2 * (1 - common), 2 * _variation_gradient(p, q)
    kl = (p * (log_p - log_q)).sum(dim=-1)
    if kind == "kl":
        return kl, q - p
    lam = torch.exp(-LK_DECAY * common)
    gradient = lam[:, None] * (q - p) + (1 - lam)[:, None] * _variation_gradient(p, q)
    return lam * kl + (1 - lam) * (1 - common), gradient


def _variation_gradient(p: Tensor, q: Tensor) -> Tensor:
    """Of TV. Where p = q either side would do; this one makes it 0 in a row that is all equal."""
    # A byte each: compiled, this is kept for the second look at it.
    below = q <= p
    return q * (torch.where(below, q, 0.0).sum(dim=-1, keepdim=True) - below.to(q.dtype))
