"""Block kinds -> a picture: text for a terminal, PNG for the rest, never larger than asked.

A picture cell may stand for many blocks; it is full where all of them are, empty where all of them
are, and partial otherwise. Legend: R block rows, C block columns.
"""

import io
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cache.causes import naming
from maskgen.classify import EMPTY, FULL, PARTIAL
from maskgen.compile import compile_mask
from maskgen.entry import MaskEntry, check_size
from maskgen.errors import MaskSpecError
from maskgen.named_family import get_family

MAX_PIXELS = 2048
"""Longest side of a PNG, in pixels."""
TEXT_COLUMNS = 96
TEXT_ROWS = 48
SYMBOLS = {EMPTY: ".", PARTIAL: "+", FULL: "#"}
COLOURS = {EMPTY: (242, 242, 238), PARTIAL: (238, 153, 58), FULL: (38, 84, 124)}
"""Red, green, blue of each kind, 0 to 255."""
NAMES = {EMPTY: "empty", PARTIAL: "partial", FULL: "full"}

Kinds = NDArray[np.uint8]


def entry_kinds(entry: MaskEntry, *, batch: int = 0, head: int = 0) -> Kinds:
    """Return the kind of each block of one mask, uint8 ``[R, C]``: 0 empty, 1 partial, 2 full.

    Of a parametric entry: full where every batch has a full block, empty where none sees a cell,
    and partial where it depends.

    Args:
        entry: A loaded entry.
        batch: Which layout or batch row.
        head: Which head.

    Raises:
        MaskSpecError: There is no such batch row or head.
    """
    if entry.kind == "parametric":
        spec = entry.spec
        check_size(spec)
        bounds = get_family(spec.family).bounds(spec.Q_LEN, spec.KV_LEN, **spec.family_params)
        must, may = (compile_mask(side, spec.BLOCK_SIZE).block_kinds()[0, 0] for side in bounds)
        depends = torch.where(may == EMPTY, EMPTY, PARTIAL)
        kinds = torch.where(must == FULL, FULL, depends)
    else:
        tables = entry.tables
        for field, value, size in (("layout", batch, tables.B), ("head", head, tables.H)):
            if not 0 <= value < size:
                raise MaskSpecError(field, value, f"must be 0 to {size - 1} in {entry.name!r}")
        kinds = tables.block_kinds()[batch, head]
    return kinds.to(torch.uint8).numpy()


def reduce_kinds(kinds: Kinds, rows: int, columns: int) -> Kinds:
    """Shrink a block map to at most ``rows`` by ``columns`` cells, keeping its proportions.

    Args:
        kinds: uint8 ``[R, C]``.
        rows: Most rows of the result.
        columns: Most columns of the result.
    """
    R, C = kinds.shape
    # One factor for both sides, so that a diagonal stays a diagonal.
    factor = max(-(-R // rows), -(-C // columns), 1)
    lowest, highest = kinds, kinds
    for axis, size in ((0, R), (1, C)):
        groups = np.arange(0, size, factor)
        lowest = np.minimum.reduceat(lowest, groups, axis=axis)
        highest = np.maximum.reduceat(highest, groups, axis=axis)
    return np.where(lowest == highest, lowest, PARTIAL).astype(np.uint8)


def text_picture(kinds: Kinds) -> str:
    """Draw a block map with ``#`` full, ``+`` partial, ``.`` empty."""
    small = reduce_kinds(kinds, TEXT_ROWS, TEXT_COLUMNS)
    symbols = np.array([SYMBOLS[kind] for kind in sorted(SYMBOLS)])
    lines = ["".join(row) for row in symbols[small]]
    legend = ", ".join(f"{SYMBOLS[kind]} {NAMES[kind]}" for kind in (FULL, PARTIAL, EMPTY))
    blocks = "one block" if small.shape == kinds.shape else "several blocks"
    return "\n".join([*lines, f"{legend}; a character is {blocks}"])


def pixels(kinds: Kinds, longest: int) -> NDArray[np.uint8]:
    """Colour a block map, uint8 ``[height, width, 3]``, its longer side at most ``longest``."""
    small = reduce_kinds(kinds, longest, longest)
    zoom = max(1, longest // max(small.shape))
    return coloured(small).repeat(zoom, axis=0).repeat(zoom, axis=1)


def coloured(kinds: Kinds) -> NDArray[np.uint8]:
    """Return the colour of each block, uint8 ``[R, C, 3]``."""
    palette = np.array([COLOURS[kind] for kind in sorted(COLOURS)], dtype=np.uint8)
    return palette[kinds]


def png_bytes(kinds: Kinds, longest: int) -> bytes:
    """Return a bare PNG of a block map, without title or axes, for pages that have their own."""
    from matplotlib.image import imsave

    out = io.BytesIO()
    imsave(out, pixels(kinds, longest), format="png")
    return out.getvalue()


def save_picture(path: str | Path, entry: MaskEntry, kinds: Kinds) -> None:
    """Write a PNG with title, axes in tokens and a legend; at most ``MAX_PIXELS`` a side.

    Args:
        path: File to write.
        entry: What the title and the axes are of.
        kinds: The entry's blocks, from ``entry_kinds``.

    Raises:
        OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    dpi = 160
    R, C = kinds.shape
    inches = MAX_PIXELS / dpi
    # Room for title, legend and axis labels beside the map itself.
    height = min(max(inches * 0.25, inches * 0.8 * R / C), inches - 2.2) + 2.2
    figure = Figure(figsize=(inches, height), dpi=dpi, layout="constrained")
    axes = figure.add_subplot()
    spec = entry.spec
    axes.imshow(
        coloured(reduce_kinds(kinds, MAX_PIXELS, MAX_PIXELS)),
        extent=(0, spec.KV_LEN, spec.Q_LEN, 0),
        interpolation="nearest",
        aspect="equal" if R / C > 0.1 and C / R > 0.1 else "auto",
    )
    axes.set_xlabel("KV, tokens")
    axes.set_ylabel("Q, tokens")
    axes.set_title(f"{entry.name} ({entry.kind}), BLOCK_SIZE {spec.BLOCK_SIZE}")
    patches = [
        Patch(
            facecolor=[part / 255 for part in COLOURS[kind]],
            edgecolor="grey",
            label=f"{NAMES[kind]}: {int((kinds == kind).sum())}",
        )
        for kind in (FULL, PARTIAL, EMPTY)
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, title="blocks")
    with naming(path):
        figure.savefig(path, format="png")
