import pytest
import torch

from runtime.errors import ReplicaMismatchError, WorkerError
from runtime.ranks import agreement
from runtime.ranks.agreement import check_agreement, digest
from runtime.ranks.collectives import leave_groups, make_groups, on_every_rank
from runtime.ranks.devices import Placement

CPU = torch.device("cpu")


def by_hand(flat):
    bits = flat.view(torch.int32).tolist()
    total = sum(value * (2 * index + 1) for index, value in enumerate(bits)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 50])
def test_a_digest_is_the_weighted_sum_of_the_bits_whatever_the_chunks(monkeypatch, size):
    flat = torch.randn(size, generator=torch.Generator().manual_seed(size))
    assert digest(flat).item() == by_hand(flat)
    monkeypatch.setattr(agreement, "CHUNK", 8)
    assert digest(flat).item() == by_hand(flat)


def test_one_bit_or_two_values_swapped_change_a_digest():
    flat = torch.tensor([0.0, 1.0, -2.0, float("nan"), 1e-40, float("inf")])
    seen = {digest(flat).item()}
    for index in range(len(flat)):
        for bit in (0, 13, 30):
            changed = flat.clone()
            changed.view(torch.int32)[index] ^= 1 << bit
            seen.add(digest(changed).item())
    for index in range(1, len(flat)):
        order = torch.arange(len(flat))
        order[0], order[index] = index, 0
        seen.add(digest(flat[order]).item())
    assert len(seen) == 1 + 3 * len(flat) + len(flat) - 1
    assert digest(torch.tensor([0.0])) == digest(torch.tensor([0.0]))
    # -0.0 equals 0.0 as a number, and is another weight.
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))


def test_the_digest_is_the_same_for_any_size_of_chunk_and_keeps_the_weights(monkeypatch):
    flat = torch.arange(100.0)
    before, expected = flat.clone(), digest(flat)
    assert expected.dtype == torch.int64
    assert expected.shape == ()
    for chunk in (1, 3, 50, 99, 100, 101):
        monkeypatch.setattr(agreement, "CHUNK", chunk)
        assert digest(flat) == expected
    assert torch.equal(flat, before)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_whichever_rank_differs_all_hear_of_it_with_their_own_digest(size):
    groups = make_groups(Placement((CPU,) * size, torch.float32, 1))

    def check(group):
        try:
            check_agreement(flats[group.rank], group, 7)
        except ReplicaMismatchError as error:
            return str(error)
        return None

    for other in range(size):
        # Two values that changed places: the sum is the same.
        flats = [torch.tensor([1.0, 2.0, 3.0]) for _ in groups]
        flats[other][[0, 2]] = flats[other][[2, 0]]
        for rank, message in enumerate(on_every_rank(check, groups)):
            own = by_hand(flats[rank]) % 2**64
            assert message == (
                f"after step 7 the weights of the {size} replicas are not equal bit for bit "
                f"(rank {rank} has digest {own:016x}); nothing was saved. Resume from the "
                "checkpoint before it, and look for a faulty device"
            )
    assert leave_groups(groups, 10.0)


@pytest.mark.parametrize("values", [[0.0], [-1.0, -2.0], [float("nan"), 1e30]])
def test_equal_replicas_agree_whatever_their_digest(values):
    groups = make_groups(Placement((CPU,) * 3, torch.float32, 1))
    flats = [torch.tensor(values) for _ in groups]
    on_every_rank(lambda group: check_agreement(flats[group.rank], group, 1), groups)
    assert leave_groups(groups, 10.0)


def test_one_replica_compares_nothing():
    (group,) = make_groups(Placement((CPU,), torch.float32, 1))
    assert check_agreement(torch.ones(3), group, 1) is None


def test_weights_are_not_compared_in_a_group_that_was_left():
    groups = make_groups(Placement((CPU,) * 2, torch.float32, 1))
    assert leave_groups(groups, 10.0)
    with pytest.raises(WorkerError, match="rank 1 has left the group of 2 workers"):
        check_agreement(torch.ones(3), groups[1], 1)


def test_ranks_agree_until_one_differs():
    groups = make_groups(Placement((CPU,) * 3, torch.float32, 1))
    flats = [torch.arange(100.0) for _ in groups]

    def check(group):
        try:
            check_agreement(flats[group.rank], group, 12)
        except ReplicaMismatchError as error:
            return str(error)
        return None

    assert on_every_rank(check, groups) == [None] * 3
    flats[1][99] += 1e-5
    for message in on_every_rank(check, groups):
        assert "after step 12 the weights of the 3 replicas are not equal" in message
    assert leave_groups(groups, 10.0)
