"""A version -> one HTML page: each mask's picture, its blocks, its waste and its FLOPs.

The page stands alone: pictures are inside it and nothing is fetched.
"""

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cache import Store
from cache.causes import naming
from maskgen.entry import MaskEntry, parse_entry
from maskgen.listing import human_bytes, optional
from maskgen.picture import COLOURS, NAMES, entry_kinds, png_bytes
from maskgen.progress import OnItem
from maskgen.summary import EntrySummary, entry_summary

PICTURE_PIXELS = 256
_TITLES = (
    *("name", "kind", "Q_LEN", "KV_LEN", "BLOCK_SIZE", "full", "partial", "empty", "sparsity"),
    *("partial share", "masked in tiles", "GFLOP", "bytes"),
)
_CONTEXT_NAME = re.compile(r"(?P<prefix>.+)/ctx\d+")

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; color: #222;
  padding: 0 1em; overflow-wrap: break-word }
.wide { overflow-x: auto; margin: 1em 0 2em }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .25em .6em; text-align: right; border-bottom: 1px solid #ddd }
th { vertical-align: bottom }
td { white-space: nowrap }
th:first-child, td:first-child { text-align: left }
figure { display: inline-block; margin: 0 1.2em 1.4em 0; vertical-align: top }
figcaption { max-width: 256px; font-size: 13px; overflow-wrap: anywhere }
img { image-rendering: pixelated; border: 1px solid #bbb; max-width: 256px }
.legend span { margin-right: 1.2em; white-space: nowrap }
.legend i { display: inline-block; width: .9em; height: .9em; margin-right: .4em;
  border: 1px solid #bbb; vertical-align: -.1em }
"""


@dataclass(frozen=True, kw_only=True)
class TileCost:
    """What attention computes for a mask, averaged over its batch rows or layouts and heads."""

    visible_cells: float
    """Cells that the mask allows."""
    visited_cells: float
    """Cells of the tiles that attention visits, full and partial ones."""

    @property
    def waste(self) -> float:
        """Visited cells that are masked, over visited cells, 0 to 1."""
        return 1 - self.visible_cells / self.visited_cells if self.visited_cells else 0.0

    def forward_flops(self, heads: int, head_dim: int) -> float:
        """Return the FLOPs of one layer's forward: two matmuls, two operations a product."""
        return 4.0 * heads * head_dim * self.visited_cells


def tile_cost(entry: MaskEntry) -> TileCost | None:
    """Return what a mask costs, or None for a parametric entry: there it depends on the batch."""
    if entry.kind == "parametric":
        return None
    tables, (Q_BLOCK, KV_BLOCK) = entry.tables, entry.spec.BLOCK_SIZE
    counts, copies = tables.counts(), tables.B * tables.H
    visible = int(entry.spans.row_counts().sum(dtype=torch.int64))
    visited = (counts.full + counts.partial) * Q_BLOCK * KV_BLOCK
    return TileCost(visible_cells=visible / copies, visited_cells=visited / copies)


def bucket_padding(contexts: Sequence[int]) -> list[tuple[int, int, float]]:
    """Return for each bucket (length, shortest sample in it, share of padding).

    The share is over samples of evenly spread lengths, from just above the next smaller bucket;
    ``maskgen plan`` prints it for the lengths of a data set.

    Args:
        contexts: Bucket lengths, in tokens.
    """
    ordered = sorted(contexts)
    shortest = [1, *(context + 1 for context in ordered[:-1])]
    return [
        (context, least, (context - least) / 2 / context)
        for context, least in zip(ordered, shortest, strict=True)
    ]


def html_report(
    store: Store,
    version: str | None = None,
    *,
    heads: int,
    head_dim: int,
    progress: OnItem | None = None,
) -> str:
    """Write the report of a version.

    Args:
        store: An open cache.
        version: Version id or a prefix of one; the current version if left out.
        heads: Query heads of a layer, for the FLOPs.
        head_dim: Size of a head, for the FLOPs.
        progress: Called after each entry.

    Raises:
        CacheError: The version or an entry cannot be read.
    """
    chosen = store.version(version)
    rows, figures = [], []
    groups: dict[str, list[int]] = {}
    for done, info in enumerate(chosen.entries.values(), start=1):
        entry = parse_entry(store.load(info.name, chosen.id))
        rows.append(_cells(entry, entry_summary(info), heads, head_dim))
        figures.append(_figure(entry))
        named = _CONTEXT_NAME.fullmatch(info.name)
        # The names of a cache may come from anyone.
        if named and entry.bucket.context > 0:
            groups.setdefault(named["prefix"], []).append(entry.bucket.context)
        if progress is not None:
            progress(info.name, done, len(chosen.entries))
    title = f"Masks of version {chosen.id[:16]}"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1><p>{html.escape(store.location)}, {len(rows)} entries. Blocks are "
        "summed over layouts, batch rows and heads. <em>Partial share</em> is over visited blocks; "
        "<em>masked in tiles</em> is the share of visited cells that the mask hides; GFLOP is one "
        f"layer's forward with {heads} heads of {head_dim}, for one mask of the batch.</p>",
        _table(_TITLES, rows),
        *_padding_parts(groups),
        f'<h2>Pictures</h2><p class="legend">{_legend()}</p>',
        "<p>A picture shows layout 0, head 0; of a parametric entry full is what every batch sees "
        "and partial what depends on the batch.</p>",
        *figures,
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def save_report(path: str | Path, page: str) -> None:
    """Write a page to a file.

    Raises:
        OSError: The file cannot be written.
    """
    with naming(path):
        # The page names its cache, and a path on Linux need be no UTF-8.
        Path(path).write_text(page, encoding="utf-8", errors="replace")


def _cells(entry: MaskEntry, row: EntrySummary, heads: int, head_dim: int) -> list[str]:
    cost = tile_cost(entry)
    visited = (row.full or 0) + (row.partial or 0)
    return [
        row.name,
        row.kind,
        str(row.Q_LEN),
        str(row.KV_LEN),
        "x".join(map(str, row.BLOCK_SIZE)),
        optional(row.full),
        optional(row.partial),
        optional(row.empty),
        optional(row.sparsity, "{:.1f}%"),
        optional((row.partial or 0) / visited if visited else None, "{:.1%}"),
        optional(None if cost is None else cost.waste, "{:.1%}"),
        optional(None if cost is None else cost.forward_flops(heads, head_dim) / 1e9, "{:.2f}"),
        human_bytes(row.bytes),
    ]


def _padding_parts(groups: dict[str, list[int]]) -> list[str]:
    if not groups:
        return []
    rows = [
        [prefix, str(context), f"{least} to {context}", f"{share:.1%}"]
        for prefix, contexts in sorted(groups.items())
        for context, least, share in bucket_padding(contexts)
    ]
    return [
        "<h2>Padding of the buckets</h2><p>For samples of evenly spread lengths; "
        "<code>maskgen plan</code> tells it for a data set.</p>",
        _table(["bucket", "context", "samples, tokens", "mean padding"], rows),
    ]


def _figure(entry: MaskEntry) -> str:
    picture = base64.b64encode(png_bytes(entry_kinds(entry), PICTURE_PIXELS)).decode()
    name = html.escape(entry.name)
    return (
        f'<figure><img alt="blocks of {name}" src="data:image/png;base64,{picture}">'
        f"<figcaption>{name}</figcaption></figure>"
    )


def _legend() -> str:
    return "".join(
        f'<span><i style="background: rgb{COLOURS[kind]}"></i>{NAMES[kind]}</span>'
        for kind in sorted(COLOURS, reverse=True)
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(title)}</th>" for title in titles)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    rows_of = f"<thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody>"
    # Names may be of any length: then the table scrolls, and not the page.
    return f'<div class="wide"><table>{rows_of}</table></div>'
