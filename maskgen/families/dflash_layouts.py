"""Anchor layouts for DFlash, drawn ahead and alike on every machine.

Legend: L layouts, N anchors of a layout, S context tokens.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maskgen.errors import MaskSpecError
from maskgen.families.answer_windows import (
    Window,
    answer_windows,
    default_answer_ends,
    default_answer_starts,
    earlier_answer_ends,
    earlier_answer_starts,
)
from maskgen.families.layouts import Layouts
from maskgen.families.params import Param, check_length


def dflash_layouts(
    context: int,
    anchors: int,
    draft_block_size: int,
    draws: int,
    windows: Sequence[Window],
    key: bytes,
) -> tuple[Tensor, Tensor]:
    """Draw sets of anchors: ``draws`` of them for each window.

    Layout l belongs to the window ``(a, e) = windows[l // draws]`` and takes
    ``min(anchors, e - a)`` distinct positions of ``[a, e)``, each set equally likely.

    Each layout ranks the positions by raw 64-bit integers of its own Philox stream (keyed by
    ``key``, counter by l), so no distribution code of a NumPy version is involved.

    Args:
        context: S, in tokens.
        anchors: N, draft blocks of a layout.
        draft_block_size: Slots of a draft block; its last slots may lie past the context.
        draws: Layouts of each window.
        windows: Where anchors may fall, see ``answer_windows``.
        key: What the draw depends on, the spec's digest.

    Returns:
        Anchors int32 ``[L, N]``, ascending in the first ``n_valid``, then 0; and ``n_valid``
        int32 ``[L]``. ``L = len(windows) * draws``.

    Raises:
        MaskSpecError: A count is below 1, or a window is empty or reaches past the context.
    """
    context = check_length("context", context)
    if context < 2:
        raise MaskSpecError("context", context, "must be at least 2: an anchor and a token after")
    check_length("draft_block_size", draft_block_size)
    anchors, draws = check_length("anchors", anchors), check_length("draws", draws)
    if not windows:
        raise MaskSpecError("windows", list(windows), "must name at least one window")
    for start, end in windows:
        if not 0 <= start < end <= context - 1:
            rule = f"must lie within [0, {context - 1}): the last token is no anchor"
            raise MaskSpecError("windows", (start, end), rule)
    philox_key = int.from_bytes(hashlib.sha256(key).digest()[:16], "little")
    drawn = np.zeros((len(windows) * draws, anchors), dtype=np.int32)
    n_valid = np.zeros(len(windows) * draws, dtype=np.int32)
    for layout in range(len(windows) * draws):
        start, end = windows[layout // draws]
        candidates = end - start
        n = min(anchors, candidates)
        # The layout's number fills the highest counter word, so streams cannot overlap.
        stream = np.random.Philox(key=philox_key, counter=layout << 192)
        rank = np.argsort(stream.random_raw(candidates), kind="stable")
        drawn[layout, :n] = np.sort(rank[:n]) + start
        n_valid[layout] = n
    return torch.from_numpy(drawn), torch.from_numpy(n_valid)


def _draw(
    Q_LEN: int,
    KV_LEN: int,
    key: bytes,
    *,
    draft_block_size: int,
    draws: int,
    answer_starts: list[int],
    answer_ends: list[int],
    **_: Any,
) -> dict[str, Tensor]:
    anchors, n_valid = dflash_layouts(
        KV_LEN - Q_LEN,
        Q_LEN // draft_block_size,
        draft_block_size,
        draws,
        answer_windows(answer_starts, answer_ends),
        key,
    )
    return {"anchors": anchors, "n_valid": n_valid}


def _check(Q_LEN: int, KV_LEN: int, params: dict[str, Any]) -> None:
    context = KV_LEN - Q_LEN
    if params["answer_starts"] is None:
        params["answer_starts"] = default_answer_starts(context)
    if params["answer_ends"] is None:
        params["answer_ends"] = default_answer_ends(context)
    starts, ends = params["answer_starts"], params["answer_ends"]
    for name in ("answer_starts", "answer_ends"):
        if not params[name]:
            raise MaskSpecError(name, [], "must not be empty")
    if max(starts) > context - 2:
        # An anchor needs a later supervised token, so the last position is no candidate.
        rule = f"must be at most context - 2 = {context - 2}"
        raise MaskSpecError("answer_starts", starts, rule)
    if max(ends) > context:
        raise MaskSpecError("answer_ends", ends, f"must be at most context = {context}")
    if not answer_windows(starts, ends):
        rule = f"one end at least must be 2 past a start, and the starts are {starts}"
        raise MaskSpecError("answer_ends", ends, rule)


def _earlier(Q_LEN: int, KV_LEN: int) -> dict[str, list[int]]:
    context = KV_LEN - Q_LEN
    return {
        "answer_starts": earlier_answer_starts(context),
        "answer_ends": earlier_answer_ends(context),
    }


def _count(*, draws: int, answer_starts: list[int], answer_ends: list[int]) -> int:
    return draws * len(answer_windows(answer_starts, answer_ends))


LAYOUTS = Layouts(
    draws=("anchors", "n_valid"),
    params=(
        Param("draws", "int", "layouts of each window", default=8, minimum=1),
        Param("answer_starts", "ints", "where answers start", default=None, minimum=0),
        Param("answer_ends", "ints", "where answers end", default=None, minimum=1),
    ),
    draw_fn=_draw,
    count_fn=_count,
    check_fn=_check,
    earlier_fn=_earlier,
)
