"""Ctrl-C, SIGTERM and SIGUSR1, while steps run and outside of them.

While steps run the first two let the current step finish and SIGUSR1 saves; at all other times they
unwind everything and SIGUSR1 is only noted.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import click

Handler = Callable[[int, FrameType | None], Any]


class Stopped(BaseException):
    """A signal ended the program; no ``Exception``, so that nothing mistakes it for a fault."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def handling(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Handle signals in a block; does nothing outside the main thread, where they do not come."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    if signal.SIGUSR1 in handlers:
        # The run goes on after it, so what a thread waits for in a library is not broken off.
        signal.siginterrupt(signal.SIGUSR1, False)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stop_on_signals(
    stop: Callable[[signal.Signals], None],
    save: Callable[[], None],
    *,
    interruptible: bool = True,
) -> Iterator[None]:
    """Call ``stop`` and ``save`` when signals come; does nothing outside the main thread.

    Args:
        stop: Takes the signal, at each SIGINT and SIGTERM.
        save: Called at each SIGUSR1, which schedulers send before a time limit.
        interruptible: Whether a second Ctrl-C raises KeyboardInterrupt. Not where a launcher
            passes on the Ctrl-C that the terminal already sent.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        stop(signal.Signals(number))
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    with handling(
        {signal.SIGINT: handle, signal.SIGTERM: handle, signal.SIGUSR1: lambda *_: save()}
    ):
        yield


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
