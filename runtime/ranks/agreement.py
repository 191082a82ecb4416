"""Replicas that begin with the same bits and are checked to have kept them."""

import torch
from torch import Tensor, distributed

from runtime.errors import ReplicaMismatchError
from runtime.ranks.collectives import Group

CHUNK = 1 << 22
"""Elements digested at once, 100 MB of temporaries."""


def digest(flat: Tensor) -> Tensor:
    """An exact digest of bits and their order, on the tensor's device.

    Sum modulo 2^64 of each value's bits times an odd weight of its own, so that any one changed
    value changes it, and so do two values that changed places.

    Args:
        flat: float32 ``[n]``.

    Returns:
        int64 scalar.
    """
    bits = flat.detach().view(torch.int32)
    weights = torch.arange(1, 2 * CHUNK, 2, device=flat.device)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(bits), CHUNK):
        chunk = bits[start : start + CHUNK].long()
        total += chunk.mul_(weights[: len(chunk)] + 2 * start).sum()
    return total


def check_agreement(flat: Tensor, group: Group, step: int) -> None:
    """Compare the replicas' weights; every rank must call it. Reads the result on the host.

    Args:
        flat: float32 ``[n]``: this rank's master weights.
        group: Collectives.
        step: Finished steps, named in the error.

    Raises:
        ReplicaMismatchError: They differ.
        WorkerError: The comparison was broken off.
    """
    if group.size == 1:
        return
    found = digest(flat)
    extremes = torch.stack((found, ~found))
    group.all_reduce(extremes, distributed.ReduceOp.MAX)
    largest, smallest = extremes.tolist()
    group.check_joined()
    # ~x falls as x rises, so its maximum is that of the smallest digest.
    if largest != ~smallest:
        raise ReplicaMismatchError(
            f"after step {step} the weights of the {group.size} replicas are not equal bit for "
            f"bit (rank {group.rank} has digest {found.item() % 2**64:016x}); nothing was saved. "
            "Resume from the checkpoint before it, and look for a faulty device"
        )
