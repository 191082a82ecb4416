"""Starts of one job over one store that torchrun keeps: each finds its own, and reads no other."""

import threading

import pytest
from torch import distributed

from runtime.errors import WorkerError
from runtime.ranks import meeting
from runtime.ranks.meeting import ask, look, meet


class Start:
    """Processes that meet, each in a thread."""

    def __init__(self, store, ranks, size):
        self.shared = {}
        self.errors = {}
        self.threads = {
            rank: threading.Thread(target=self.meet, args=(store, rank, size), daemon=True)
            for rank in ranks
        }
        for thread in self.threads.values():
            thread.start()

    def meet(self, store, rank, size):
        try:
            self.shared[rank] = meet(store, rank, size)
        except WorkerError as error:
            self.errors[rank] = error

    def join(self):
        for thread in self.threads.values():
            thread.join(30)
        assert not self.errors
        return self.shared


def test_each_start_has_a_part_of_its_own():
    store = distributed.HashStore()
    starts = [Start(store, range(3), 3).join() for _ in range(3)]
    for number, shared in enumerate(starts):
        shared[0].set("step", str(number))
    for number, shared in enumerate(starts):
        assert [look(shared[rank], "step") for rank in range(3)] == [str(number)] * 3


def test_one_that_waited_for_a_leader_that_died_meets_the_next():
    store = distributed.HashStore()
    early = Start(store, [1], 2)
    shared = {**Start(store, [0], 2).join(), **early.join()}
    shared[0].set("x", "1")
    assert look(shared[1], "x") == "1"


def test_one_that_asked_and_died_does_not_stand_for_the_one_that_comes_after_it(monkeypatch):
    store = distributed.HashStore()
    monkeypatch.setattr(meeting, "JOIN_S", 0.1)
    died = Start(store, [1], 2)
    died.threads[1].join()
    assert "process 0 did not come" in str(died.errors[1])
    monkeypatch.setattr(meeting, "JOIN_S", 30.0)
    leader = Start(store, [0], 2)
    leader.threads[0].join(0.3)
    assert leader.threads[0].is_alive()
    shared = {**Start(store, [1], 2).join(), **leader.join()}
    shared[1].set("x", "1")
    assert look(shared[0], "x") == "1"


def test_who_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(meeting, "JOIN_S", 0.2)
    store = distributed.HashStore()
    start = Start(store, [0, 2], 4)
    for thread in start.threads.values():
        thread.join()
    with pytest.raises(WorkerError, match=r"process 1, 3 of 4 did not come within 0 s of proc"):
        raise start.errors[0]


def test_a_store_that_is_gone_is_told_in_one_line():
    class Gone:
        def check(self, keys):
            raise distributed.DistNetworkError("connection reset\nException raised from recv\n#0")

    with pytest.raises(WorkerError, match=r"^lost touch with the other processes: connection re"):
        meet(Gone(), 0, 2)


def test_the_second_to_last_who_does_not_come_is_named_alone(monkeypatch):
    monkeypatch.setattr(meeting, "JOIN_S", 1.0)
    store = distributed.HashStore()
    start = Start(store, [0, 1, 3], 4)
    start.threads[0].join()
    assert str(start.errors[0]) == (
        "process 2 of 4 did not come within 1 s of process 0; its own output says why"
    )
    for rank in (1, 3):
        start.threads[rank].join()
        assert rank in start.shared


def test_a_leader_that_does_not_come_is_named_by_each(monkeypatch):
    monkeypatch.setattr(meeting, "JOIN_S", 0.1)
    start = Start(distributed.HashStore(), [2, 5], 6)
    for rank, thread in start.threads.items():
        thread.join()
        assert str(start.errors[rank]) == (
            f"process 0 did not come within 0 s of process {rank}; its own output says why"
        )


def test_a_leader_waits_for_all_the_others(monkeypatch):
    store = distributed.HashStore()
    start = Start(store, [0, 1], 3)
    start.threads[1].join(30)
    start.threads[0].join(0.3)
    assert start.threads[0].is_alive()
    late = Start(store, [2], 3)
    late.join()
    assert start.join().keys() == {0, 1}


def test_one_process_meets_nobody():
    shared = meet(distributed.HashStore(), 0, 1)
    shared.set("x", "1")
    assert look(shared, "x") == "1"


def test_a_key_is_looked_up_without_waiting_for_it():
    store = distributed.HashStore()
    assert look(store, "x") is None
    store.set("x", "")
    assert look(store, "x") == ""


def test_a_call_of_the_store_that_fails_is_lost_touch_and_no_other_fault_is():
    def gone(*_arguments):
        raise RuntimeError("first\nsecond")

    with pytest.raises(WorkerError, match=r"^lost touch with the other processes: first$"):
        ask(gone, "x")
    with pytest.raises(TypeError):
        ask(len, 3)
    assert ask(max, 2, 7) == 7
