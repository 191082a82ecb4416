"""Index tables to counts and live indices, as they are stored, and back with every check.

Shape legend: B batch, H heads, R query block rows, C KV block columns.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from maskgen.classify import EMPTY, FULL, PARTIAL
from maskgen.errors import LayoutInvariantError


def live(counts: Tensor, width: int) -> Tensor:
    """Which entries of index rows count, bool ``[..., width]``."""
    return torch.arange(width, dtype=torch.int32, device=counts.device) < counts[..., None]


def check_pair(
    packed: Mapping[str, Tensor], counts_name: str, indices_name: str, shape: tuple[int, ...]
) -> None:
    """Check one table pair in its packed form: nothing is allocated by what a size claims.

    Args:
        packed: Packed tables by name, int32 ``[n]`` each.
        counts_name: Name of the counts.
        indices_name: Name of the indices.
        shape: Shape of the index table, rows last but one.

    Raises:
        LayoutInvariantError: A table is missing, a length, a count or an index is out of range, or
            the indices of a row do not ascend.
    """
    for name in (counts_name, indices_name):
        if name not in packed:
            raise LayoutInvariantError(name, sorted(packed), "the table must be given")
        if packed[name].dtype != torch.int32 or packed[name].dim() != 1:
            kind = (tuple(packed[name].shape), packed[name].dtype)
            raise LayoutInvariantError(name, kind, "must be packed as int32 [n]")
    counts, indices = (packed[name].numpy() for name in (counts_name, indices_name))
    *rows_shape, width = shape
    rows = int(torch.Size(rows_shape).numel())
    if len(counts) != rows:
        raise LayoutInvariantError(counts_name, len(counts), f"must have {rows} counts")
    if counts.min() < 0 or counts.max() > width:
        limits = (int(counts.min()), int(counts.max()))
        raise LayoutInvariantError(counts_name, limits, f"counts must lie in [0, {width}]")
    total = int(counts.sum(dtype=np.int64))
    if len(indices) != total:
        rule = f"must have the {total} indices counted"
        raise LayoutInvariantError(indices_name, len(indices), rule)
    if total and (indices.min() < 0 or indices.max() >= width):
        limits = (int(indices.min()), int(indices.max()))
        raise LayoutInvariantError(indices_name, limits, f"indices must lie in [0, {width})")
    falls = indices[1:] <= indices[:-1]
    # Where a row begins the list may start again.
    begins = counts.cumsum(dtype=np.int64)
    begins = begins[(begins > 0) & (begins < total)]
    falls[begins - 1] = False
    if falls.any():
        row = int(np.repeat(np.arange(rows), counts)[1:][falls][0])
        raise LayoutInvariantError(indices_name, f"row {row}", "indices of a row must ascend")


def check_agreement(packed: Mapping[str, Tensor], shape: tuple[int, int, int, int]) -> None:
    """Check that no block is both full and partial, and that the q tables are the transposes.

    Args:
        packed: Packed tables whose pairs are right, each for itself.
        shape: B, H, R and C.

    Raises:
        LayoutInvariantError: They do not agree; names the first block.
    """
    B, H, R, C = shape
    kinds = np.full(B * H * R * C, EMPTY, dtype=np.uint8)
    for prefix, kind in (("", PARTIAL), ("full_", FULL)):
        row, column = _listed(packed, f"{prefix}kv")
        place = row * np.int32(C) + column
        twice = kinds[place] != EMPTY
        if twice.any():
            block = _block(place, twice, shape)
            rule = "a block may not be both full and partial"
            raise LayoutInvariantError("full_kv_indices", block, rule)
        kinds[place] = kind
    for prefix, kind in (("", PARTIAL), ("full_", FULL)):
        name = f"{prefix}q"
        column, row = _listed(packed, name)
        mask, column = column // np.int32(C), column % np.int32(C)
        place = (mask * np.int32(R) + row) * np.int32(C) + column
        # As many as there are, none of them twice, each of them there: so it is the transpose.
        found = len(place), len(packed[f"{prefix}kv_indices"])
        if found[0] != found[1]:
            rule = f"must list as many blocks as {prefix}kv_num_blocks"
            raise LayoutInvariantError(f"{name}_num_blocks", found, rule)
        other = kinds[place] != kind
        if other.any():
            rule = f"must be the transpose of {prefix}kv_indices"
            raise LayoutInvariantError(f"{name}_indices", _block(place, other, shape), rule)


def _listed(packed: Mapping[str, Tensor], name: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Row and index of every entry of a table pair, rows counted over B and H, int32 ``[n]``."""
    counts = packed[f"{name}_num_blocks"].numpy()
    row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return row, packed[f"{name}_indices"].numpy()


def _block(
    place: NDArray[np.int32], wrong: NDArray[np.bool_], shape: tuple[int, int, int, int]
) -> str:
    where = tuple(int(i) for i in np.unravel_index(int(place[wrong][0]), shape))
    return f"block (b, h, row, column) = {where}"


def unpack_pair(
    packed: Mapping[str, Tensor], counts_name: str, indices_name: str, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Counts and index rows of one table pair that was checked.

    Returns:
        Counts int32 ``shape[:-1]`` and indices int32 ``shape``, tails zero.
    """
    counts = packed[counts_name]
    *rows_shape, width = shape
    indices = torch.zeros(len(counts), width, dtype=torch.int32, device="cpu")
    # NumPy's boolean assignment copies whole runs.
    indices.numpy()[live(counts, width).numpy()] = packed[indices_name].numpy()
    return counts.clone().view(rows_shape), indices.view(shape)
