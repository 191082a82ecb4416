import gc
import sys
import threading
import time
import traceback

import pytest

from cache.flight import Flight


class Thing:
    """A value that can be held weakly."""


def within(thread, function):
    """Whether a thread is inside a function."""
    frame = sys._current_frames().get(thread.ident)
    return any(found.f_code is function.__code__ for found, _ in traceback.walk_stack(frame))


def test_eight_threads_share_one_making():
    flight = Flight()
    made = []
    results = []
    begun, all_asked = threading.Event(), threading.Event()

    def make():
        made.append(1)
        begun.set()
        assert all_asked.wait(30)
        return Thing()

    threads = [
        threading.Thread(target=lambda: results.append(flight.get("key", make))) for _ in range(8)
    ]
    threads[0].start()
    assert begun.wait(30)
    for thread in threads[1:]:
        thread.start()
    # The others ask while the first one makes, or this would show nothing.
    while not all(within(thread, Flight.get) for thread in threads):
        time.sleep(0.001)
    all_asked.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(set(map(id, results))) == 1


def test_an_error_is_raised_and_the_next_one_tries_again():
    flight = Flight()

    def fail():
        raise ValueError("not yet")

    with pytest.raises(ValueError, match="not yet"):
        flight.get("key", fail)
    thing = Thing()
    assert flight.get("key", lambda: thing) is thing


def test_what_nobody_holds_is_made_again():
    flight = Flight()
    first = flight.get("key", Thing)
    assert flight.get("key", Thing) is first
    del first
    gc.collect()
    made = []
    flight.get("key", lambda: made.append(1) or Thing())
    assert made == [1]
