"""What was checked of an entry and against what: the certificate kept beside a version.

The structure is checked whole. The mask itself is compared with its formula in every cell up to
``MAX_DENSE_CELLS``, above that in tiles drawn by the entry's digest, so that anyone draws the
same. Of a parametric entry so is the mask of a batch drawn by its spec's digest.

Legend: B batch or layouts, H heads, R and C block rows and columns, T tiles.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maskgen.canonical import visible_cells
from maskgen.classify import FULL, PARTIAL
from maskgen.compile import compile_mask
from maskgen.entry import MAX_NUMBERS, MaskEntry
from maskgen.errors import LayoutInvariantError
from maskgen.intervals import RowIntervals
from maskgen.named_family import get_family
from maskgen.reference import reference_heads, reference_mask_mod, reference_tiles
from maskgen.tables import BlockTables

MAX_DENSE_CELLS = 1 << 22
"""Largest mask, batch and heads included, that is compared in every cell."""
SAMPLED_ROWS = 24
"""Block rows drawn from a larger mask; of each one tile of every kind in it is compared."""
DRAWN_SAMPLES = 4
"""Samples of the batch that is drawn for a parametric entry."""
NAMED_ROWS = 4
"""Rows without keys that a certificate names."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The outcome of all checks of one entry."""

    name: str
    spec: str
    """Digest of the spec whose formula they were checked against."""
    sha256: str
    """Digest of the arrays that were checked."""
    findings: tuple[str, ...]
    """What is wrong, one sentence each; empty when all holds."""
    compared: str
    """What the mask was compared with, and how much of it."""
    compared_cells: int
    """Cells compared with the formula."""
    rows_without_key: int | None
    """Rows that see no key; None for parametric entries."""
    first_rows_without_key: tuple[tuple[int, int, int], ...]
    """The first few of them as (b, h, q)."""
    causal: bool | None
    """Whether no row q sees a key above q; None for parametric entries."""
    torch: str
    """The torch that evaluated the formula."""
    compare_ms: float
    """Time of the comparison with the formula."""


def certify(entry: MaskEntry) -> Certificate:
    """Check one entry.

    Raises:
        MaskSpecError: Its formula cannot be evaluated here.
    """
    start = time.perf_counter()
    if entry.kind == "parametric":
        drawn = _drawn(entry)
        bounds = _bounds_findings(entry, drawn)
        differences, formula, cells = compare_with_formula(drawn)
        differences += [*span_findings(drawn.spans), *table_findings(drawn.tables)]
        findings = [*bounds, *(f"drawn batch: {finding}" for finding in differences)]
        compared = f"must within the mask within may, of a drawn batch; {formula}"
        rows: list[tuple[int, int, int]] = []
        count = causal = None
    else:
        # The tables were checked as they were read.
        findings = span_findings(entry.spans)
        start = time.perf_counter()
        differences, compared, cells = compare_with_formula(entry)
        findings += differences
        rows, count = rows_without_key(entry.spans)
        causal = is_causal(entry.spans)
    return Certificate(
        name=entry.name,
        spec=entry.spec.digest,
        sha256=entry.sha256,
        findings=tuple(findings),
        compared=compared,
        compared_cells=cells,
        rows_without_key=count,
        first_rows_without_key=tuple(rows),
        causal=causal,
        torch=torch.__version__,
        compare_ms=(time.perf_counter() - start) * 1e3,
    )


def span_findings(spans: RowIntervals) -> list[str]:
    """Say which rows are not in canonical order: sorted, parted by a gap, empty ones last as 0."""
    starts, ends = spans.starts, spans.ends
    held = ends > starts
    follows = held[:, :, 1:]
    broken = {
        "an empty span stands before a non-empty one": follows & ~held[:, :, :-1],
        "an empty span is not (0, 0)": ~held & ((starts != 0) | (ends != 0)),
        "spans touch, overlap or descend": follows & (starts[:, :, 1:] <= ends[:, :, :-1]),
        "a span leaves the columns": held & ((starts < 0) | (ends > spans.KV_LEN)),
    }
    return [
        f"spans: {rule}, first in row {_first(where.any(dim=2))}"
        for rule, where in broken.items()
        if where.any()
    ]


