import pytest
import torch

from runtime.errors import ReplicaMismatchError
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
