import contextlib
import signal
import threading
import time

import pytest
import torch

from runtime.data.plan import Step
from runtime.static.graph import GraphPool
from runtime.training.worker import Coordinator, Worker


def step(number, rows=(1, 2), **options):
    return Step(number, 0, 16, rows, **options)


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


def test_of_two_signals_the_first_is_the_cause():
    coordinator = Coordinator(100)
    coordinator.stop(signal.SIGTERM)
    coordinator.stop(signal.SIGINT)
    assert coordinator.signal is signal.SIGTERM


def test_a_run_begins_where_it_was_told_to():
    coordinator = Coordinator(10, 7)
    assert coordinator.close() == 6
    assert Coordinator(10).close() == -1
    coordinator.open_until()
    assert [coordinator.may_begin(step) for step in (7, 8, 9, 10)] == [True, True, True, False]
    # A rank that has begun less does not take the furthest back.
    assert coordinator.may_begin(7)
    assert coordinator.close() == 9


def test_a_stop_before_the_first_step_ends_a_resumed_run_where_it_is():
    coordinator = Coordinator(10, 7)
    coordinator.stop(signal.SIGINT)
    assert not coordinator.may_begin(7)


def test_a_limit_is_lowered_and_never_raised():
    coordinator = Coordinator(5)
    coordinator.open_until(3)
    coordinator.open_until(4)
    coordinator.open_until()
    assert [coordinator.may_begin(step) for step in range(5)] == [True, True, True, False, False]


def in_thread(function):
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


@pytest.mark.timeout(60)
@pytest.mark.parametrize("opened", ["on", "to an end", "by a failure"])
def test_at_a_closed_gate_only_a_step_that_none_has_begun_waits(opened):
    coordinator, found = Coordinator(10), []
    for step in range(3):
        assert coordinator.may_begin(step)
    assert coordinator.close() == 2
    assert coordinator.may_begin(2)
    waiting = in_thread(lambda: found.append(coordinator.may_begin(3)))
    waiting.join(0.1)
    assert waiting.is_alive()
    if opened == "on":
        coordinator.open_until(4)
    elif opened == "to an end":
        coordinator.open_until(3)
    else:
        coordinator.fail(ValueError("gone"), finished=2)
    waiting.join(5)
    assert found == [opened == "on"]


def test_saves_are_asked_for_by_the_step_that_they_follow():
    coordinator = Coordinator(10)
    coordinator.save_after(4)
    coordinator.save()
    assert [step for step in range(10) if coordinator.saves(step)] == [1, 5]


def test_a_failure_at_the_last_step_ends_ranks_behind_it_there():
    coordinator = Coordinator(100)
    for step in range(8):
        assert coordinator.may_begin(step)
    error = KeyboardInterrupt()
    coordinator.fail(error, finished=7)
    assert [coordinator.may_begin(step) for step in (5, 6, 7)] == [True, True, False]
    assert coordinator.error is error
    assert coordinator.failed.is_set()


class Steps:
    """A source of numbered steps, and the device that takes them; what each did, in order."""

    device, threads, pool = torch.device("cpu"), 1, GraphPool(torch.device("cpu"))

    def __init__(self, coordinator, broken=None):
        self.coordinator = coordinator
        self.broken = broken
        self.log = []
        self.number = 0

    def get(self):
        self.number += 1
        return step(self.number), f"slot {self.number}"

    def stop(self):
        raise AssertionError("a worker stops no source")

    def run(self, step, slot):
        assert torch.is_grad_enabled()
        if step == self.broken:
            raise SystemExit("broken")
        time.sleep(0.01)
        self.log.append((step, slot))

    def worker(self, first_step=0, **options):
        return Worker(
            rank=3,
            stepper=self,
            source=self,
            coordinator=self.coordinator,
            first_step=first_step,
            **options,
        )


def ended(worker):
    worker.start()
    worker.join(10)
    assert not worker.is_alive()
    return worker


