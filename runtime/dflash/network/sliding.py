"""What a draft block's rows see in a sliding layer, as SGLang and vLLM serve it.

A row stands at position anchor + slot and sees the ``window`` positions up to its own: of the
context those before the anchor, of its block those up to its slot. The same cells as the mask
family ``dflash`` has with ``layer = "sliding"`` and convention ``sglang``.
"""

import torch
from torch import Tensor


def sliding_cells(
    anchor: int, slots: int, window: int, device: torch.device | str | None = None
) -> Tensor:
    """The cells of one block over a context of ``anchor`` tokens.

    Args:
        anchor: Position of slot 0, the number of context keys.
        slots: Tokens of the block.
        window: Keys that a row sees, itself counted.
        device: Where the mask lies.

    Returns:
        bool ``[slots, anchor + slots]``: keys are the context, then the block.
    """
    key = torch.arange(anchor + slots, device=device)
    back = key[anchor:, None] - key
    return (back >= 0) & (back < window)
