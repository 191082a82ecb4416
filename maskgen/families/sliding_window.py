"""Each row sees the last few tokens up to itself."""

import torch
from torch import Tensor

from maskgen.families.causal import OFFSET, check_offset
from maskgen.families.family import Family, MaskMod, Spans
from maskgen.families.params import Param
from maskgen.families.spans import rows, stack_spans
from maskgen.intervals import RowIntervals


def sliding_window(
    Q_LEN: int,
    KV_LEN: int,
    window: int,
    *,
    inclusive: bool = False,
    offset: int = 0,
    device: torch.device | str | None = None,
) -> RowIntervals:
    """Causal attention within a window.

    Args:
        Q_LEN: Query rows, in tokens.
        KV_LEN: Key columns, in tokens.
        window: Keys a row may see, itself counted, as in Hugging Face and FlashAttention.
        inclusive: Take ``window`` as the largest distance instead, so one key more, as
            attention-gym does.
        offset: Row q stands at key position ``q + offset``.
        device: Where the spans lie; the CPU by default.

    Raises:
        MaskSpecError: A value breaks its rule.
    """
    return SLIDING_WINDOW.intervals(
        Q_LEN, KV_LEN, device=device, window=window, inclusive=inclusive, offset=offset
    )


def _spans(
    Q_LEN: int, KV_LEN: int, device: torch.device, *, window: int, inclusive: bool, offset: int
) -> Spans:
    row = rows(Q_LEN, device, offset)
    return stack_spans([(row + (1 - window - inclusive), row + 1)], Q_LEN, KV_LEN, row)


def _mask_mod(
    Q_LEN: int, KV_LEN: int, device: torch.device, *, window: int, inclusive: bool, offset: int
) -> MaskMod:
    reach = window + inclusive

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = q_idx + offset - kv_idx
        return (distance >= 0) & (distance < reach)

    return mask_mod


SLIDING_WINDOW = Family(
    name="sliding_window",
    revision=1,
    formula="0 <= q + offset - kv < window (<= window when inclusive)",
    source="Longformer (arXiv 2004.05150) section 3.1, causal; Hugging Face sliding_window; "
    "attention-gym generate_sliding_window (inclusive)",
    params=(
        Param("window", "int", "keys a row may see, itself counted", minimum=1),
        Param("inclusive", "bool", "window is the largest distance instead", default=False),
        OFFSET,
    ),
    span_fn=_spans,
    mask_mod_fn=_mask_mod,
    max_k_fn=lambda Q_LEN, KV_LEN, window, inclusive, offset: 1,
    check_fn=check_offset,
    analytic_above=0,
)
