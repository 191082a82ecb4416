import signal
import threading
import time
from types import SimpleNamespace

import pytest
from torch import distributed

from runtime import monitor as monitor_module
from runtime.errors import WorkerError
from runtime.monitor import Monitor
from runtime.processes import Processes
from runtime.worker import Coordinator

LAST = 10_000


class Peer:
    """A process of one rank whose steps take ``step_s``."""

    def __init__(self, rank, store, *, ahead=0, step_s=0.002, last=LAST):
        self.processes = Processes(rank, 2, rank, 2, store)
        self.coordinator = Coordinator(last)
        self.monitor = Monitor(self.processes, self.coordinator)
        self.finished = 0
        self.ahead = ahead
        self.step_s = step_s
        self.thread = threading.Thread(target=self.step, daemon=True)

    def step(self):
        while self.coordinator.may_begin(self.finished):
            self.finished += 1
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


def test_a_process_that_does_not_answer_a_stop_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(monitor_module, "AGREE_S", 0.3)
    first, _ = pair()
    first.start()
    first.monitor.stop(signal.SIGTERM)
    first.end()
    with pytest.raises(WorkerError, match="not every process has said how far it is"):
        raise first.coordinator.error


def looks(peers, count=2):
    """Wait until each process has looked for the other's sign ``count`` times more."""
    for peer in peers:
        for _ in range(count):
            signs = peers[0].processes
            before = signs.peek(f"beat/{peer.processes.rank}")
            until = time.monotonic() + 60
            while signs.peek(f"beat/{peer.processes.rank}") == before:
                assert time.monotonic() < until
                time.sleep(0.01)


def test_a_process_that_gives_no_sign_of_life_ends_the_others(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(monitor_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    peers = first, second = pair()
    first.start()
    second.start()
    for _ in range(3):
        looks(peers)
        clock.now += 59.0
    looks(peers)
    assert first.coordinator.error is second.coordinator.error is None
    second.monitor.end()
    looks([first])
    clock.now += 59.0
    looks([first])
    assert first.coordinator.error is None
    clock.now += 2.0
    first.end()
    with pytest.raises(WorkerError, match=r"process 1 has given no sign of life for 60 s"):
        raise first.coordinator.error


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
