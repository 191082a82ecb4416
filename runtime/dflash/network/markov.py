"""DSpark's heads: what the token before a slot adds to its logits, and how sure a draft is.

A drafter drafts its slots at once, so none knows what the one before it chose. The Markov head adds
``markov_w2 @ markov_w1[token before]`` to a slot's logits: in training the true token, in decoding
the draft just chosen. The confidence head reads a slot's hidden state and that row of
``markov_w1``, and learns the chance that the draft is accepted: the overlap of the drafter's
distribution with the target's.

Source: DSpark, arXiv 2607.05147; the vanilla head, parameter names as SGLang and vLLM serve them.

Shapes: V vocab, H hidden size, r ``markov_rank``, R rows.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding

from runtime.dflash.loss.head import HeadLoss

FIRST_STD = 0.01
"""Of ``markov_w1`` at the start, where ``markov_w2`` is 0 and the drafter DFlash's."""
HEADS = ("markov_head.", "confidence_head.")
"""What the names of these parameters begin with."""


class MarkovHead(nn.Module):
    """Logits of rank r over pairs of neighbouring tokens."""

    def __init__(self, vocab_size: int, markov_rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, markov_rank)
        self.markov_w2 = nn.Linear(markov_rank, vocab_size, bias=False)

    def rows(self, previous: Tensor) -> Tensor:
        """Rows of ``markov_w1``, ``[R,r]``, of the tokens before, int64 ``[R]``.

        Not within compiled code: there the gradient would be added up by atomics, in another order
        each time. On a GPU that of ``embedding`` was found to change, too, from 3,072 rows on;
        indexing sorts the tokens first, and reads nothing on the host, so it can be captured. The
        gradient of a common token is a long sum, hence float32; without one there is no copy.
        """
        table = self.markov_w1.weight
        if table.is_cuda and torch.is_grad_enabled():
            return table.float()[previous].to(table.dtype)
        return embedding(previous, table)

    def logits(self, rows: Tensor) -> Tensor:
        """What is added to the logits, float32 ``[R,V]``, by ``rows [R,r]``."""
        return (rows @ self.markov_w2.weight.T).float()


class ConfidenceHead(nn.Module):
    """How likely each draft is accepted."""

    def __init__(self, hidden_size: int, markov_rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + markov_rank, 1)

    def forward(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Logits, float32 ``[R]``, of ``hidden [R,H]`` and ``MarkovHead.rows``."""
        out: Tensor = self.proj(torch.cat((hidden, rows), dim=-1))
        return out.squeeze(-1).float()


@torch.no_grad()
def start_heads(drafter: nn.Module, generator: torch.Generator) -> None:
    """Fill the heads of a drafter, if it has any, so that it drafts as it would without them.

    Args:
        drafter: On the CPU.
        generator: On the CPU.
    """
    for name, parameter in drafter.named_parameters():
        if name == "markov_head.markov_w1.weight":
            parameter.normal_(0.0, FIRST_STD, generator=generator)
        elif name.startswith(HEADS):
            parameter.zero_()


def tokens_before(anchor_tokens: Tensor, labels: Tensor) -> Tensor:
    """The true token before each trained slot: the anchor's own before slot 1.

    Args:
        anchor_tokens: int64 ``[B,N]``.
        labels: int64 ``[B,N,K]``, the tokens that slots 1..K should predict.

    Returns:
        int64 ``[B,N,K]``.
    """
    return torch.cat((anchor_tokens[..., None], labels[..., :-1]), dim=-1)


def with_confidence(result: HeadLoss, logits: Tensor, weights: Tensor) -> HeadLoss:
    """Add what the confidence head is to learn: the overlap that the drafter has right now.

    Cross entropy of each slot's confidence with its overlap, a constant; the gradient goes on into
    what the head reads. Source: DSpark, arXiv 2607.05147.

    Args:
        result: With a teacher.
        logits: float32 ``[R]``, of ``ConfidenceHead``.
        weights: float32 ``[R]``, those given to ``head_loss``.
    """
    assert result.overlap is not None, "there is a teacher"
    wrong = binary_cross_entropy_with_logits(logits, result.overlap.detach(), reduction="none")
    loss = (wrong * weights).sum()
    entropy = result.loss if result.cross_entropy is None else result.cross_entropy
    return result._replace(
        loss=result.loss + loss, cross_entropy=entropy.detach(), confidence=loss.detach()
    )
