"""Each row sees the first tokens of the sequence and the last few up to itself."""

import torch
from torch import Tensor

from maskgen.families.causal import OFFSET, check_offset
from maskgen.families.family import Family, MaskMod, Spans
from maskgen.families.params import Param
from maskgen.families.spans import rows, stack_spans
from maskgen.intervals import RowIntervals


def sink_window(
    Q_LEN: int,
    KV_LEN: int,
    sinks: int,
    window: int,
    *,
    offset: int = 0,
    device: torch.device | str | None = None,
) -> RowIntervals:
    """Attention sinks and a causal sliding window.

    Args:
        Q_LEN: Query rows, in tokens.
        KV_LEN: Key columns, in tokens.
        sinks: Tokens at the start of the sequence that every later row sees.
        window: Keys of the window, the row itself counted.
        offset: Row q stands at key position ``q + offset``.
        device: Where the spans lie; the CPU by default.

    Raises:
        MaskSpecError: A value breaks its rule.
    """
    return SINK_WINDOW.intervals(
        Q_LEN, KV_LEN, device=device, sinks=sinks, window=window, offset=offset
    )


def _spans(
    Q_LEN: int, KV_LEN: int, device: torch.device, *, sinks: int, window: int, offset: int
) -> Spans:
    row = rows(Q_LEN, device, offset)
    sink = (0, (row + 1).clamp(max=sinks))
    recent = ((row + (1 - window)).clamp(min=sinks), row + 1)
    return stack_spans([sink, recent], Q_LEN, KV_LEN, row)


def _mask_mod(
    Q_LEN: int, KV_LEN: int, device: torch.device, *, sinks: int, window: int, offset: int
) -> MaskMod:
    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx + offset - kv_idx
        return (distance >= 0) & ((distance < window) | (kv_idx < sinks))

    return mask_mod


SINK_WINDOW = Family(
    name="sink_window",
    revision=1,
    formula="kv <= q + offset & (kv < sinks | q + offset - kv < window)",
    source="StreamingLLM (arXiv 2309.17453) section 3.2",
    params=(
        Param("sinks", "int", "first tokens that every later row sees", minimum=0),
        Param("window", "int", "keys of the window, the row itself counted", minimum=1),
        OFFSET,
    ),
    span_fn=_spans,
    mask_mod_fn=_mask_mod,
    max_k_fn=lambda Q_LEN, KV_LEN, sinks, window, offset: 2,
    check_fn=check_offset,
    analytic_above=0,
)
