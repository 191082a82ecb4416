"""Rows -> what a verb prints: aligned columns for people, JSON for machines."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click


def text_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align columns under their titles: numbers to the right, the rest to the left.

    Args:
        titles: One a column.
        rows: Cells as text, as many as titles in each row.
    """
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    numeric = [all(_is_number(row[i]) for row in cells) for i in range(len(titles))]
    lines = []
    for row in [list(titles), *cells]:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def human_bytes(count: int) -> str:
    """Write a size with a binary unit: ``512 B``, ``8.4 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def optional(value: object, pattern: str = "{}") -> str:
    """Write a value by ``pattern``, or ``-`` where there is none."""
    return "-" if value is None else pattern.format(value)


def echo_json(value: Any) -> None:
    """Print JSON on stdout, keys sorted."""
    click.echo(json.dumps(value, indent=2, sort_keys=True))


def _is_number(cell: str) -> bool:
    return cell == "-" or cell[:1].isdigit()
