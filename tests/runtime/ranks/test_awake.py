"""Time in which this process was stopped is not counted."""

import pytest

from runtime.ranks import awake
from runtime.ranks.awake import AwakeTime, wait_until


class Clock:
    """Time that a test moves; a sleep takes what is asked for, and more where the list says so."""

    def __init__(self, extra=()):
        self.now = 100.0
        self.extra = list(extra)
        self.sleeps = 0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.sleeps += 1
        self.now += seconds + (self.extra.pop(0) if self.extra else 0.0)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(awake, "time", made)
    return made


def test_a_long_gap_between_two_looks_counts_as_the_longest_of_a_process_that_runs(clock):
    waited = AwakeTime(2.0)
    for gap, seconds in ((0.5, 0.5), (1.5, 2.0), (3600.0, 4.0), (1.0, 5.0)):
        clock.now += gap
        assert waited.look() == seconds
    waited.restart()
    assert waited.look() == 0.0


@pytest.mark.parametrize("stops", [[], [66.0], [5.0, 0.0, 1e6]])
def test_a_wait_ends_after_its_limit_of_awake_time(clock, stops):
    clock.extra = list(stops)
    assert not wait_until(lambda: False, 10.0, look_s=0.1)
    # A stop of any length counts as ten looks.
    long = sum(stop > 0 for stop in stops)
    assert clock.sleeps == pytest.approx(101 - 9 * long, abs=2)


def test_what_comes_on_waking_is_in_time(clock):
    clock.extra = [1e6]
    assert wait_until(lambda: clock.sleeps >= 3, 10.0)
