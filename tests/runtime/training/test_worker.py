import signal

import pytest

from runtime.training.worker import Coordinator


def test_without_a_stop_every_rank_takes_every_step():
    coordinator = Coordinator(3)
    for _rank in range(2):
        assert [coordinator.may_begin(step) for step in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_after_a_stop_ranks_behind_catch_up_with_the_furthest(ahead):
    coordinator = Coordinator(100)
    for step in range(5 + ahead):
        assert coordinator.may_begin(step)
    for step in range(5):
        assert coordinator.may_begin(step)
    coordinator.stop(signal.SIGTERM)
    fast, slow = 5 + ahead, 5
    while coordinator.may_begin(fast):
        fast += 1
    while coordinator.may_begin(slow):
        slow += 1
    assert fast == slow == 5 + ahead
    assert coordinator.signal is signal.SIGTERM


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_ranks_save_after_the_same_step_whenever_it_is_asked_for_and_go_on(ahead):
    coordinator = Coordinator(20)
    saved = {"fast": [], "slow": []}

    def step(rank, number):
        assert coordinator.may_begin(number)
        if coordinator.saves(number + 1):
            saved[rank].append(number + 1)

    for number in range(20):
        step("fast", number)
        if number in (5, 6, 12):
            coordinator.save()
        if number >= ahead:
            step("slow", number - ahead)
    for number in range(20 - ahead, 20):
        step("slow", number)
    # The step that is under way may be over for a rank, so it is the next one.
    assert saved["fast"] == saved["slow"] == [7, 8, 14]
    assert not coordinator.may_begin(20)
    assert coordinator.signal is None


def test_a_failure_ends_all_at_once_and_keeps_the_first_error():
    coordinator = Coordinator(100)
    assert coordinator.may_begin(0)
    first, second = ValueError("first"), ValueError("second")
    coordinator.fail(first)
    coordinator.fail(second)
    assert not coordinator.may_begin(1)
    assert coordinator.error is first


@pytest.mark.parametrize("later", [50, 4, 3])
def test_nothing_lets_a_run_that_failed_go_past_the_step_of_the_failure(later):
    coordinator = Coordinator(100)
    for step in range(6):
        assert coordinator.may_begin(step)
    coordinator.fail(ValueError("bit flipped"), finished=3)
    coordinator.open_until(later)
    coordinator.stop(signal.SIGTERM)
    coordinator.fail(ValueError("another"), finished=9)
    assert [coordinator.may_begin(step) for step in (2, 3, 4)] == [True, False, False]
    assert str(coordinator.error) == "bit flipped"


def test_a_failure_does_not_undo_an_earlier_stop():
    coordinator = Coordinator(100)
    assert coordinator.may_begin(0)
    coordinator.stop(signal.SIGINT)
    coordinator.fail(ValueError("late"), finished=7)
    assert not coordinator.may_begin(1)
