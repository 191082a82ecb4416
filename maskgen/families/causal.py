"""Each row sees itself and everything before it."""

from typing import Any

import torch
from torch import Tensor

from maskgen.errors import MaskSpecError
from maskgen.families.family import Family, MaskMod, Spans
from maskgen.families.params import Param
from maskgen.families.spans import rows, stack_spans
from maskgen.intervals import RowIntervals

OFFSET = Param(
    "offset", "int", "row q stands at key position q + offset; 0 aligns top-left", default=0
)


def causal(
    Q_LEN: int, KV_LEN: int, offset: int = 0, *, device: torch.device | str | None = None
) -> RowIntervals:
    """Causal attention.

    Args:
        Q_LEN: Query rows, in tokens.
        KV_LEN: Key columns, in tokens.
        offset: Row q stands at key position ``q + offset``. 0 aligns top-left, as FlexAttention
            does; ``KV_LEN - Q_LEN`` aligns bottom-right, as a decoder with a KV cache does.
        device: Where the spans lie; the CPU by default.

    Raises:
        MaskSpecError: A value breaks its rule.
    """
    return CAUSAL.intervals(Q_LEN, KV_LEN, device=device, offset=offset)


def check_offset(Q_LEN: int, KV_LEN: int, params: dict[str, Any]) -> None:
    """Raise MaskSpecError when the offset takes every row off the columns."""
    offset = params["offset"]
    if not -Q_LEN < offset < KV_LEN:
        rule = f"must lie between -{Q_LEN} and {KV_LEN}, both exclusive (-Q_LEN and KV_LEN)"
        raise MaskSpecError("offset", offset, rule)


def _spans(Q_LEN: int, KV_LEN: int, device: torch.device, *, offset: int) -> Spans:
    row = rows(Q_LEN, device, offset)
    return stack_spans([(0, row + 1)], Q_LEN, KV_LEN, row)


def _mask_mod(Q_LEN: int, KV_LEN: int, device: torch.device, *, offset: int) -> MaskMod:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx <= q_idx + offset

    return mask_mod


CAUSAL = Family(
    name="causal",
    revision=1,
    formula="kv <= q + offset",
    source="Decoder attention; torch.nn.attention.bias.causal_upper_left and causal_lower_right",
    params=(OFFSET,),
    span_fn=_spans,
    mask_mod_fn=_mask_mod,
    max_k_fn=lambda Q_LEN, KV_LEN, offset: 1,
    check_fn=check_offset,
)
