"""Signals while steps run: Ctrl-C and SIGTERM let the current step finish, SIGUSR1 saves."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


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
