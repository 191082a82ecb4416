"""Options and error handling that the commands share."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import click

from runtime.errors import TrainingError

DEFAULT_CONFIG = "configs/demo.toml"


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--config`` and ``--set``, passed on as ``config_path`` and ``settings``."""
    command = click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="Override one key of the run file; may be given several times.",
    )(command)
    return click.option(
        "--config",
        "config_path",
        default=DEFAULT_CONFIG,
        show_default=True,
        help="Run file (TOML).",
    )(command)


class Failure(click.ClickException):
    """One error line and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Show the errors of all three packages as one line, and exit with their code."""
    # Threads that spin at the end of a parallel loop starve each other as soon as anything else
    # runs: a step took 7 s instead of 0.9 s beside one busy process on two cores. OpenMP reads
    # this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from cache.errors import CacheError
    from maskgen.errors import MaskgenError

    try:
        yield
    except (CacheError, MaskgenError, TrainingError) as error:
        raise Failure(str(error), error.exit_code) from error