def table_findings(tables: BlockTables) -> list[str]:
    """Say what breaks an invariant of the tables: order, disjoint kinds, backward the transpose."""
    sizes = {name: getattr(tables, name) for name in ("B", "H", "Q_LEN", "KV_LEN", "BLOCK_SIZE")}
    try:
        BlockTables.unpack(tables.pack(), **sizes)
    except LayoutInvariantError as error:
        return [str(error)]
    return []


def compare_with_formula(entry: MaskEntry) -> tuple[list[str], str, int]:
    """Compare spans and block kinds with the formula.

    Returns:
        The differences, what was compared, and the number of cells compared.

    Raises:
        MaskSpecError: The formula cannot be evaluated here.
    """
    spans, tables = entry.spans, entry.tables
    kinds_BHRC = tables.block_kinds()
    heads = reference_heads(entry.spec, entry)
    cells = heads[0] * heads[1] * spans.Q_LEN * spans.KV_LEN
    if cells <= MAX_DENSE_CELLS:
        tiles = _all_tiles(heads, kinds_BHRC)
        compared = "every cell"
    else:
        tiles = _sampled_tiles(heads, kinds_BHRC, entry.sha256)
        compared = f"{len(tiles)} tiles drawn by the digest"
    differences, cells = _compare_tiles(entry, kinds_BHRC, tiles)
    source = "the function" if entry.spec.is_function else "the formula"
    return differences, f"{compared}, with {source} of {entry.spec.family}", cells


def rows_without_key(spans: RowIntervals) -> tuple[list[tuple[int, int, int]], int]:
    """Return the first rows that see no key, as (b, h, q), and how many there are."""
    blind = (spans.ends <= spans.starts).all(dim=2)
    first = blind.nonzero()[:NAMED_ROWS].tolist()
    return [(b, h, q) for b, h, q in first], int(blind.sum())


def is_causal(spans: RowIntervals) -> bool:
    """Return whether no row q sees a key above q."""
    last = torch.where(spans.ends > spans.starts, spans.ends, 0).amax(dim=2)
    return bool((last <= torch.arange(1, spans.Q_LEN + 1, device="cpu")).all())


