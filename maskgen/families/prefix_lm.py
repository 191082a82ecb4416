"""A prefix is seen by every row, the rest is causal."""

from typing import Any

import torch
from torch import Tensor

from maskgen.errors import MaskSpecError
from maskgen.families.causal import OFFSET, check_offset
from maskgen.families.draw import Draw
from maskgen.families.family import Family, MaskMod, Spans
from maskgen.families.params import Param, RuntimeParam
from maskgen.families.spans import rows, stack_spans
from maskgen.intervals import RowIntervals


def prefix_lm(
    Q_LEN: int,
    KV_LEN: int,
    prefix: int | None = None,
    *,
    prefix_lens: Tensor | list[int] | None = None,
    offset: int = 0,
    device: torch.device | str | None = None,
) -> RowIntervals:
    """Prefix language model: bidirectional over the prefix, causal after it.

    Args:
        Q_LEN: Query rows, in tokens.
        KV_LEN: Key columns, in tokens.
        prefix: Length of the prefix, in tokens.
        prefix_lens: Length of each sample's prefix, integers ``[B]``, in place of ``prefix``.
        offset: Row q stands at key position ``q + offset``.
        device: Where the spans lie; by default where the tensors given lie, else the CPU.

    Raises:
        MaskSpecError: A value breaks its rule, or both prefixes or none are given.
    """
    return PREFIX_LM.intervals(
        Q_LEN, KV_LEN, device=device, prefix=prefix, prefix_lens=prefix_lens, offset=offset
    )


def _check(Q_LEN: int, KV_LEN: int, params: dict[str, Any]) -> None:
    check_offset(Q_LEN, KV_LEN, params)
    prefix = params["prefix"]
    if prefix is not None and prefix > KV_LEN:
        raise MaskSpecError("prefix", prefix, f"must be at most KV_LEN = {KV_LEN}")
    if prefix is not None and "prefix_lens" in params:
        raise MaskSpecError("prefix_lens", prefix, "give prefix or prefix_lens, not both")
    if "prefix_lens" in params:
        most = int(params["prefix_lens"].max())
        if most > KV_LEN:
            raise MaskSpecError("prefix_lens", most, f"each must be 0 to {KV_LEN} tokens")


def _limits(prefix: int | None, prefix_lens: Tensor | None, device: torch.device) -> Tensor:
    if prefix_lens is not None:
        return prefix_lens
    if prefix is None:
        rule = "is required by family 'prefix_lm', or prefix_lens in its place"
        raise MaskSpecError("prefix", None, rule)
    return torch.full((1,), prefix, dtype=torch.int32, device=device)


def _spans(
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device,
    *,
    prefix: int | None,
    offset: int,
    prefix_lens: Tensor | None,
) -> Spans:
    row = rows(Q_LEN, device, offset)
    limit = _limits(prefix, prefix_lens, device).unsqueeze(1)
    return stack_spans([(0, torch.maximum(row + 1, limit))], Q_LEN, KV_LEN, row)


def _mask_mod(
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device,
    *,
    prefix: int | None,
    offset: int,
    prefix_lens: Tensor | None,
) -> MaskMod:
    limit = _limits(prefix, prefix_lens, device)
    batched = int(limit.shape[0] > 1)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < limit[b * batched]) | (kv_idx <= q_idx + offset)

    return mask_mod


def _bounds(
    Q_LEN: int, KV_LEN: int, *, prefix: int | None, offset: int
) -> tuple[RowIntervals, RowIntervals]:
    least, most = (0, KV_LEN) if prefix is None else (prefix, prefix)
    return (
        prefix_lm(Q_LEN, KV_LEN, least, offset=offset),
        prefix_lm(Q_LEN, KV_LEN, most, offset=offset),
    )


def _draw(
    draw: Draw, Q_LEN: int, KV_LEN: int, *, prefix: int | None, offset: int
) -> dict[str, Any]:
    return {"prefix_lens": draw.below(KV_LEN + 1)} if prefix is None else {}


PREFIX_LM = Family(
    name="prefix_lm",
    revision=1,
    formula="kv < prefix | kv <= q + offset",
    source="T5 (arXiv 1910.10683) section 3.2.1; attention-gym generate_prefix_lm_mask",
    params=(
        Param("prefix", "int", "length of the prefix, in tokens", default=None, minimum=0),
        OFFSET,
    ),
    runtime=(RuntimeParam("prefix_lens", "B", "length of each sample's prefix", required=False),),
    span_fn=_spans,
    mask_mod_fn=_mask_mod,
    max_k_fn=lambda Q_LEN, KV_LEN, prefix, offset: 1,
    check_fn=_check,
    bounds_fn=_bounds,
    draw_fn=_draw,
)
