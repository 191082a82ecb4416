"""One draft block as decoding drafts it: one pass over its slots, then one choice after another."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from runtime.dflash.network.drafter import Attention, Drafter, KeyValue
from runtime.dflash.network.sliding import sliding_cells
from runtime.static.attention import dense_attention


class DraftedBlock(NamedTuple):
    """What a drafter makes of one block."""

    logits: Tensor
    """``[drafts, V]``, that of the token after the anchor first; the largest of each is the draft.
    With a Markov head float32, and those that follow from the drafts before."""
    confidence: Tensor | None = None
    """float32 ``[drafts]`` in [0, 1], of a drafter with a confidence head."""


def draft_block(
    drafter: Drafter,
    anchor: Tensor,
    position: int,
    context: list[KeyValue],
    *,
    embed_weight: Tensor,
    head_weight: Tensor,
) -> DraftedBlock:
    """Draft the tokens at ``position + 1`` and after.

    Args:
        drafter: The network.
        anchor: int64 ``[1]``, the token at ``position``.
        position: Tokens before it.
        context: Each layer's keys and values of these.
        embed_weight: ``[V, H]``, the target's.
        head_weight: ``[V, H]``, the target's.
    """
    x = drafter.block_inputs(anchor[None], embed_weight)
    positions = torch.arange(position, position + drafter.config.draft_block_size, device=x.device)
    drafts = drafter.config.reach - 1
    sliding = _sliding(drafter, position, x.device)
    with torch.autocast(x.device.type, enabled=False):
        hidden = drafter.draft(x, context, positions, _see_all, sliding)[0, -drafts:]
        logits = hidden.to(head_weight.dtype) @ head_weight.T
        if drafter.markov_head is None:
            return DraftedBlock(logits)
        previous, found, rows = anchor, [], []
        for slot in range(len(logits)):
            rows.append(drafter.markov_head.rows(previous))
            found.append(logits[slot : slot + 1].float() + drafter.markov_head.logits(rows[-1]))
            previous = found[-1].argmax(dim=-1)
        confidence = None
        if drafter.confidence_head is not None:
            confidence = drafter.confidence_head(hidden, torch.cat(rows)).sigmoid()
        return DraftedBlock(torch.cat(found), confidence)


def _see_all(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One block sees its whole context and itself, both ways."""
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, enable_gqa=grouped)


def _sliding(drafter: Drafter, position: int, device: torch.device) -> Attention | None:
    """Attention of the sliding layers over the whole cache, of which the rest is masked."""
    window = drafter.config.sliding_window
    if window is None:
        return None
    size = drafter.config.draft_block_size
    return dense_attention(sliding_cells(position, size, window, device))
