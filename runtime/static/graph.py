"""A step as one CUDA graph: warm up, capture, replay, tear down. On the CPU the step runs eagerly.

The functions here know nothing of what a step computes: any function without arguments that reads
and writes tensors at fixed addresses will do.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from maskgen.faults import users_place
from runtime.errors import TrainingError

CAPTURE_LOCK = threading.Lock()
"""One capture at a time in the process: entering a capture synchronises and empties caches of all
devices, which would break another capture under way."""

WARMUP_RUNS = 3


class CaptureError(TrainingError, RuntimeError):
    """A step could not be warmed up or captured, or ran out of memory."""


class GraphPool:
    """The one stream and memory pool that all graphs of a device share.

    Graphs of one pool may replay in any order as long as no two run at once and none reads
    another's outputs; so a step's results live in tensors made outside the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        self.handle: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.handle = torch.cuda.graph_pool_handle()

    @contextlib.contextmanager
    def activated(self) -> Iterator[None]:
        """Make the device and the stream current in this thread, and the modes those of training.

        Whatever gradient, inference or autocast mode the caller of a run is in, it does not count.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autocast(self.device.type, enabled=False))
            if self.stream is not None:
                stack.enter_context(torch.cuda.device(self.device))
                stack.enter_context(torch.cuda.stream(self.stream))
            yield

    def synchronize(self) -> None:
        """Wait for all work of the stream."""
        if self.stream is not None:
            self.stream.synchronize()

    def wait_for_device(self) -> None:
        """Wait for the whole device: for tensors that were made on other streams."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)


class StaticStep:
    """A function over static tensors, captured once and replayed for every step.

    Args:
        fn: Reads and writes tensors at fixed addresses only; no host reads, no new shapes. The
            tensors it closes over must outlive this object: a graph does not keep them.
        pool: Stream and memory of the device.
        name: Shown in errors, such as ``ctx128 on cuda:0``.
        memory_hint: What to lower when the device runs out of memory.
    """

    def __init__(
        self,
        fn: Callable[[], None],
        pool: GraphPool,
        name: str,
        *,
        memory_hint: str = "use smaller buckets or a smaller batch",
    ) -> None:
        self.fn = fn
        self.pool = pool
        self.name = name
        self.memory_hint = memory_hint
        self.replays = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def captured(self) -> bool:
        """Whether ``run`` replays a graph."""
        return self._graph is not None

    def warm_up(self) -> None:
        """Run the function until compiling, autotuning and workspaces are settled.

        Raises:
            CaptureError: The function failed; the cause is chained.
        """
        runs = WARMUP_RUNS if self.pool.device.type == "cuda" else 1
        try:
            with self.pool.activated():
                for _ in range(runs):
                    self.fn()
            self.pool.synchronize()
        except Exception as error:
            raise self._failure("warm up", error) from error

    def capture(self) -> None:
        """Record the function as a CUDA graph; on the CPU there is nothing to record.

        Raises:
            CaptureError: The capture failed; the cause is chained.
        """
        if self.pool.device.type != "cuda":
            return
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                CAPTURE_LOCK,
                torch.cuda.device(self.pool.device),
                torch.autograd.set_multithreading_enabled(False),
                torch.cuda.graph(
                    graph,
                    pool=self.pool.handle,
                    stream=self.pool.stream,
                    capture_error_mode="thread_local",
                ),
            ):
                self.fn()
        except Exception as error:
            raise self._failure("capture", error) from error
        self._graph = graph

    def _failure(self, doing: str, error: Exception) -> CaptureError:
        hint = ""
        if isinstance(error, torch.OutOfMemoryError):
            hint = f"; {memory_left(self.pool.device)}{self.memory_hint}"
        elif (place := users_place(error)) is not None:
            hint = f" ({type(error).__name__}, {place})"
        return CaptureError(f"cannot {doing} {self.name}: {error}{hint}")

    def run(self) -> None:
        """Replay the graph on the current stream, or run the function on the CPU.

        Raises:
            CaptureError: The device is out of memory; the cause is chained.
        """
        try:
            if self._graph is None:
                self.fn()
                return
            self._graph.replay()
        except torch.OutOfMemoryError as error:
            raise self._failure("run", error) from error
        self.replays += 1

    def teardown(self) -> None:
        """Free the graph."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


def memory_left(device: torch.device) -> str:
    """How much memory a GPU has, for an error of too little; empty for the CPU."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return (
        f"{device} has {total:,} bytes, of which this process has reserved {reserved:,} and "
        f"{free:,} are free; "
    )
