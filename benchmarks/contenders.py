"""The ways to train without this runtime, each in processes of its own.

So a thread that never ends costs a variant its time and no more, and none finds what another one
compiled in its process.
"""

import contextlib
import dataclasses
import faulthandler
import logging
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import distributed
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.naive import run_rank
from benchmarks.tally import Tally
from benchmarks.workload import SIZES
from runtime.ranks.collectives import make_groups
from runtime.ranks.devices import Placement
from runtime.ranks.processes import Processes
from runtime.static.torch_internals import EAGER_ATTENTION

GRACE_S = 60.0
"""How long a step that was begun in time may still take."""
START_S = 120.0
"""How long processes may take to import, to load and to answer."""


@dataclasses.dataclass
class Outcome:
    """What a variant did."""

    tallies: list[Tally]
    graphs: int = 0
    """Compiled by Dynamo, all threads together."""
    limits: int = 0
    """Times that Dynamo hit its recompile limit."""
    eager_calls: int = 0
    """Calls of attention that was not compiled."""
    stuck: int = 0
    """Threads that did not end; where they are goes to the standard error output."""


def run_threads(
    name: str, placement: Placement, seconds: float, *, locked: bool, patched: bool
) -> Outcome:
    """A thread per device in one process, as variants a, b and c have them."""
    options = {"locked": locked, "patched": patched}
    (outcome,) = _answers(_threads, [(name, placement, seconds, options)], seconds)
    assert isinstance(outcome, Outcome)
    return outcome


def _threads(name: str, placement: Placement, seconds: float, options: dict[str, bool]) -> Outcome:
    tallies, log = [Tally() for _ in placement.devices], DynamoLog()
    locked = options["locked"]
    shared = {
        "build": create_block_mask if locked else torch.compile(create_block_mask),
        "barrier": threading.Barrier(len(tallies)),
        "lock": threading.RLock() if locked else None,
        "patched": options["patched"],
    }
    threads = [
        threading.Thread(
            target=run_rank,
            args=(SIZES[name], placement, rank, seconds, tally),
            kwargs=shared,
            daemon=True,
        )
        for rank, tally in enumerate(tallies)
    ]
    with log.counting():
        for thread in threads:
            thread.start()
        until = time.monotonic() + seconds + GRACE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        alive = [thread.is_alive() for thread in threads]
    if any(alive):
        faulthandler.dump_traceback()
    for tally, still in zip(tallies, alive, strict=True):
        if still:
            tally.finish()
    graphs = counters["stats"]["unique_graphs"]
    return Outcome(tallies, graphs, log.limits, log.eager_calls, sum(alive))


def run_processes(name: str, placement: Placement, seconds: float) -> Outcome:
    """A process per device, masks built eagerly, gradients summed: the usual way, variant u."""
    size = len(placement.devices)
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    barrier = multiprocessing.get_context("spawn").Barrier(size)
    shares = [(name, placement, rank, store.port, seconds, barrier) for rank in range(size)]
    return Outcome(_answers(_process, shares, seconds))


def _process(
    name: str, placement: Placement, rank: int, port: int, seconds: float, barrier: Any
) -> Tally:
    size, tally = len(placement.devices), Tally()
    store = distributed.TCPStore("127.0.0.1", port, is_master=False)
    own = dataclasses.replace(placement, devices=placement.devices[rank : rank + 1])
    (group,) = make_groups(own, Processes(rank, size, rank, size, store))
    run_rank(
        SIZES[name], own, 0, seconds, tally, build=create_block_mask, barrier=barrier, group=group
    )
    return tally


def _answers(work: Callable[..., Any], shares: list[tuple[Any, ...]], seconds: float) -> list[Any]:
    """What processes answer, one for each share; they are ended once all have answered."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [
        context.Process(target=_answer, args=(answers, rank, work, share), daemon=True)
        for rank, share in enumerate(shares)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < len(shares):
            rank, answer = answers.get(timeout=START_S + seconds + GRACE_S)
            if isinstance(answer, Exception):
                raise answer
            found[rank] = answer
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [found[rank] for rank in sorted(found)]


def _answer(answers: Any, rank: int, work: Callable[..., Any], share: tuple[Any, ...]) -> None:
    """Do a share; then end the process, whatever threads it still has."""
    logging.getLogger("torch._dynamo").setLevel(logging.WARNING)
    try:
        answers.put((rank, work(*share)))
    except Exception as error:
        traceback.print_exc()
        answers.put((rank, RuntimeError(f"rank {rank}: {error}")))
    answers.close()
    answers.join_thread()
    os._exit(0)


class DynamoLog(logging.Handler):
    """Counts what Dynamo says about limits that it hit, and calls of uncompiled attention."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.limits = 0
        self.eager_calls = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count one record."""
        self.limits += "recompile_limit" in record.getMessage()

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count while this is open."""
        owner, name = EAGER_ATTENTION
        eager = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.eager_calls += 1
            return eager(*args, **kwargs)

        logger = logging.getLogger("torch._dynamo")
        logger.addHandler(self)
        try:
            with mock.patch.object(owner, name, counted):
                yield
        finally:
            logger.removeHandler(self)
