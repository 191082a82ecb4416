"""Data parallelism: one process-group object per worker thread, NCCL on GPUs, Gloo on CPUs.

``torch.distributed``'s default group is one per process; its group objects are not, so every thread
holds its own over one shared store, and a rank is a thread of any process.
"""

import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from runtime.errors import BrokenCollectiveError, ConfigError, WorkerError, first_line
from runtime.ranks.awake import wait_until
from runtime.ranks.devices import Placement
from runtime.ranks.processes import POLL_S, Processes, single_process

T = TypeVar("T")
R = TypeVar("R")

TIMEOUT = timedelta(days=7)
"""The libraries' own limit, which also runs while this process is stopped or another saves. Who is
gone, the pulse of the processes says; a rank that fails leaves its group, which frees the others.
"""

NCCL_SETTINGS = {
    # Connections of every algorithm are made at the start. Made at an algorithm's first use, that
    # would be within a capture, where a rank that another thread captures later cannot answer.
    "NCCL_RUNTIME_CONNECT": "0",
    # Registering captured buffers needs the other ranks within the capture, too.
    "NCCL_GRAPH_REGISTER": "0",
}


class Pending:
    """A collective under way."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Wait for it, on a GPU in the current stream only.

        Raises:
            BrokenCollectiveError: It broke off.
        """
        _unless_broken(self._work.wait)


