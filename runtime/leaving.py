"""Ctrl-C and SIGTERM outside of the steps: everything unwinds, and the exit code is a shell's."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import click


class Stopped(BaseException):
    """A signal ended the program; no ``Exception``, so that nothing mistakes it for a fault."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Unwind at Ctrl-C and SIGTERM and exit with 130 or 143, as a shell reports such an end.

    While steps run the trainer handles both by itself. Does nothing outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        raise Stopped(number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Stopped as stopped:
        _leave(stopped.number)
    except KeyboardInterrupt:
        _leave(signal.SIGINT)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _leave(number: int) -> None:
    click.echo(f"stopped by {signal.Signals(number).name}", err=True)
    sys.exit(128 + number)
