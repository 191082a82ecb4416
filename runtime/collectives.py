"""Data parallelism: one process-group object per worker thread, NCCL on GPUs, Gloo on CPUs.

``torch.distributed``'s default group is one per process; its group objects are not, so every thread
holds its own over one shared store.
"""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from runtime.devices import Placement

TIMEOUT = timedelta(seconds=60)


class Group:
    """Collectives of one rank; with one rank each does nothing.

    Args:
        backend: A process-group object, or None for a single rank.
        rank: This worker.
        size: Workers.
    """

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self._backend = backend
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks in place; capturable on a GPU."""
        if self._backend is not None:
            self._backend.allreduce([tensor], op=distributed.ReduceOp.SUM).wait()

    def start_all_reduce(self, tensor: Tensor) -> Any:
        """Begin to sum a tensor over the ranks in place; ``wait()`` on what is returned."""
        return self._backend.allreduce([tensor], op=distributed.ReduceOp.SUM)

    def shutdown(self) -> None:
        """Leave the group, ending collectives that wait for a dead rank."""
        for name in ("abort", "shutdown"):
            leave = getattr(self._backend, name, None)
            if leave is not None:
                leave()
                return


def make_groups(placement: Placement) -> list[Group]:
    """Make one group object a device; they meet in threads, since each waits for the others."""
    size = len(placement.devices)
    if size == 1:
        return [Group(None, 0, 1)]
    store = distributed.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(size) as pool:
        return list(
            pool.map(lambda rank: _connect(store, placement.devices[rank], rank, size), range(size))
        )


def _connect(store: Any, device: torch.device, rank: int, size: int) -> Group:
    prefixed = distributed.PrefixStore("data-parallel", store)  # type: ignore[attr-defined]
    if device.type == "cuda":
        from torch.distributed import ProcessGroupNCCL

        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        group = Group(ProcessGroupNCCL(prefixed, rank, size, options), rank, size)
        # The first collective sets the connections up, which a capture could not.
        group.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)
        return group
    from torch.distributed import ProcessGroupGloo

    return Group(ProcessGroupGloo(prefixed, rank, size, TIMEOUT), rank, size)
