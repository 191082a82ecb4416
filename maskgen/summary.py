"""What the tables of ``build``, ``list`` and ``report`` say of an entry. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cache import EntryInfo
from maskgen.checks import checked_int
from maskgen.listing import human_bytes, optional, text_table
from maskgen.mask_spec import MaskSpec


@dataclass(frozen=True, kw_only=True)
class EntrySummary:
    """What the table of a build or a listing says of one entry."""

    name: str
    kind: str
    Q_LEN: int
    KV_LEN: int
    BLOCK_SIZE: tuple[int, int]
    full: int | None
    """Full blocks, summed over batch (or layouts) and heads; None for parametric entries."""
    partial: int | None
    """Partial blocks, likewise."""
    empty: int | None
    """Empty blocks, likewise."""
    sparsity: float | None
    """Share of empty blocks, in percent, 0 to 100."""
    bytes: int
    """Logical bytes of the arrays, before compression."""
    build_ms: float
    """Time to make or copy the entry; 0 in a listing."""
    reused: bool
    """Whether it was copied from a version that was there before."""


def entry_summary(info: EntryInfo) -> EntrySummary:
    """Return the summary of a published entry.

    Raises:
        MaskSpecError: Its spec or its counts are not what maskgen writes.
    """
    return mask_summary(MaskSpec.from_json(info.name, info.spec), info.attrs, info.nbytes)


def mask_summary(
    spec: MaskSpec,
    attrs: Mapping[str, Any],
    nbytes: int,
    *,
    build_ms: float = 0.0,
    reused: bool = False,
) -> EntrySummary:
    """Return the summary of a mask.

    Args:
        spec: What it is built from.
        attrs: What its build counted.
        nbytes: Logical bytes of its arrays.
        build_ms: Time to make or copy it.
        reused: Whether it was copied.

    Raises:
        MaskSpecError: The counts are not what maskgen writes.
    """
    full = partial = empty = sparsity = None
    if spec.kind != "parametric":
        full, partial, empty = (
            checked_int(f"attribute {key} of {spec.name!r}", attrs.get(key), minimum=0)
            for key in ("full", "partial", "empty")
        )
        # Blocks, as the ragged last ones count whole: so it stays within 0 to 100.
        sparsity = 100.0 * empty / max(1, full + partial + empty)
    return EntrySummary(
        name=spec.name,
        kind=spec.kind,
        Q_LEN=spec.Q_LEN,
        KV_LEN=spec.KV_LEN,
        BLOCK_SIZE=spec.BLOCK_SIZE,
        full=full,
        partial=partial,
        empty=empty,
        sparsity=sparsity,
        bytes=nbytes,
        build_ms=build_ms,
        reused=reused,
    )


@dataclass(frozen=True, kw_only=True)
class BuildReport:
    """The outcome of a build."""

    version: str
    """Id of the published version."""
    rows: tuple[EntrySummary, ...]
    """One row an entry, in the order of the specs."""


def summary_table(rows: Sequence[EntrySummary], *, built: bool) -> str:
    """Return the table that a verb prints.

    Args:
        rows: One an entry.
        built: Whether they were built or copied now, and the time is a column.
    """
    titles = ["name", "kind", "Q_LEN", "KV_LEN", "BLOCK_SIZE"]
    titles += ["full", "partial", "empty", "sparsity", "bytes"]
    cells = [
        [
            row.name,
            row.kind,
            str(row.Q_LEN),
            str(row.KV_LEN),
            "x".join(map(str, row.BLOCK_SIZE)),
            optional(row.full),
            optional(row.partial),
            optional(row.empty),
            optional(row.sparsity, "{:.1f}%"),
            human_bytes(row.bytes),
        ]
        for row in rows
    ]
    if built:
        titles.append("build ms")
        for row, line in zip(rows, cells, strict=True):
            line.append("copied" if row.reused else f"{row.build_ms:.1f}")
    table = text_table(titles, cells)
    counted = [row for row in rows if row.sparsity is not None]
    if counted and not any(row.full or row.empty for row in counted):
        table += "\nsparsity 0.0%: at lengths of so few blocks each one is needed in part; longer "
        table += "masks have blocks to skip"
    return table
