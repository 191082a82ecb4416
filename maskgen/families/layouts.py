"""Anchor layouts for DFlash, drawn ahead and alike on every machine.

Legend: L layouts, N anchors of a layout, S context tokens.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from maskgen.errors import MaskSpecError
from maskgen.families.family import check_length


def default_answer_starts(context: int) -> list[int]:
    """Where answers are taken to start: 0, an eighth, a quarter and a half of the context."""
    return [0, context // 8, context // 4, context // 2]


def dflash_layouts(
    context: int,
    anchors: int,
    draft_block_size: int,
    draws: int,
    answer_starts: Sequence[int] | None,
    key: bytes,
) -> tuple[Tensor, Tensor]:
    """Draw sets of anchors: ``draws`` of them for each place where an answer may start.

    Layout l belongs to the start ``a = answer_starts[l // draws]`` and takes
    ``min(anchors, S - 1 - a)`` distinct positions of ``[a, S - 1)``, each set equally likely.
    The last context token is no anchor: nothing after it could be predicted.

    Each layout ranks the positions by raw 64-bit integers of its own Philox stream (keyed by
    ``key``, counter by l), so more draws or other starts leave the streams as they are, and no
    distribution code of a NumPy version is involved.

    Args:
        context: S, in tokens.
        anchors: N, draft blocks of a layout.
        draft_block_size: Slots of a draft block; its last slots may lie past the context.
        draws: Layouts for each answer start.
        answer_starts: First positions that may hold an anchor, or None for the default ones.
        key: What the draw depends on, the spec's digest.

    Returns:
        Anchors int32 ``[L, N]``, ascending in the first ``n_valid``, then 0; and ``n_valid``
        int32 ``[L]``. ``L = len(answer_starts) * draws``.

    Raises:
        MaskSpecError: A count is below 1, or a start leaves no position.
    """
    check_length("context", context)
    if context < 2:
        raise MaskSpecError("context", context, "must be at least 2: an anchor and a token after")
    for field, value in (
        ("anchors", anchors),
        ("draft_block_size", draft_block_size),
        ("draws", draws),
    ):
        check_length(field, value)
    starts = default_answer_starts(context) if answer_starts is None else list(answer_starts)
    if not starts:
        raise MaskSpecError("answer_starts", starts, "must name at least one position")
    for start in starts:
        if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start < context - 1:
            rule = f"each must be a position from 0 to {context - 2}: context - 1 is no anchor"
            raise MaskSpecError("answer_starts", start, rule)
    philox_key = int.from_bytes(hashlib.sha256(key).digest()[:16], "little")
    drawn = np.zeros((len(starts) * draws, anchors), dtype=np.int32)
    n_valid = np.zeros(len(starts) * draws, dtype=np.int32)
    for layout in range(len(starts) * draws):
        start = starts[layout // draws]
        candidates = context - 1 - start
        n = min(anchors, candidates)
        # The layout's number fills the highest counter word, so streams cannot overlap.
        stream = np.random.Philox(key=philox_key, counter=layout << 192)
        rank = np.argsort(stream.random_raw(candidates), kind="stable")
        drawn[layout, :n] = np.sort(rank[:n]) + start
        n_valid[layout] = n
    return torch.from_numpy(drawn), torch.from_numpy(n_valid)
