"""How collectives end: in time, broken, or left, and what stays of threads and of torch."""

import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from runtime.errors import BrokenCollectiveError, WorkerError
from runtime.ranks import collectives
from runtime.ranks.awake import AwakeTime, wait_until
from runtime.ranks.collectives import Group, Pending, leave_groups, make_groups, on_every_rank
from runtime.ranks.devices import Placement
from runtime.ranks.processes import Processes

CPU = torch.device("cpu")
STACK = "Connection closed by peer\nException raised from recv\n#0"


def broken(*_arguments, **_options):
    raise RuntimeError(STACK)


@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.all_reduce(torch.ones(1)),
        lambda group: group.broadcast(torch.ones(1)),
        lambda group: group.start_all_reduces([torch.ones(1)]),
        lambda group: group.start_all_reduces([torch.ones(1)] * 2),
        lambda group: Pending(SimpleNamespace(wait=broken)).wait(),
    ],
)
def test_whatever_breaks_off_says_so_in_one_line(call):
    backend = SimpleNamespace(allreduce=broken, broadcast=broken, allreduce_coalesced=broken)
    with pytest.raises(BrokenCollectiveError) as caught:
        call(Group(backend, 1, 3))
    assert str(caught.value) == (
        "a collective broke off, since another rank is gone: Connection closed by peer"
    )
    assert str(caught.value.__cause__) == STACK


def test_a_wait_that_breaks_is_told_as_a_call_that_does():
    backend = SimpleNamespace(allreduce=lambda *_, **__: SimpleNamespace(wait=broken))
    with pytest.raises(BrokenCollectiveError, match=r"Connection closed by peer$"):
        Group(backend, 0, 2).all_reduce(torch.ones(1))


def test_other_faults_go_through():
    def odd(*_arguments, **_options):
        raise TypeError("odd")

    with pytest.raises(TypeError, match="odd"):
        Group(SimpleNamespace(allreduce=odd), 0, 2).all_reduce(torch.ones(1))


def test_a_group_that_was_left_refuses_every_call():
    groups = make_groups(Placement((CPU,) * 3, torch.float32, 1))
    assert leave_groups(groups, 10.0)
    for group in groups:
        for call in (
            lambda group=group: group.all_reduce(torch.ones(1)),
            lambda group=group: group.broadcast(torch.ones(1)),
            lambda group=group: group.start_all_reduces([torch.ones(1)]),
            group.check_joined,
        ):
            with pytest.raises(WorkerError) as caught:
                call()
            said = f"rank {group.rank} has left the group of 3 workers"
            assert str(caught.value) == said
    assert leave_groups(groups, 0.0), "again is nothing"
    assert not [t for t in threading.enumerate() if t.name.startswith("leave-")]


def test_leaving_is_waited_for_so_long_and_no_longer():
    held = threading.Event()
    slow = Group(SimpleNamespace(abort=lambda: held.wait(30)), 1, 2)
    quick = Group(SimpleNamespace(), 0, 2)
    assert not leave_groups([quick, slow], 0.2)
    assert (quick.is_left, slow.is_left) == (True, False)
    held.set()
    assert leave_groups([quick, slow], 10.0)


def test_leaving_lets_go_of_the_backend():
    """Its destructor closes the connections."""
    gone = []

    class Backend:
        def __del__(self):
            gone.append(1)

    group = Group(Backend(), 0, 2)
    group.leave()
    assert wait_until(lambda: group.is_left, 10.0)
    assert gone == [1]


def test_what_a_rank_cannot_connect_to_is_counted(monkeypatch):
    monkeypatch.setattr(collectives, "_backend", broken)
    with pytest.raises(BrokenCollectiveError) as caught:
        make_groups(Placement((CPU,) * 4, torch.float32, 1))
    assert str(caught.value).endswith("cannot connect to the 3 others: Connection closed by peer")


@pytest.mark.parametrize("own", [None, "1"])
def test_what_nccl_reads_is_set_for_gpus_alone_unless_the_user_did(monkeypatch, own):
    names = ("NCCL_RUNTIME_CONNECT", "NCCL_GRAPH_REGISTER")
    for name in names:
        # So that it is put back as it was.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
        if own is not None:
            monkeypatch.setenv(name, own)
    monkeypatch.setattr(collectives, "_backend", lambda *_: SimpleNamespace())
    make_groups(Placement((CPU,) * 2, torch.float32, 1))
    assert [os.environ.get(name) for name in names] == [own] * 2
    groups = make_groups(
        Placement((torch.device("cuda", 0), torch.device("cuda", 1)), torch.bfloat16, 1)
    )
    assert [os.environ.get(name) for name in names] == [own or "0"] * 2
    assert [group.rank for group in groups] == [0, 1]
    for name in names:
        monkeypatch.delenv(name)


def test_each_rank_has_a_client_of_its_own(monkeypatch):
    """One that waits for a key lets no other thread in."""
    stores = []

    class Store(distributed.PrefixStore):
        def clone(self):
            stores.append(self)
            return self

    monkeypatch.setattr(collectives, "_backend", lambda *_: SimpleNamespace())
    processes = Processes(0, 1, 0, 1, Store("x", distributed.HashStore()))
    make_groups(Placement((CPU,) * 3, torch.float32, 1), processes)
    assert len(stores) == 3


def test_no_thread_is_left_of_what_all_ranks_did():
    before = threading.active_count()
    assert on_every_rank(lambda rank: rank, range(5)) == list(range(5))
    assert wait_until(lambda: threading.active_count() == before, 10.0)
    seen = on_every_rank(lambda rank: threading.current_thread(), range(3))
    assert len({id(thread) for thread in seen}) == 3
    assert all(thread.daemon for thread in seen)


def test_the_limit_of_the_libraries_is_a_week():
    assert timedelta(days=7) == collectives.TIMEOUT


@pytest.mark.parametrize("count", [0, 1, 5])
def test_what_is_there_at_once_is_not_waited_for(monkeypatch, count):
    looks = []

    def done():
        looks.append(1)
        return len(looks) > count

    assert wait_until(done, 10.0, look_s=0.001)
    assert len(looks) == count + 1
    assert not wait_until(lambda: False, 0.0, look_s=0.001)


def test_a_time_counts_from_when_it_was_made():
    waited = AwakeTime(1.0)
    assert 0.0 <= waited.look() < 1.0
