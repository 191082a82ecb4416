import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from torch import distributed

from runtime.errors import WorkerError
from runtime.ranks.awake import wait_until
from runtime.ranks.processes import Processes
from runtime.training.monitor import Monitor
from runtime.training.worker import Coordinator

LAST = 10_000


class Peer:
    """A process of one rank whose steps take ``step_s``."""

    def __init__(self, rank, store, *, ahead=0, step_s=0.002, last=LAST):
        self.processes = Processes(rank, 2, rank, 2, store)
        self.coordinator = Coordinator(last)
        self.monitor = Monitor(self.processes, self.coordinator)
        self.finished = 0
        self.saved = []
        self.ahead = ahead
        self.step_s = step_s
        self.thread = threading.Thread(target=self.step, daemon=True)

    def step(self):
        while self.coordinator.may_begin(self.finished):
            self.finished += 1
            if self.coordinator.saves(self.finished):
                self.saved.append(self.finished)
            time.sleep(0.0 if self.finished < self.ahead else self.step_s)

    def start(self):
        self.thread.start()
        self.monitor.start()

    def end(self):
        self.thread.join(10)
        self.monitor.end()
        assert not self.thread.is_alive()
        assert not self.monitor.is_alive()


def pair(**second):
    store = distributed.HashStore()
    return Peer(0, store), Peer(1, store, **second)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_ends_all_processes_after_the_step_of_the_furthest(asked):
    peers = pair(ahead=300, step_s=0.01)
    for peer in peers:
        peer.start()
    time.sleep(0.1)
    peers[asked].monitor.stop(signal.SIGTERM)
    for peer in peers:
        peer.end()
    first, second = peers
    assert 300 <= first.finished == second.finished < LAST
    assert first.coordinator.signal is second.coordinator.signal is signal.SIGTERM
    assert first.coordinator.error is second.coordinator.error is None


@pytest.mark.parametrize("asked", [0, 1])
def test_a_run_that_finishes_early_does_so_at_one_step_and_without_a_signal(asked):
    peers = pair(ahead=300, step_s=0.01)
    for peer in peers:
        peer.start()
    time.sleep(0.1)
    for _ in range(3):
        peers[asked].monitor.finish()
    for peer in peers:
        peer.end()
    first, second = peers
    assert 300 <= first.finished == second.finished < LAST
    assert first.coordinator.signal is second.coordinator.signal is None
    assert first.coordinator.error is second.coordinator.error is None


def test_a_process_that_is_through_tells_one_that_stops_later():
    slow, quick = pair(last=50)
    slow.coordinator = slow.monitor.coordinator = Coordinator(50)
    slow.step_s = 0.02
    slow.start()
    quick.start()
    quick.end()
    slow.monitor.stop(signal.SIGINT)
    slow.end()
    assert slow.finished == quick.finished == 50
    assert slow.coordinator.error is None


def test_a_failure_elsewhere_ends_a_process():
    first, second = pair()
    first.start()
    second.processes.fail(OSError("disk is gone"))
    first.end()
    assert isinstance(first.coordinator.error, WorkerError)
    assert str(first.coordinator.error) == "process 1 failed: disk is gone"


def test_a_process_that_is_dead_ends_one_that_waits_for_its_answer_to_a_stop():
    first, _ = pair()
    pulse = SimpleNamespace(lost=None)
    first.monitor.processes = replace(first.processes, pulse=pulse)
    first.start()
    first.monitor.stop(signal.SIGTERM)
    assert wait_until(lambda: first.coordinator.signal is not None, 10)
    assert first.coordinator.error is None
    pulse.lost = WorkerError("process 1 (pid 7) was killed")
    first.end()
    assert first.coordinator.error is pulse.lost


@pytest.mark.parametrize("ahead", [0, 40])
def test_all_processes_save_the_same_step_and_go_on(ahead):
    peers = pair(ahead=ahead)
    for peer in peers:
        peer.coordinator = peer.monitor.coordinator = Coordinator(120)
        peer.step_s = 0.02
        peer.start()
    for asked in (1, 2):
        peers[asked - 1].monitor.save()
        assert wait_until(lambda: len(peers[0].saved) == asked, 30)  # noqa: B023
    for peer in peers:
        peer.end()
        assert peer.finished == 120
        assert peer.coordinator.signal is peer.coordinator.error is None
    assert peers[0].saved == peers[1].saved
    assert all(ahead < step <= 120 for step in peers[0].saved)


