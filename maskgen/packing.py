"""Index tables to counts and live indices, as they are stored, and back with every check."""

from collections.abc import Mapping

import torch
from torch import Tensor

from maskgen.errors import LayoutInvariantError


def live(counts: Tensor, width: int) -> Tensor:
    """Which entries of index rows count, bool ``[..., width]``."""
    return torch.arange(width, dtype=torch.int32, device=counts.device) < counts[..., None]


def unpack_pair(
    packed: Mapping[str, Tensor], counts_name: str, indices_name: str, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Counts and index rows of one table pair from their packed form, everything range-checked.

    Args:
        packed: Packed tables by name, int32 ``[n]`` each.
        counts_name: Name of the counts.
        indices_name: Name of the indices.
        shape: Shape of the index table, rows last but one.

    Returns:
        Counts int32 ``shape[:-1]`` and indices int32 ``shape``, tails zero.

    Raises:
        LayoutInvariantError: A length, a count or an index is out of range, or the indices of a
            row do not ascend.
    """
    counts, live_indices = packed[counts_name], packed[indices_name]
    *rows_shape, width = shape
    rows = int(torch.Size(rows_shape).numel())
    for name, table in ((counts_name, counts), (indices_name, live_indices)):
        if table.dtype != torch.int32 or table.dim() != 1:
            kind = (tuple(table.shape), table.dtype)
            raise LayoutInvariantError(name, kind, "must be packed as int32 [n]")
    if counts.numel() != rows:
        raise LayoutInvariantError(counts_name, counts.numel(), f"must have {rows} counts")
    if bool(((counts < 0) | (counts > width)).any()):
        limits = (int(counts.min()), int(counts.max()))
        raise LayoutInvariantError(counts_name, limits, f"counts must lie in [0, {width}]")
    total = int(counts.sum())
    if live_indices.numel() != total:
        found = live_indices.numel()
        raise LayoutInvariantError(indices_name, found, f"must have the {total} indices counted")
    if bool(((live_indices < 0) | (live_indices >= width)).any()):
        limits = (int(live_indices.min()), int(live_indices.max()))
        raise LayoutInvariantError(indices_name, limits, f"indices must lie in [0, {width})")
    listed = live(counts, width)
    indices = torch.zeros(rows, width, dtype=torch.int32)
    # NumPy's boolean assignment copies whole runs.
    indices.numpy()[listed.numpy()] = live_indices.numpy()
    if bool(((indices[:, 1:] <= indices[:, :-1]) & listed[:, 1:]).any()):
        row = int(((indices[:, 1:] <= indices[:, :-1]) & listed[:, 1:]).any(1).nonzero()[0])
        raise LayoutInvariantError(indices_name, f"row {row}", "indices of a row must ascend")
    return counts.clone().view(rows_shape), indices.view(shape)
