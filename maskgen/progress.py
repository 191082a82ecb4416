"""Progress of a verb: a bar on a terminal, plain lines elsewhere. Both go to stderr.

Where it cannot be shown, work goes on.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import click

LINE_INTERVAL_S = 5.0
"""Shortest time between two plain lines; the last one is always written."""

Progress = Callable[[str, int, int], None]
"""Called after each item with its name, the number done and the number in all."""


@contextmanager
def show_progress(what: str) -> Iterator[Progress]:
    """Yield a function that shows how far ``what`` has come.

    Args:
        what: The work, as the line or the bar names it: ``build``.
    """
    if sys.stderr.isatty():
        with _bar(what) as progress:
            yield progress
    else:
        yield _lines(what)


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    from tqdm import tqdm

    with tqdm(desc=what, unit="mask", leave=False) as bar:

        def progress(name: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_postfix_str(name, refresh=False)
            with suppress(OSError):
                bar.update(done - bar.n)

        yield progress


def _lines(what: str) -> Progress:
    written = time.monotonic()

    def progress(name: str, done: int, total: int) -> None:
        nonlocal written
        now = time.monotonic()
        if done == total or now - written >= LINE_INTERVAL_S:
            written = now
            with suppress(OSError):
                click.echo(f"{what}: {done}/{total} {name}", err=True)

    return progress
