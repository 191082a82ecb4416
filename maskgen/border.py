"""Where every command ends: whatever it raises becomes one line and an exit code.

Exit codes: 0 done, 1 failed, 2 usage or spec, 3 verification found a difference; 130 after Ctrl-C,
141 where whoever read the output is gone. Nothing here imports torch.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click

from flex_mask_compiler import hidden

DEBUG = "maskgen.border.debug"


@dataclass(frozen=True)
class Asked:
    """What a command was asked with, which the commands that an error advises repeat."""

    run_file: str | None
    settings: Sequence[str]


def advise_with(run_file: str | None, settings: Sequence[str]) -> None:
    """Let what an error advises repeat this run file and these settings."""
    click.get_current_context().find_root().obj = Asked(run_file, settings)


@contextlib.contextmanager
def after_result(show: Callable[[], None]) -> Iterator[None]:
    """Show a result, then run the block, which writes it: neither is lost where the other fails.

    Args:
        show: Prints the result; an error of the block says that it stands there.
    """
    shown = False
    try:
        show()
        shown = True
    finally:
        try:
            yield
        except Exception as error:
            if shown:
                error.add_note("the result stands above")
            raise


class Command(click.Command):
    """A command that ends in one line whatever it raises; ``--debug`` shows the traceback, too."""

    passes: tuple[type[BaseException], ...] = ()
    """What is let through, for whoever is around the command."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        debug = click.Option(
            ["--debug"],
            is_flag=True,
            expose_value=False,
            help="Show the traceback of an error.",
            callback=lambda ctx, _, value: ctx.meta.__setitem__(DEBUG, value),
        )
        self.params.append(debug)

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        """Read the arguments; what a usage error repeats of them shows no token of an address."""
        try:
            return super().make_context(*args, **options)
        except click.ClickException as error:
            if hidden("cache") is None:
                from cache.address import without_secrets_in

                error.message = without_secrets_in(error.message)  # type: ignore[misc]
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error becomes a message and an exit code."""
        if (sentence := hidden("cache")) is not None:
            raise click.ClickException(sentence)
        _open_streams()
        # Loaded now: once files or memory have run out it would be too late.
        from maskgen.faults import exit_code, show

        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except self.passes:
            raise
        # SystemExit, too: a command of ours exits through click, so this is of someone else's code.
        except BaseException as error:
            asked = ctx.find_root().obj or Asked(None, ())
            show(error, asked.run_file, asked.settings, debug=ctx.meta.get(DEBUG, False))
            _drop_unwritten(sys.stdout)
            raise click.exceptions.Exit(exit_code(error)) from error
        finally:
            _drop_unwritten(sys.stderr)


def _open_streams() -> None:
    """Let what nobody wants to read go nowhere, rather than into the next file that is opened."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115


def _drop_unwritten(stream: TextIO) -> None:
    """Let what could not be shown not be tried again, and told at length, as the program ends."""
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