def test_a_worker_takes_each_step_with_its_slot_and_reports_it():
    steps = Steps(Coordinator(7, 4))
    worker = ended(
        steps.worker(
            4,
            after_step=lambda *said: steps.log.append(("after", *said)),
            at_end=lambda finished: steps.log.append(("end", finished)),
        )
    )
    assert steps.log == [
        (step(1), "slot 1"),
        ("after", 5, step(1)),
        (step(2), "slot 2"),
        ("after", 6, step(2)),
        (step(3), "slot 3"),
        ("after", 7, step(3)),
        ("end", 7),
    ]
    assert (worker.finished, worker.error) == (7, None)
    assert worker.name == "worker-3 (cpu)"
    assert len(worker.host_s) == 3
    assert all(0.01 <= seconds < 5 for seconds in worker.host_s)


def test_a_step_is_over_with_the_last_of_its_micro_batches():
    steps, said = Steps(Coordinator(2)), []
    parts = [part for number in (1, 2) for part in step(number, (5, 6, 7, -1)).parts(2)]
    steps.get = lambda: (parts.pop(0), "slot")
    worker = ended(steps.worker(after_step=lambda *given: said.append(given)))
    assert [part.rows for part, _ in steps.log] == [(5, 6), (7, -1), (5, 6), (7, -1)]
    assert said == [(1, step(1, (5, 6, 7, -1))), (2, step(2, (5, 6, 7, -1)))]
    assert len(worker.host_s) == 2
    assert all(0.02 <= seconds < 5 for seconds in worker.host_s)


def test_a_worker_reports_to_nobody_unless_asked():
    steps = Steps(Coordinator(2))
    assert ended(steps.worker()).finished == 2


def test_a_worker_without_a_step_left_ends_its_run_all_the_same():
    steps, said = Steps(Coordinator(5, 5)), []
    assert ended(steps.worker(5, at_end=said.append)).finished == 5
    assert (said, steps.log) == ([5], [])


def test_what_ends_a_worker_ends_the_run_after_the_steps_that_it_finished():
    coordinator, said = Coordinator(9), []
    steps = Steps(coordinator, broken=step(3))
    worker = ended(steps.worker(after_step=lambda *_: None, at_end=said.append))
    assert type(worker.error) is SystemExit
    assert coordinator.error is worker.error
    assert (worker.finished, len(worker.host_s), said) == (2, 2, [])
    assert [coordinator.may_begin(step) for step in (1, 2)] == [True, False]


def test_a_worker_of_a_run_that_failed_elsewhere_does_not_end_it():
    coordinator, said = Coordinator(9), []
    steps = Steps(coordinator)

    def after_step(finished, step):
        coordinator.fail(OSError("elsewhere"), finished=3)

    worker = ended(steps.worker(after_step=after_step, at_end=said.append))
    assert (worker.finished, worker.error, said) == (3, None, [])


def test_a_worker_works_on_its_device_in_its_pool_and_waits_for_it(monkeypatch):
    steps = Steps(Coordinator(1))
    log, pool = steps.log, GraphPool(torch.device("cpu"))

    @contextlib.contextmanager
    def activated():
        log.append("pool")
        yield
        log.append("left")

    monkeypatch.setattr(pool, "activated", activated)
    monkeypatch.setattr(pool, "synchronize", lambda: log.append("waited"))
    monkeypatch.setattr(steps, "pool", pool)
    monkeypatch.setattr(steps, "threads", 3)
    monkeypatch.setattr(
        "runtime.training.worker.enter_thread",
        lambda *given: log.append((threading.current_thread().name, *given)),
    )
    ended(steps.worker(at_end=lambda finished: log.append(finished)))
    assert log == [
        ("worker-3 (cpu)", steps.device, 3),
        *("pool", (step(1), "slot 1"), 1, "left", "waited"),
    ]
