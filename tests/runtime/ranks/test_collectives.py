import time
from datetime import timedelta

import pytest
import torch
from torch import distributed

from runtime.errors import WorkerError
from runtime.ranks.collectives import leave_groups, make_groups, on_every_rank
from runtime.ranks.devices import Placement

RANKS = 3


@pytest.fixture
def groups():
    made = make_groups(Placement((torch.device("cpu"),) * RANKS, torch.float32, 1))
    yield made
    assert leave_groups(made, 10.0)


def test_sums_maxima_and_what_rank_0_has(groups):
    def work(group):
        total = torch.tensor([1.0, group.rank])
        group.all_reduce(total)
        largest = torch.tensor([group.rank, -group.rank])
        group.all_reduce(largest, distributed.ReduceOp.MAX)
        first = torch.tensor(10 + group.rank)
        group.broadcast(first)
        return total.tolist(), largest.tolist(), first.item()

    assert on_every_rank(work, groups) == [([3.0, 3.0], [2, 0], 10)] * RANKS


def test_a_rank_that_leaves_frees_those_that_wait_for_it(groups):
    def work(group):
        if group.rank == RANKS - 1:
            time.sleep(0.3)
            group.leave()
            return "left"
        try:
            group.all_reduce(torch.ones(1))
        except WorkerError as error:
            # This one's connections are what a rank waits for that is not next to the first.
            group.leave()
            return str(error)
        return "reduced"

    began = time.monotonic()
    *broken, left = on_every_rank(work, groups)
    assert left == "left"
    assert all("a collective broke off" in message for message in broken)
    assert time.monotonic() - began < 10.0
    with pytest.raises(WorkerError, match="rank 0 has left the group of 3 workers"):
        groups[0].check_joined()


def test_the_first_error_of_any_rank_is_raised_while_others_hang():
    def work(rank):
        if rank == 1:
            raise ValueError("rank 1 is broken")
        time.sleep(1.0)

    began = time.monotonic()
    with pytest.raises(ValueError, match="rank 1 is broken"):
        on_every_rank(work, range(RANKS))
    assert time.monotonic() - began < 0.9


def test_the_library_has_no_time_limit_that_a_slow_save_or_a_stopped_process_could_meet(groups):
    week = timedelta(days=7)
    assert [group._backend.options._timeout for group in groups] == [week] * RANKS
