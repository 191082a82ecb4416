"""Ctrl-C and SIGTERM while steps run: a stop that lets the current step finish."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def stop_on_signals(
    stop: Callable[[signal.Signals], None], *, interruptible: bool = True
) -> Iterator[None]:
    """Call ``stop`` when a signal comes; does nothing outside the main thread.

    Args:
        stop: Takes the signal, at each one.
        interruptible: Whether a second Ctrl-C raises KeyboardInterrupt. Not where a launcher
            passes on the Ctrl-C that the terminal already sent.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        del frame
        stop(signal.Signals(signum))
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
