import gc
import threading

import pytest

from cache.flight import Flight


class Thing:
    """A value that can be held weakly."""


def test_eight_threads_share_one_making():
    flight = Flight()
    made = []
    gate = threading.Barrier(8)
    results = []

    def make():
        made.append(1)
        return Thing()

    def ask():
        gate.wait()
        results.append(flight.get("key", make))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
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
