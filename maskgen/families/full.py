"""Every row sees every key, or every key of its sample when lengths are given."""

from typing import Any

import torch
from torch import Tensor

from maskgen.errors import MaskSpecError
from maskgen.families.draw import Draw
from maskgen.families.family import Family, MaskMod, Spans
from maskgen.families.params import RuntimeParam
from maskgen.families.spans import rows, stack_spans
from maskgen.intervals import RowIntervals


def full(
    Q_LEN: int,
    KV_LEN: int,
    *,
    lengths: Tensor | list[int] | None = None,
    device: torch.device | str | None = None,
) -> RowIntervals:
    """Bidirectional attention, as encoders and masked diffusion models (LLaDA, MDLM) train.

    Args:
        Q_LEN: Query rows, in tokens.
        KV_LEN: Key columns, in tokens.
        lengths: Real tokens of each sample, integers ``[B]``; the keys after them are padding.
        device: Where the spans lie; by default where the tensors given lie, else the CPU.

    Raises:
        MaskSpecError: A value breaks its rule.
    """
    return FULL.intervals(Q_LEN, KV_LEN, device=device, lengths=lengths)


def _spans(Q_LEN: int, KV_LEN: int, device: torch.device, *, lengths: Tensor | None) -> Spans:
    row = rows(Q_LEN, device)
    end = KV_LEN if lengths is None else lengths.unsqueeze(1)
    return stack_spans([(0, end)], Q_LEN, KV_LEN, row)


def _mask_mod(Q_LEN: int, KV_LEN: int, device: torch.device, *, lengths: Tensor | None) -> MaskMod:
    table = torch.full((1,), KV_LEN, dtype=torch.int32, device=device)
    if lengths is not None:
        table = lengths
    batched = int(table.shape[0] > 1)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return kv_idx < table[b * batched]

    return mask_mod


def check_lengths(KV_LEN: int, params: dict[str, Any]) -> None:
    """Raise MaskSpecError when a sample is longer than the row or has no token."""
    if "lengths" in params:
        low, high = int(params["lengths"].min()), int(params["lengths"].max())
        if low < 1 or high > KV_LEN:
            rule = f"each must be 1 to {KV_LEN} tokens"
            raise MaskSpecError("lengths", low if low < 1 else high, rule)


def _bounds(Q_LEN: int, KV_LEN: int) -> tuple[RowIntervals, RowIntervals]:
    return full(Q_LEN, KV_LEN, lengths=[1]), full(Q_LEN, KV_LEN)


def _draw(draw: Draw, Q_LEN: int, KV_LEN: int) -> dict[str, Any]:
    return {"lengths": 1 + draw.below(KV_LEN)}


FULL = Family(
    name="full",
    revision=1,
    formula="kv < lengths[b] (every kv without lengths)",
    source="Encoder attention; LLaDA (arXiv 2502.09992) with padded keys hidden",
    runtime=(RuntimeParam("lengths", "B", "real tokens of each sample", required=False),),
    span_fn=_spans,
    mask_mod_fn=_mask_mod,
    max_k_fn=lambda Q_LEN, KV_LEN: 1,
    check_fn=lambda Q_LEN, KV_LEN, params: check_lengths(KV_LEN, params),
    bounds_fn=_bounds,
    draw_fn=_draw,
)
