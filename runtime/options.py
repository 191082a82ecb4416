"""Options of the commands, and what holds while each of them works."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from maskgen import border
from maskgen.options import set_option
from maskgen.runfile import setting
from runtime.signals import Stopped, exiting_on_signals

DEFAULT_CONFIG = "configs/demo.toml"
devices_option = click.option(
    "--devices",
    "--device",
    "devices",
    metavar="NAMES",
    help="Such as cpu, or cuda:0,cuda:1; overrides run.devices.",
)

print_config_option = click.option(
    "--print-config",
    is_flag=True,
    help="Print every key of the run file with its value, its default and where the value comes "
    "from, and do nothing else.",
)


class Command(border.Command):
    """A command of the runtime; Ctrl-C and SIGTERM end it as ``exiting_on_signals`` says."""

    passes = (Stopped,)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        # Threads that spin at the end of a parallel loop starve each other as soon as anything
        # else runs: a step took 7 s instead of 0.9 s beside one busy process on two cores. OpenMP
        # reads this once, when torch is imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # That other processes are gone is one line; torch adds a stack of its own to it for
        # every call that fails, as a warning.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        with exiting_on_signals():
            return super().invoke(ctx)


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


def overriding(
    config_path: str, settings: Sequence[str], options: Mapping[str, str | None] | None = None
) -> list[str]:
    """The settings of a command, and those of its options that are given; advice repeats them.

    Args:
        config_path: The run file.
        settings: ``--set``.
        options: Key of the run file -> value of the option that overrides it.
    """
    given = [setting(key, value) for key, value in (options or {}).items() if value is not None]
    border.advise_with(config_path, [*settings, *given])
    return [*settings, *given]
