"""Options and error handling that the commands share."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from maskgen.neighbours import hidden_cache
from maskgen.options import set_option
from maskgen.runfile import setting, with_run_file
from runtime.errors import TrainingError
from runtime.leaving import exiting_on_signals

DEFAULT_CONFIG = "configs/demo.toml"
devices_option = click.option(
    "--devices",
    "--device",
    "devices",
    metavar="NAMES",
    help="Such as cpu, or cuda:0,cuda:1; overrides run.devices.",
)


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--config`` and ``--set``, passed on as ``config_path`` and ``settings``."""
    command = set_option(command)
    return click.option(
        "--config",
        "config_path",
        default=DEFAULT_CONFIG,
        show_default=True,
        help="Run file (TOML).",
    )(command)


def with_options(settings: Sequence[str], options: Mapping[str, str | None]) -> list[str]:
    """The settings of a command, and those of its options that are given.

    Args:
        settings: ``--set``.
        options: Key of the run file -> value of the option that overrides it.
    """
    return [
        *settings,
        *(setting(key, value) for key, value in options.items() if value is not None),
    ]


class Failure(click.ClickException):
    """One error line and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]


@contextlib.contextmanager
def reporting(config_path: str | None = None, settings: Sequence[str] = ()) -> Iterator[None]:
    """Show the errors of all three packages as one line, and exit with their code.

    Ctrl-C and SIGTERM end the command as ``exiting_on_signals`` says.

    Args:
        config_path: The command's run file, if any; advice to run another command names it.
        settings: Its settings, which such advice repeats.
    """
    # Threads that spin at the end of a parallel loop starve each other as soon as anything else
    # runs: a step took 7 s instead of 0.9 s beside one busy process on two cores. OpenMP reads
    # this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if (hidden := hidden_cache()) is not None:
        raise Failure(hidden, 1)
    from cache.address import without_secrets_in
    from cache.errors import CacheError
    from maskgen.errors import MaskgenError

    with exiting_on_signals():
        try:
            yield
        except (CacheError, MaskgenError, TrainingError) as error:
            message = with_run_file(str(error), config_path, settings)
            raise Failure(without_secrets_in(message), error.exit_code) from error
