"""Host-side builds of masks are announced here, so that a frozen run can refuse or count them.

A host build is Python work whose result depends on its arguments: ``compile_mask``,
``from_mask_mod`` and ``to_block_mask``. ``tables_into`` and ``block_mask_over`` write or wrap
static buffers and are none. Watching is process-wide: a build in any thread is seen.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_callbacks: tuple[Callable[[str], None], ...] = ()


def announce(what: str) -> None:
    """Call everybody who watches: ``what`` is about to build a mask.

    Args:
        what: Name of the public function that was called.

    Raises:
        Exception: Whatever a callback raises; then nothing is built.
    """
    for callback in _callbacks:
        callback(what)


@contextmanager
def watched(callback: Callable[[str], None]) -> Iterator[None]:
    """While the context is open, each host build calls ``callback(what)`` first.

    The callback runs in the thread that builds. It refuses the build by raising (for example
    ``HostBuildForbiddenError``), or returns to let it through, for example after counting it.
    Contexts may be nested and may overlap between threads.

    Args:
        callback: Called with the name of the public function; may be called by any thread.
    """
    global _callbacks
    with _lock:
        _callbacks = (*_callbacks, callback)
    try:
        yield
    finally:
        with _lock:
            # One entry only: the same callback may watch twice.
            remaining = list(_callbacks)
            remaining.remove(callback)
            _callbacks = tuple(remaining)
