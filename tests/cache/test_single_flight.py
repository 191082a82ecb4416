import gc
import sys
import threading
import time
import traceback

import pytest

from cache.single_flight import Flight


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


@pytest.mark.timeout(60)
def test_who_asks_for_another_thing_waits_for_nobody():
    flight = Flight()
    begun, ended = threading.Event(), threading.Event()

    def make():
        begun.set()
        assert ended.wait(30)
        return Thing()

    held = []
    thread = threading.Thread(target=lambda: held.append(flight.get("slow", make)))
    thread.start()
    assert begun.wait(30)
    other = flight.get("quick", Thing)
    assert flight.get("quick", Thing) is other
    assert held == []
    ended.set()
    thread.join()
    assert flight.get("slow", Thing) is held[0] is not other


@pytest.mark.timeout(60)
def test_who_waited_for_a_maker_that_failed_makes_it_itself():
    flight, outcomes = Flight(), []
    begun, asked = threading.Event(), threading.Event()

    def fail():
        begun.set()
        assert asked.wait(30)
        raise ValueError("not yet")

    def first():
        try:
            flight.get("key", fail)
        except ValueError as error:
            outcomes.append(error)

    thread = threading.Thread(target=first)
    second = threading.Thread(target=lambda: outcomes.append(flight.get("key", Thing)))
    thread.start()
    assert begun.wait(30)
    second.start()
    while not within(second, Flight.get):
        time.sleep(0.001)
    asked.set()
    thread.join()
    second.join()
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Thing", "ValueError"]
