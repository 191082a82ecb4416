"""A disk on which no file may grow past a limit; the system says ``File too large`` there."""

import contextlib
import resource


@contextlib.contextmanager
def full_disk(room=0):
    """Let no file grow past ``room`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
