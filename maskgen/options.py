"""Options that several verbs share, and what they mean."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from cache import Store

Command = Callable[..., Any]

_CACHE_HELP = "Mask cache: a .zarr folder, a packed .zip or a URL."
_CACHE_DEFAULT = "[masks].cache of the config, else build/masks.zarr"


def cache_option(command: Command) -> Command:
    """Add ``--cache`` to a verb that is given a run file as an argument."""
    return click.option(
        "--cache", "location", metavar="DIR", help=_CACHE_HELP, show_default=_CACHE_DEFAULT
    )(command)


def store_options(command: Command) -> Command:
    """Add ``--cache`` and ``--config`` to a verb that works on a cache alone."""
    config = click.option(
        "--config", type=click.Path(), help="Run file whose [masks].cache is used."
    )
    return cache_option(config(command))


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
version_option = click.option(
    "--version",
    metavar="ID",
    help="Version id, or its first digits.",
    show_default="the current one",
)


def cache_location(location: str | None, config: str | None) -> str:
    """Return where the cache is: as asked, as the run file says, or the default."""
    if location is not None:
        return location
    from maskgen.runfile import DEFAULT_CACHE, read_cache_location

    return DEFAULT_CACHE if config is None else read_cache_location(config)


def open_cache(location: str | None, config: str | None, *, writable: bool = False) -> "Store":
    """Open the cache that ``--cache`` and ``--config`` name.

    Raises:
        StoreNotFoundError: There is none and ``writable`` is not asked for.
    """
    import cache

    return cache.open_store(cache_location(location, config), writable=writable)