def _drawn(entry: MaskEntry) -> MaskEntry:
    """Return a parametric entry with the mask of a batch that its spec's digest draws."""
    spec = entry.spec
    family, static = get_family(spec.family), spec.family_params
    # Fewer where one of them is large already.
    rows, columns = entry.bucket.num_blocks
    largest = max(rows * columns, spec.KV_LEN, spec.Q_LEN * entry.bucket.K)
    samples = max(1, min(DRAWN_SAMPLES, MAX_NUMBERS // largest))
    params = family.draw(spec.digest, samples, spec.Q_LEN, spec.KV_LEN, **static)
    given: dict[str, Any] = {**static, **params}
    spans = family.intervals(spec.Q_LEN, spec.KV_LEN, **given)
    tables = compile_mask(spans, spec.BLOCK_SIZE)
    # Without arrays of its own, all that its tiles can be drawn by is its spec.
    return replace(entry, sha256=spec.digest, params=params, _spans=spans, _tables=tables)


def _bounds_findings(entry: MaskEntry, drawn: MaskEntry) -> list[str]:
    spec = entry.spec
    must, may = get_family(spec.family).bounds(spec.Q_LEN, spec.KV_LEN, **spec.family_params)
    beyond = {
        "must is not within may": must & ~may,
        "must is not within the mask of a drawn batch": must & ~drawn.spans,
        "the mask of a drawn batch is not within may": drawn.spans & ~may,
    }
    counts = {rule: cells.row_counts() for rule, cells in beyond.items()}
    return [
        f"bounds: {rule}, first in row {_first(rows > 0)}"
        for rule, rows in counts.items()
        if rows.any()
    ]


def _all_tiles(heads: tuple[int, int], kinds_BHRC: Tensor) -> Tensor:
    """Return (b, h, r, c) of every tile, int64 ``[T, 4]``."""
    sizes = (*heads, *kinds_BHRC.shape[2:])
    return torch.cartesian_prod(*(torch.arange(size, device="cpu") for size in sizes))


def _sampled_tiles(heads: tuple[int, int], kinds_BHRC: Tensor, digest: str) -> Tensor:
    """Draw block rows by the digest, and one tile of each kind in them; the last tile too."""
    R, C = kinds_BHRC.shape[2:]
    # Raw words only: NumPy keeps their stream for ever, unlike its Generator methods.
    words = np.random.Philox(key=int(digest[:32], 16)).random_raw((SAMPLED_ROWS, 6)).tolist()
    tiles = {(heads[0] - 1, heads[1] - 1, R - 1, C - 1)}
    for row_words in words:
        b, h, r = (word % size for word, size in zip(row_words, (*heads, R), strict=False))
        row = kinds_BHRC[min(b, kinds_BHRC.shape[0] - 1), min(h, kinds_BHRC.shape[1] - 1), r]
        for kind, word in zip((0, PARTIAL, FULL), row_words[3:], strict=True):
            columns = (row == kind).nonzero().flatten()
            if len(columns):
                tiles.add((b, h, r, int(columns[word % len(columns)])))
    return torch.tensor(sorted(tiles), dtype=torch.int64, device="cpu")


def _compare_tiles(entry: MaskEntry, kinds_BHRC: Tensor, tiles: Tensor) -> tuple[list[str], int]:
    spans, (Q_BLOCK, KV_BLOCK) = entry.spans, entry.spec.BLOCK_SIZE
    b, h, r, c = tiles.unbind(1)
    q_idx, kv_idx = (
        r[:, None] * Q_BLOCK + torch.arange(Q_BLOCK, device="cpu"),
        c[:, None] * KV_BLOCK + torch.arange(KV_BLOCK, device="cpu"),
    )
    inside = (q_idx < spans.Q_LEN)[:, :, None] & (kv_idx < spans.KV_LEN)[:, None, :]
    # Ragged tiles read a neighbour instead of past the end; those cells are outside either way.
    rows, columns = q_idx.clamp(max=spans.Q_LEN - 1), kv_idx.clamp(max=spans.KV_LEN - 1)
    formula = reference_tiles(reference_mask_mod(entry), tiles[:, :2], rows, columns) & inside
    own_b, own_h = b.clamp(max=spans.B - 1), h.clamp(max=spans.H - 1)
    row_starts, row_ends = (
        side[own_b[:, None], own_h[:, None], :, rows].transpose(1, 2)
        for side in (spans.starts, spans.ends)
    )
    held = visible_cells(row_starts, row_ends, columns[:, None, :])
    findings: list[str] = []
    wrong = (held & inside) != formula
    if wrong.any():
        t, i, j = wrong.nonzero()[0].tolist()
        cell = (int(b[t]), int(h[t]), int(q_idx[t, i]), int(kv_idx[t, j]))
        findings.append(
            f"spans: {int(wrong.sum())} of the cells compared differ from the formula, "
            f"first (b, h, q, kv) = {cell}"
        )
    visible = formula.sum(dim=(1, 2))
    kinds = (visible > 0).to(torch.uint8) + (visible == Q_BLOCK * KV_BLOCK).to(torch.uint8)
    found = kinds_BHRC[own_b, own_h, r, c]
    if not torch.equal(found, kinds):
        t = int((found != kinds).nonzero()[0])
        names = ("empty", "partial", "full")
        findings.append(
            f"tables: block (b, h, row, column) = {tuple(tiles[t].tolist())} is listed as "
            f"{names[found[t]]} and is {names[kinds[t]]}"
        )
    return findings, int(inside.sum())


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(where.nonzero()[0].tolist())
