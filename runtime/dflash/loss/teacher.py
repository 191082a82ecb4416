"""The target as a teacher: its last hidden state, from which its head makes the distributions.

The last hidden state is what the head reads, after the final norm; among layers it counts as the
one past the last, ``num_layers``.
"""

import torch
from torch import Tensor

from runtime.errors import ConfigError
from runtime.target.model import Target


def teacher_rows(last: Tensor, anchors: Tensor, draft_block_size: int) -> Tensor:
    """What the head reads where the target predicts the tokens that slots 1..K are to draft.

    Slot k drafts the token at ``anchor + k``, which the target predicts one position before.

    Args:
        last: The last hidden state, ``[B, S, H]``.
        anchors: Integers ``[B, N]``.
        draft_block_size: K + 1.

    Returns:
        ``[B*N*K, H]``; of a slot past the end, which has no weight, the last position's.
    """
    positions = anchors.long()[..., None] + torch.arange(
        draft_block_size - 1, device=anchors.device
    )
    flat = positions.clamp(max=last.shape[1] - 1).flatten(1)
    rows = last.gather(1, flat[..., None].expand(-1, -1, last.shape[2]))
    return rows.flatten(0, 1)


@torch.no_grad()
def check_teacher(target: Target, input_ids: Tensor) -> None:
    """Refuse a target whose logits are not its head times its last hidden state.

    Caps, scales and biases of logits are seen as what they do, whatever they are called.

    Args:
        target: The target.
        input_ids: A few of its tokens, integers ``[1, Q]``.

    Raises:
        ConfigError: They differ, or it has no final norm.
    """
    layers = (target.num_layers,)
    ids = input_ids.to(target.device)
    logits, last = target.extend(ids, target.new_cache(), layer_ids=layers)
    assert last is not None, "it was asked for"
    made = last @ target.head_weight.T
    found, expected = logits.double(), made.double()
    # Both round once or twice on their way.
    allowed = max(1e-4, 4 * torch.finfo(made.dtype).eps) * float(expected.abs().max())
    apart = float((found - expected).abs().max())
    # Not "apart > allowed": what is no number is refused too.
    if not apart <= allowed:
        raise ConfigError(
            "target.model",
            target.name,
            "must have logits that are its head times its last hidden state for train.distill, and "
            f"they lie up to {apart:.3g} from that (rounding explains {allowed:.3g}), as where "
            "they are capped, scaled or have a bias; set train.distill = 'none'",
        )
