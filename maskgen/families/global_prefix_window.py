"""Global tokens at the front that see and are seen by all, and a window on both sides elsewhere."""

from typing import Any

import torch
from torch import Tensor

from maskgen.errors import MaskSpecError
from maskgen.families.family import Family, MaskMod, Spans
from maskgen.families.params import Param
from maskgen.families.spans import rows, stack_spans
from maskgen.intervals import RowIntervals


def global_prefix_window(
    Q_LEN: int,
    KV_LEN: int,
    global_tokens: int,
    radius: int,
    *,
    device: torch.device | str | None = None,
) -> RowIntervals:
    """Longformer's global and sliding attention, the global tokens being the first ones.

    Args:
        Q_LEN: Query rows, in tokens.
        KV_LEN: Key columns, in tokens.
        global_tokens: Tokens at the front that see every key and that every row sees.
        radius: Largest distance, to either side, of the window.
        device: Where the spans lie; the CPU by default.

    Raises:
        MaskSpecError: A value breaks its rule.
    """
    return GLOBAL_PREFIX_WINDOW.intervals(
        Q_LEN, KV_LEN, device=device, global_tokens=global_tokens, radius=radius
    )


def _spans(
    Q_LEN: int, KV_LEN: int, device: torch.device, *, global_tokens: int, radius: int
) -> Spans:
    row = rows(Q_LEN, device)
    front = torch.where(row < global_tokens, KV_LEN, global_tokens).to(torch.int32)
    near = (torch.maximum(row - radius, front), row + (radius + 1))
    return stack_spans([(0, front), near], Q_LEN, KV_LEN, row)


def _mask_mod(
    Q_LEN: int, KV_LEN: int, device: torch.device, *, global_tokens: int, radius: int
) -> MaskMod:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx - kv_idx
        near = (distance <= radius) & (distance >= -radius)
        return near | (q_idx < global_tokens) | (kv_idx < global_tokens)

    return mask_mod


def _check(Q_LEN: int, KV_LEN: int, params: dict[str, Any]) -> None:
    if params["global_tokens"] > KV_LEN:
        rule = f"must be at most KV_LEN = {KV_LEN}"
        raise MaskSpecError("global_tokens", params["global_tokens"], rule)


GLOBAL_PREFIX_WINDOW = Family(
    name="global_prefix_window",
    revision=1,
    formula="|q - kv| <= radius | q < global_tokens | kv < global_tokens",
    source="Longformer (arXiv 2004.05150) section 3.1; attention-gym "
    "generate_global_sliding_window with the first tokens global",
    params=(
        Param("global_tokens", "int", "tokens at the front that see and are seen", minimum=0),
        Param("radius", "int", "largest distance within the window", minimum=0),
    ),
    span_fn=_spans,
    mask_mod_fn=_mask_mod,
    max_k_fn=lambda Q_LEN, KV_LEN, global_tokens, radius: 2,
    check_fn=_check,
    analytic_above=0,
)