class Group:
    """Collectives of one rank; with one rank each does nothing.

    Args:
        backend: A process-group object, or None for a single rank.
        rank: This worker, among those of all processes.
        size: Workers of all processes.
        index: This worker among those of its process.
    """

    def __init__(self, backend: Any, rank: int, size: int, index: int = 0) -> None:
        self._backend = backend
        self._closer: threading.Thread | None = None
        self.rank = rank
        self.size = size
        self.index = index

    def all_reduce(self, tensor: Tensor, op: Any = distributed.ReduceOp.SUM) -> None:
        """Reduce a tensor over the ranks in place, by sums if no op is named; can be captured."""
        if self.size > 1:
            _begin(self._connected().allreduce, [tensor], op=op).wait()

    def start_all_reduces(self, tensors: Sequence[Tensor]) -> Pending:
        """Begin to sum tensors of one dtype over the ranks in place, as one collective."""
        if len(tensors) == 1:
            return _begin(self._connected().allreduce, list(tensors))
        return _begin(self._connected().allreduce_coalesced, list(tensors))

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of rank 0."""
        if self.size > 1:
            _begin(self._connected().broadcast, tensor, 0).wait()

    def check_joined(self) -> None:
        """Make sure that the collectives so far were not broken off.

        Raises:
            WorkerError: The group was left; what NCCL then leaves in a tensor is half made.
        """
        if self.size > 1:
            self._connected()

    def _connected(self) -> Any:
        backend = self._backend
        if backend is None:
            raise WorkerError(f"rank {self.rank} has left the group of {self.size} workers")
        return backend

    def leave(self) -> None:
        """Begin to leave the group in a thread of its own, ending collectives under way.

        Of NCCL's, this rank's own end at once, and leaving takes until the graphs that hold them
        are freed. Gloo cannot end its own: closing this rank's connections ends those of the
        others, so each rank must leave, and leaving takes until the rank's own have ended.
        """
        if self._backend is not None:
            self._closer = threading.Thread(
                target=_close, args=([self._backend],), name=f"leave-{self.rank}", daemon=True
            )
            self._backend = None
            self._closer.start()

    @property
    def is_left(self) -> bool:
        """Whether the group is left, unless it was never joined."""
        return self._closer is None or not self._closer.is_alive()


def _begin(collective: Callable[..., Any], *args: Any, **options: Any) -> Pending:
    return Pending(_unless_broken(lambda: collective(*args, **options)))


def _unless_broken(call: Callable[[], R]) -> R:
    try:
        return call()
    except RuntimeError as error:
        raise BrokenCollectiveError(
            f"a collective broke off, since another rank is gone: {first_line(error)}"
        ) from error


def _close(backend: list[Any]) -> None:
    # Gloo's destructor closes the connections, so this must be the last reference.
    abort = getattr(backend[0], "abort", None)
    if abort is not None:
        abort()
    del abort
    backend.clear()


def make_groups(placement: Placement, processes: Processes | None = None) -> list[Group]:
    """Make one group object a device; they meet in threads, since each waits for the others.

    Args:
        placement: This process's devices.
        processes: All processes; this one alone if left out.

    Returns:
        This process's workers; rank = process rank x devices of a process + index.

    Raises:
        ConfigError: The processes have different numbers of devices.
        WorkerError: Another process failed or does not come.
    """
    processes = processes or single_process()
    devices = placement.devices
    counts = processes.gather("devices", f"{len(devices)} {placement.kind}")
    if len(set(counts)) > 1:
        raise ConfigError(
            "run.devices",
            ",".join(map(str, devices)),
            f"must be as many, and of one kind, in every process; by rank they have {counts}",
        )
    first, size = processes.rank * len(devices), processes.size * len(devices)
    if size == 1:
        return [Group(None, 0, 1)]
    if placement.kind == "cuda":
        for name, value in NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
    # A client that waits for a key lets no other thread in, so every rank has its own.
    stores = [processes.store.clone() for _ in devices]
    backends = on_every_rank(
        lambda index: _connect(stores[index], devices[index], first + index, size),
        range(len(devices)),
        processes.failure,
    )
    return [Group(backend, first + index, size, index) for index, backend in enumerate(backends)]


def _connect(store: Any, device: torch.device, rank: int, size: int) -> Any:
    prefixed = distributed.PrefixStore("data-parallel", store)  # type: ignore[attr-defined]
    try:
        return _backend(prefixed, device, rank, size)
    except RuntimeError as error:
        raise BrokenCollectiveError(
            f"rank {rank} cannot connect to the {size - 1} others: {first_line(error)}"
        ) from error


def _backend(prefixed: Any, device: torch.device, rank: int, size: int) -> Any:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # A collective's few blocks go before the many that the backward pass has waiting.
        options = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = TIMEOUT
        backend: Any = distributed.ProcessGroupNCCL(prefixed, rank, size, options)
        # The first collective sets the connections up, which a capture could not.
        backend.allreduce([torch.zeros(1, dtype=torch.float32, device=device)]).wait()
        torch.cuda.synchronize(device)
        return backend
    return distributed.ProcessGroupGloo(prefixed, rank, size, TIMEOUT)


def on_every_rank(
    work: Callable[[T], R],
    ranks: Sequence[T],
    elsewhere: Callable[[], BaseException | None] = lambda: None,
) -> list[R]:
    """Do what all ranks must do together, each of this process's in a thread of its own.

    The first error ends the wait at once; the threads that it leaves stuck end with the process.

    Args:
        work: Takes each of ``ranks``.
        ranks: Of this process.
        elsewhere: What ended another process, if anything did.
    """
    done: SimpleQueue[tuple[int, R | None, BaseException | None]] = SimpleQueue()

    def run(index: int) -> None:
        try:
            done.put((index, work(ranks[index]), None))
        except BaseException as error:
            done.put((index, None, error))

    for index in range(len(ranks)):
        threading.Thread(target=run, args=(index,), daemon=True).start()
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        try:
            index, result, error = done.get(timeout=POLL_S)
        except Empty:
            failure = elsewhere()
            if failure is not None:
                raise failure from None
            continue
        if error is not None:
            raise error
        results[index] = result
    return [results[index] for index in range(len(ranks))]


def leave_groups(groups: Sequence[Group], timeout_s: float) -> bool:
    """Leave all groups of this process at once; gives whether all were left in time."""
    for group in groups:
        group.leave()
    return wait_until(lambda: all(group.is_left for group in groups), timeout_s)
