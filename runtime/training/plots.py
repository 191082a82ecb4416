"""What of a metrics row people see: a name in the log, a curve in the picture."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One number of a row.

    Of several plots with one ``axis`` the picture has one panel.
    """

    key: str
    """Of the row."""
    axis: str
    """What the panel's y axis says."""
    short: str = ""
    """Its name in the lines of the log; empty where these leave it out."""
    label: str = ""
    """Its name in the picture's legend."""
    colour: str = "tab:blue"
    style: str = "-"
    always: bool = True
    """Whether the picture has the panel even where no row has the key."""
    ends: tuple[str, str] | None = None
    """Keys of the lower and the upper end of its interval, where it has one."""
