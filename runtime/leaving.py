"""Signals outside of the steps: Ctrl-C and SIGTERM unwind everything, SIGUSR1 is only noted."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import click

from runtime.signals import handling


class Stopped(BaseException):
    """A signal ended the program; no ``Exception``, so that nothing mistakes it for a fault."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Unwind at Ctrl-C and SIGTERM and exit with 130 or 143, as a shell reports such an end.

    While steps run the trainer handles all signals by itself. Outside the main thread nothing
    changes.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        raise Stopped(number)

    try:
        with handling({signal.SIGINT: stop, signal.SIGTERM: stop, signal.SIGUSR1: _note}):
            yield
    except Stopped as stopped:
        _leave(stopped.number)
    except KeyboardInterrupt:
        _leave(signal.SIGINT)


def _note(number: int, frame: FrameType | None) -> None:
    del number, frame
    # Not through a stream, in whose midst the signal may have come.
    os.write(2, b"SIGUSR1: no steps run now, so there is nothing to save; going on\n")


def _leave(number: int) -> None:
    click.echo(f"stopped by {signal.Signals(number).name}", err=True)
    sys.exit(128 + number)
