"""What a reader takes out of a prompt file."""

from dataclasses import dataclass
from typing import Any

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A JSON value, a whole plain text, or something left out: one of the three."""

    line: int | None = None
    """Line of the file that it begins in, from 1; None for a whole file."""
    value: Any = None
    text: str | None = None
    reason: str | None = None
    """Why it is left out."""
    detail: str = ""
    """What more is known of the reason."""
