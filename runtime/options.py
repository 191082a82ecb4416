"""Options and error handling that the commands share."""

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import click

from runtime.errors import TrainingError
from runtime.leaving import exiting_on_signals

DEFAULT_CONFIG = "configs/demo.toml"
ADVICE = re.compile(r"run: python -m runtime\.\w+")
"""A command that an error tells to run; what raises it does not know the run file."""


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
def reporting(config_path: str | None = None) -> Iterator[None]:
    """Show the errors of all three packages as one line, and exit with their code.

    Ctrl-C and SIGTERM end the command as ``exiting_on_signals`` says.

    Args:
        config_path: The command's run file, if any; advice to run another command names it.
    """
    # Threads that spin at the end of a parallel loop starve each other as soon as anything else
    # runs: a step took 7 s instead of 0.9 s beside one busy process on two cores. OpenMP reads
    # this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from cache.errors import CacheError
    from maskgen.errors import MaskgenError

    with exiting_on_signals():
        try:
            yield
        except (CacheError, MaskgenError, TrainingError) as error:
            message = str(error)
            if config_path is not None:
                run_file = f" --config {shlex.quote(config_path)}"
                message = ADVICE.sub(lambda advice: advice[0] + run_file, message)
            raise Failure(message, error.exit_code) from error
