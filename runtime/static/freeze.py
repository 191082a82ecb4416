"""The guard: after freeze nothing compiles, traces, records a graph or builds a mask.

Whatever tries raises ``FrozenError`` in the thread that tried, naming the thread and the cause, and
is counted. The hooks are process-wide, as the faults they watch for are.
"""

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.fx

from maskgen import host_builds
from runtime.errors import FrozenError
from runtime.static.torch_internals import (
    CUDAGRAPH_RECORDING,
    EAGER_ATTENTION,
    MASK_BUILDER,
    watching_compiles,
)

COMPILE = "compile"
FX_TRACE = "FX trace"
GRAPH_RECORDING = "CUDA graph recording"
MASK_BUILD = "host mask build"
EAGER_FLEX = "flex_attention called without torch.compile"


class _Frozen(FrozenError, AssertionError):
    """What the guard raises.

    Dynamo hands an AssertionError on as it is, and wraps most others in an error of its own without
    their cause. To either message it appends hints that mislead here.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class FreezeGuard:
    """Counts, and forbids, what must not happen while training runs."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._frozen = False

    @property
    def counts(self) -> dict[str, int]:
        """What was tried after freeze, by kind."""
        with self._lock:
            return dict(self._counts)

    def trip(self, kind: str, what: str) -> None:
        """Count one event and raise.

        Raises:
            FrozenError: Always; it comes out of whatever compiles, traces or builds.
        """
        with self._lock:
            self._counts[kind] += 1
        raise _Frozen(
            f"{kind} after freeze in thread {threading.current_thread().name!r}: {what}; all of it "
            "must be done before the steps begin"
        )

    @contextlib.contextmanager
    def active(self) -> Iterator["FreezeGuard"]:
        """Install the hooks, and remove them at the end."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(watching_compiles(self._on_compile))
            stack.enter_context(host_builds.watched(lambda what: self.trip(MASK_BUILD, what)))
            for (owner, attribute), kind in (
                ((torch.fx.Tracer, "trace"), FX_TRACE),
                ((torch.cuda.CUDAGraph, "capture_begin"), GRAPH_RECORDING),
                (MASK_BUILDER, MASK_BUILD),
                (EAGER_ATTENTION, EAGER_FLEX),
            ):
                guarded = self._guarded(kind, getattr(owner, attribute))
                stack.enter_context(mock.patch.object(owner, attribute, guarded))
            self._frozen = True
            try:
                yield self
            finally:
                self._frozen = False

    def _on_compile(self, trigger: str, compile_id: str) -> None:
        kind = GRAPH_RECORDING if trigger == CUDAGRAPH_RECORDING else COMPILE
        self.trip(kind, f"{trigger}, compile id {compile_id}")

    def _guarded(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            # A module imported meanwhile may keep this wrapper for ever.
            if self._frozen:
                self.trip(kind, f"{function.__name__} was called")
            return function(*args, **kwargs)

        return guarded

    def summary(self, steps: int, replays: int, *, eager: bool) -> str:
        """The line that ends every run."""
        counts = self.counts
        how = "eager" if eager else f"{replays:,} graph replays"
        return (
            f"after freeze: {counts.get(COMPILE, 0)} compiles, "
            f"{counts.get(FX_TRACE, 0)} FX traces, {counts.get(MASK_BUILD, 0)} host mask builds, "
            f"{steps:,} steps ({how})"
        )
