"""Neighbourhood attention: each cell of a line or a canvas sees the window around it.

Legend: H rows and W columns of the canvas; cell (y, x) is token ``y * W + x``.
"""

from typing import Any

import torch
from torch import Tensor

from maskgen.errors import MaskSpecError
from maskgen.families.family import Family, MaskMod, Spans
from maskgen.families.params import Param
from maskgen.families.spans import rows, stack_spans
from maskgen.intervals import RowIntervals


def natten(
    Q_LEN: int,
    KV_LEN: int,
    canvas: list[int],
    kernel: list[int],
    *,
    device: torch.device | str | None = None,
) -> RowIntervals:
    """Neighbourhood attention; at a border the window moves inside, so its size is constant.

    Args:
        Q_LEN: Cells of the canvas.
        KV_LEN: Equal to Q_LEN.
        canvas: ``[W]`` or ``[H, W]``.
        kernel: Odd window sizes, of the same dimensions.
        device: Where the spans lie; the CPU by default.

    Raises:
        MaskSpecError: A value breaks its rule.
    """
    return NATTEN.intervals(Q_LEN, KV_LEN, device=device, canvas=canvas, kernel=kernel)


def _sizes(canvas: list[int], kernel: list[int]) -> tuple[int, int, int, int]:
    """Canvas and kernel as two dimensions: H, W, kernel height, kernel width."""
    H, W = [1, *canvas][-2:]
    tall, wide = [1, *kernel][-2:]
    return H, W, tall, wide


def _spans(
    Q_LEN: int, KV_LEN: int, device: torch.device, *, canvas: list[int], kernel: list[int]
) -> Spans:
    H, W, tall, wide = _sizes(canvas, kernel)
    row = rows(Q_LEN, device)
    top = (row // W - tall // 2).clamp(0, H - tall)
    left = (row % W - wide // 2).clamp(0, W - wide)
    if wide == W:
        return stack_spans([(top * W, (top + tall) * W)], Q_LEN, KV_LEN, row)
    first = top * W + left
    pairs = [(first + i * W, first + (i * W + wide)) for i in range(tall)]
    return stack_spans(pairs, Q_LEN, KV_LEN, row)


def _mask_mod(
    Q_LEN: int, KV_LEN: int, device: torch.device, *, canvas: list[int], kernel: list[int]
) -> MaskMod:
    H, W, tall, wide = _sizes(canvas, kernel)
    lowest, rightmost = H - tall, W - wide
    half_tall, half_wide = tall // 2, wide // 2

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        top = (q_idx // W - half_tall).clamp(0, lowest)
        left = (q_idx % W - half_wide).clamp(0, rightmost)
        down, right = kv_idx // W - top, kv_idx % W - left
        return (down >= 0) & (down < tall) & (right >= 0) & (right < wide)

    return mask_mod


def _check(Q_LEN: int, KV_LEN: int, params: dict[str, Any]) -> None:
    canvas, kernel = params["canvas"], params["kernel"]
    if len(canvas) not in (1, 2):
        raise MaskSpecError("canvas", canvas, "must be [W] or [H, W]")
    if len(kernel) != len(canvas):
        rule = f"must have as many dimensions as the canvas, {len(canvas)}"
        raise MaskSpecError("kernel", kernel, rule)
    for size, cells in zip(kernel, canvas, strict=True):
        if size % 2 == 0:
            raise MaskSpecError("kernel", size, "must be odd: the window has a middle")
        if size > cells:
            raise MaskSpecError("kernel", size, f"must be at most the canvas, {cells}")
    cells = canvas[0] * (canvas[1] if len(canvas) == 2 else 1)
    for field, length in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        if length != cells:
            raise MaskSpecError(field, length, f"must be the canvas, {cells} cells")


def _max_k(Q_LEN: int, KV_LEN: int, canvas: list[int], kernel: list[int]) -> int:
    _, W, tall, wide = _sizes(canvas, kernel)
    return 1 if wide == W else tall


NATTEN = Family(
    name="natten",
    revision=1,
    formula="|y[kv] - mid(y[q])| <= tall // 2 & |x[kv] - mid(x[q])| <= wide // 2, "
    "mid clamped so that the window stays on the canvas",
    source="Neighborhood Attention Transformer (arXiv 2204.07143); attention-gym generate_natten",
    params=(
        Param("canvas", "ints", "[W] or [H, W], in cells", minimum=1),
        Param("kernel", "ints", "window sizes, odd, of the same dimensions", minimum=1),
    ),
    span_fn=_spans,
    mask_mod_fn=_mask_mod,
    max_k_fn=_max_k,
    check_fn=_check,
)
