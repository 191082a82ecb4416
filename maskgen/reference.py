"""A spec -> its mask by formula, cell by cell: the oracle that spans and tables are compared with.

Evaluated as torch's ``create_block_mask`` does it, by vmap over index tensors, so nothing of the
row intervals takes part. Legend: T tiles, Q and KV cells of a tile.
"""

from typing import Any

import torch
from torch import Tensor

from maskgen.entry import MaskEntry
from maskgen.families.family import MaskMod
from maskgen.mask_spec import MaskSpec
from maskgen.named_family import get_family
from maskgen.named_function import load_function

CHUNK_CELLS = 1 << 18
"""Most cells evaluated at once; a cell costs some tens of bytes meanwhile."""


def reference_mask_mod(entry: MaskEntry) -> MaskMod:
    """Return the mask_mod that defines an entry: the family's formula, or the named function.

    Raises:
        MaskSpecError: The function cannot be imported, or the family refuses the parameters.
    """
    spec = entry.spec
    if spec.is_function:
        return load_function(spec.family)
    family = get_family(spec.family)
    params: dict[str, Any] = {**spec.family_params, **entry.params}
    return family.mask_mod(spec.Q_LEN, spec.KV_LEN, **params)


def reference_heads(spec: MaskSpec, entry: MaskEntry) -> tuple[int, int]:
    """Return the batch and head counts that the reference has to be evaluated for."""
    if spec.is_function:
        return spec.params.get("B", 1), spec.params.get("H", 1)
    return entry.spans.B, entry.spans.H


def reference_tiles(mask_mod: MaskMod, bh: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Evaluate rectangular tiles of the mask.

    Args:
        mask_mod: ``(b, h, q_idx, kv_idx) -> bool``.
        bh: Batch and head of each tile, int64 ``[T, 2]``.
        q_idx: Rows of each tile, int64 ``[T, Q]``.
        kv_idx: Columns of each tile, int64 ``[T, KV]``.

    Returns:
        bool ``[T, Q, KV]``.
    """
    over_kv = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    over_q = torch.vmap(over_kv, in_dims=(None, None, 0, None))
    over_tiles = torch.vmap(over_q, in_dims=(0, 0, 0, 0))
    tile_cells = q_idx.shape[1] * kv_idx.shape[1]
    step = max(1, CHUNK_CELLS // tile_cells)
    parts = [
        over_tiles(
            bh[i : i + step, 0], bh[i : i + step, 1], q_idx[i : i + step], kv_idx[i : i + step]
        )
        for i in range(0, len(bh), step)
    ]
    tiles = torch.cat(parts).to(torch.bool)
    return tiles.expand(len(bh), q_idx.shape[1], kv_idx.shape[1])
