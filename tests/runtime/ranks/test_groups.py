"""Groups of ranks over several processes, each with several devices, and what all do at once."""

import threading

import pytest
import torch

from runtime.errors import ConfigError, WorkerError
from runtime.ranks.collectives import leave_groups, make_groups, on_every_rank
from runtime.ranks.devices import Placement
from tests.runtime.ranks.test_store import in_threads, job

CPU = torch.device("cpu")


@pytest.mark.parametrize(("size", "devices"), [(3, 1), (2, 2), (3, 2)])
def test_ranks_are_counted_over_all_processes_and_their_devices(size, devices):
    placement = Placement((CPU,) * devices, torch.float32, 1)
    made = in_threads(lambda p: make_groups(placement, p), job(size))
    groups = [group for each in made for group in each]
    assert [(g.rank, g.index, g.size) for g in groups] == [
        (rank, rank % devices, size * devices) for rank in range(size * devices)
    ]

    def work(group):
        total = torch.tensor([2.0**group.rank])
        group.all_reduce(total)
        first = torch.tensor([10.0 + group.rank])
        group.broadcast(first)
        tensors = [torch.tensor([float(group.rank)]), torch.full((2, 2), 10.0 * group.rank)]
        group.start_all_reduces(tensors).wait()
        (one,) = [torch.tensor([1.0])]
        group.start_all_reduces([one]).wait()
        return total.item(), first.item(), tensors[0].item(), tensors[1].tolist(), one.item()

    count = size * devices
    ranks = sum(range(count))
    expected = (2.0**count - 1, 10.0, ranks, [[10.0 * ranks] * 2] * 2, count)
    assert on_every_rank(work, groups) == [expected] * count
    assert leave_groups(groups, 10.0)
    assert all(group.is_left for group in groups)


@pytest.mark.parametrize(("others", "at"), [(("1 cpu", "2 cpu"), 2), (("1 cuda", "1 cpu"), 1)])
def test_processes_with_other_devices_are_refused_by_rank(others, at):
    processes = job(3)
    for process, value in zip(processes[1:], others, strict=True):
        process.publish("devices", value)
    with pytest.raises(ConfigError) as caught:
        make_groups(Placement((CPU,), torch.float32, 1), processes[0])
    assert str(caught.value) == (
        "run.devices = 'cpu': must be as many, and of one kind, in every process; by rank they "
        f"have {['1 cpu', *others]}"
    )
    assert others[at - 1] != "1 cpu"


def test_one_rank_alone_does_nothing():
    (group,) = make_groups(Placement((CPU,), torch.float32, 1))
    tensor = torch.tensor([3.0])
    group.all_reduce(tensor)
    group.broadcast(tensor)
    group.check_joined()
    assert tensor.item() == 3.0
    assert (group.rank, group.size, group.index) == (0, 1, 0)
    assert group.is_left
    assert leave_groups([group], 0.0)
    group.check_joined()


def test_results_come_by_rank_whichever_is_done_first():
    begun = [threading.Event() for _ in range(3)]

    def work(rank):
        # The first waits for the second, and that one for the third.
        if rank < 2:
            assert begun[rank + 1].wait(10)
        begun[rank].set()
        return rank * 10

    assert on_every_rank(work, range(3)) == [0, 10, 20]
    assert on_every_rank(work, []) == []


def test_what_ended_another_process_ends_the_wait():
    held = threading.Event()
    with pytest.raises(WorkerError, match=r"^process 3 failed: disk$"):
        on_every_rank(
            lambda _: held.wait(30), range(2), lambda: WorkerError("process 3 failed: disk")
        )
    held.set()


def test_an_interrupt_within_a_rank_is_raised():
    def work(rank):
        if rank == 1:
            raise KeyboardInterrupt
        return rank

    with pytest.raises(KeyboardInterrupt):
        on_every_rank(work, range(3))
