"""Options that several verbs share, and what they mean."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from maskgen.border import advise_with

if TYPE_CHECKING:
    from cache import Store

Command = Callable[..., Any]

DIFFERENCE_FOUND = 3
"""Exit code of a verb that found what is not as it was published."""

set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override one key of the run file; may be given several times.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
version_option = click.option(
    "--version",
    metavar="ID",
    help="Version id, or its first digits.",
    show_default="the one that holds the masks of --config, else the current one",
)


@dataclass(frozen=True)
class Place:
    """The cache that a verb works on, as ``--cache``, ``--config`` and ``--set`` name it."""

    location: str | None
    run_file: str | None
    settings: tuple[str, ...]

    @property
    def document(self) -> Mapping[str, Any]:
        """The run file with its settings.

        Raises:
            MaskSpecError: It cannot be read, or a setting is malformed.
            UsageError: No run file is named.
        """
        from maskgen.runfile import read_document

        if self.run_file is None:
            raise click.UsageError("name a run file with --config")
        return read_document(self.run_file, self.settings)

    @property
    def cache(self) -> str:
        """Where the cache is: as asked, as the run file says, or the default."""
        if self.location is not None:
            return self.location
        from maskgen.runfile import DEFAULT_CACHE, read_cache_location

        return DEFAULT_CACHE if self.run_file is None else read_cache_location(self.document)

    def open(self, *, writable: bool = False) -> "Store":
        """Open the cache.

        Raises:
            StoreNotFoundError: There is none and ``writable`` is not asked for.
        """
        import cache

        return cache.open_store(self.cache, writable=writable)

    def version(self, store: "Store", asked: str | None) -> str | None:
        """Choose a version: as asked, or the one with the run file's masks; None is the current.

        Raises:
            VersionNotFoundError: No version holds them all.
        """
        if asked is not None or self.run_file is None:
            return asked
        from cache.advice import how_to_build
        from cache.errors import VersionNotFoundError
        from maskgen.holdings import find_version
        from maskgen.spec import read_specs

        found = find_version(store, [spec.digest for spec in read_specs(self.document)])
        if found is None:
            what = f"no version in {store.location} holds all masks of {self.run_file}"
            raise VersionNotFoundError("current", f"{what}; {how_to_build(store.location)}")
        return found[0].id

    def naming(self, run_file: str | None) -> "Place":
        """Take the run file from an argument, too.

        Raises:
            UsageError: Two are named.
        """
        if run_file is None:
            return self
        if self.run_file is not None:
            raise click.UsageError(f"name one run file, not {self.run_file} and {run_file}")
        advise_with(run_file, self.settings)
        return replace(self, run_file=run_file)


def store_options(command: Command) -> Command:
    """Add ``--cache``, ``--config`` and ``--set`` to a verb, passed on as ``place``."""

    @click.option(
        "--cache",
        "location",
        metavar="DIR",
        help="Mask cache: a .zarr folder, a packed .zip or a URL.",
        show_default="[masks].cache of the run file, else build/masks.zarr",
    )
    @click.option("--config", "run_file", type=click.Path(), help="Run file (TOML).")
    @set_option
    @functools.wraps(command)
    def with_place(
        *given: Any,
        location: str | None,
        run_file: str | None,
        settings: tuple[str, ...],
        **more: Any,
    ) -> Any:
        advise_with(run_file, settings)
        return command(*given, place=Place(location, run_file, settings), **more)

    return with_place
