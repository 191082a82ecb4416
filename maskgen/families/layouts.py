"""Anchor layouts for DFlash, drawn ahead and alike on every machine.

Legend: L layouts, N anchors of a layout, S context tokens.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from maskgen.errors import MaskSpecError
from maskgen.families.params import check_length
from maskgen.windows import Window


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
        windows: Where anchors may fall, see ``maskgen.windows``.
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