def test_a_save_and_a_stop_asked_at_once_are_both_done():
    first, second = pair(step_s=0.02)
    first.step_s = 0.02
    first.monitor.save()
    first.monitor.stop(signal.SIGTERM)
    second.monitor.save()
    for peer in (first, second):
        peer.start()
    for peer in (first, second):
        peer.end()
    assert first.finished == second.finished < LAST
    assert first.saved == second.saved != []
    assert first.coordinator.signal is second.coordinator.signal is signal.SIGTERM


def test_a_save_asked_of_one_process_while_the_other_is_through_ends_nothing():
    slow, quick = pair()
    for peer in (slow, quick):
        peer.coordinator = peer.monitor.coordinator = Coordinator(10)
    slow.step_s = 0.2
    slow.start()
    quick.start()
    quick.end()
    for _ in range(3):
        slow.monitor.save()
    slow.end()
    assert slow.finished == 10
    assert slow.coordinator.error is slow.coordinator.signal is None


def test_a_store_that_is_gone_ends_a_process(monkeypatch):
    first, _ = pair()

    class Gone:
        def check(self, keys):
            raise distributed.DistNetworkError("connection reset")

    first.monitor.processes = Processes(0, 2, 0, 2, Gone())
    first.start()
    first.thread.join(10)
    with pytest.raises(WorkerError, match=r"lost touch with the other processes: connection res"):
        raise first.coordinator.error


def begun(peer, number):
    """The furthest step that each process had begun when a round was asked for."""
    return [int(step) for step in peer.processes.published(f"begun/{number}")]


def test_a_stop_lets_no_process_begin_more_than_the_furthest_had_begun():
    peers = pair(ahead=40, step_s=0.01)
    for peer in peers:
        peer.start()
    time.sleep(0.1)
    peers[0].monitor.stop(signal.SIGTERM)
    for peer in peers:
        peer.end()
    furthest = max(begun(peers[0], 0))
    # Steps are counted from 0.
    assert [peer.finished for peer in peers] == [furthest + 1] * 2


def test_saves_are_of_the_first_step_that_none_has_begun_and_each_round_is_its_own():
    peers = pair(step_s=0.01)
    for peer in peers:
        peer.coordinator = peer.monitor.coordinator = Coordinator(150)
        peer.step_s = 0.01
        peer.start()
    for asked in (1, 2):
        peers[1].monitor.save()
        assert wait_until(lambda: len(peers[0].saved) == asked, 30)  # noqa: B023
    for peer in peers:
        peer.end()
    wanted = [max(begun(peers[0], number)) + 2 for number in (0, 1)]
    assert peers[0].saved == peers[1].saved == wanted
    assert peers[0].processes.published("begun/2") == [None, None]


def test_of_signals_to_several_processes_all_name_the_same():
    first, second = pair(step_s=0.01)
    first.monitor.stop(signal.SIGTERM)
    second.monitor.stop(signal.SIGINT)
    for peer in (first, second):
        peer.start()
    for peer in (first, second):
        peer.end()
    assert first.finished == second.finished < LAST
    assert first.coordinator.signal is second.coordinator.signal
    assert first.coordinator.signal in (signal.SIGTERM, signal.SIGINT)


def test_a_process_that_is_through_says_how_far_it_came_unless_it_failed():
    first, second = pair()
    first.coordinator = first.monitor.coordinator = Coordinator(7)
    first.start()
    first.end()
    assert second.processes.published("ended-at") == ["6", None]
    second.start()
    second.coordinator.fail(OSError("disk is gone"))
    second.end()
    assert first.processes.published("ended-at") == ["6", None]


def test_a_process_ends_without_a_word_where_nobody_listens_any_more():
    first, _ = pair()

    class Deaf:
        def check(self, keys):
            return False

        def set(self, key, value):
            raise distributed.DistNetworkError("connection reset")

    first.coordinator = first.monitor.coordinator = Coordinator(3)
    first.monitor.processes = Processes(0, 2, 0, 2, Deaf())
    first.start()
    first.end()
    assert first.finished == 3
    assert first.coordinator.error is None
