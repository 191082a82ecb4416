"""Training steps as trainers write them: a mask and a length each step, attention compiled.

Any device may run them, each in a thread or a process of its own; nothing is prebuilt.
"""

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, distributed
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.tally import Tally
from benchmarks.workload import Size, frozen_target
from runtime.config import TrainConfig
from runtime.data.draws import raw_words
from runtime.dflash.loss.head import block_targets
from runtime.dflash.network.drafter import Drafter, backward_stages
from runtime.dflash.step.draft_batch import DraftBatch
from runtime.dflash.step.draft_loss import draft_loss
from runtime.ranks.collectives import Group
from runtime.ranks.devices import Placement, enter_thread
from runtime.static.exchange import GradientExchange
from runtime.static.optimizer import FlatAdamW
from runtime.training.replica import adamw_settings


def length_of(size: Size, rank: int, step: int) -> int:
    """Context tokens of one step, from half the smallest bucket to the largest."""
    low, high = size.contexts[0] // 2, size.contexts[-1]
    return low + int(raw_words(1, key=(7, rank), counter=(step, 0, 0))[0] % (high - low))


class NaiveStep:
    """One rank's eager training step with compiled attention; a group sums its gradients."""

    def __init__(self, size: Size, placement: Placement, rank: int, group: Group | None) -> None:
        self.size = size
        self.device = placement.devices[rank]
        self.group = group or Group(None, 0, 1)
        self.target = frozen_target(size, placement, self.device)
        self.drafter = Drafter(size.drafter_config()).to(self.device)
        self.optimizer = FlatAdamW(
            self.drafter,
            adamw_settings(TrainConfig(steps=100_000, lr=1e-5)),
            device=self.device,
            dtype=placement.compute_dtype,
            num_sums=1,
            stages=backward_stages(self.drafter),
        )
        self.exchange = GradientExchange(self.optimizer, self.group)
        self.exchange.reducing = self.group.size > 1
        self.group.broadcast(self.optimizer.master)
        self.optimizer.refresh()
        self.generator = torch.Generator(self.device).manual_seed(rank)
        self.steps = torch.zeros((), device=self.device)

    def run(
        self, context: int, build: Callable[..., BlockMask], attend: Callable[..., Any]
    ) -> None:
        """Draw, mask, forward, backward, update, and wait for the device."""
        size, device = self.size, self.device
        count = min(size.anchors, context - 1)
        ids = torch.randint(
            size.vocab_size - 1, (1, context), generator=self.generator, device=device
        )
        drawn = torch.randperm(context - 1, generator=self.generator, device=device)[:count]
        anchors = torch.zeros(1, size.anchors, dtype=torch.int32, device=device)
        anchors[0, :count] = drawn.sort().values
        n_valid = torch.full((1,), count, dtype=torch.int32, device=device)
        block = size.draft_block_size
        Q_LEN = size.anchors * block

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            j = q // block
            seen = (kv < context) & (kv < anchors[b, j]) & (j < n_valid[b])
            return seen | ((kv >= context) & ((kv - context) // block == j))

        mask = build(mask_mod, 1, None, Q_LEN, context + Q_LEN, device=device)
        targets = block_targets(
            ids,
            torch.ones_like(ids, dtype=torch.bool),
            anchors,
            n_valid,
            draft_block_size=block,
            gamma=4.0,
        )
        assert self.target.features is not None
        result = draft_loss(
            self.drafter,
            self.target,
            DraftBatch(
                ids,
                self.target.features(ids),
                anchors,
                lambda q, k, v: attend(q, k, v, block_mask=mask, enable_gqa=True),
            ),
            targets.labels,
            targets.weights,
        )
        self.exchange.backward(result.loss)
        with torch.no_grad():
            self.optimizer.sums.copy_(targets.weights.sum())
            self.exchange.finish()
            self.optimizer.step(self.optimizer.sums[0], self.steps)
            self.steps.add_(1)
        torch.cuda.current_stream(device).synchronize()

    def agree(self, wish: bool) -> bool:
        """Whether all ranks of the group wish it."""
        flag = torch.tensor(float(wish), device=self.device)
        self.group.all_reduce(flag, distributed.ReduceOp.MIN)
        return bool(flag)


class Turns:
    """A lock around mask building, and around whole steps for as long as these compile.

    Args:
        lock: Shared by all ranks, re-entrant; None for no lock at all.
        tally: Told how long the rank stood before the lock.
    """

    def __init__(self, lock: Any, tally: Tally) -> None:
        self.lock = lock
        self.tally = tally
        self._compiling = True

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the lock."""
        if self.lock is None:
            yield
            return
        began = time.monotonic()
        with self.lock:
            self.tally.waited_s += time.monotonic() - began
            yield

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Hold the lock if the step before compiled something."""
        with self.taken() if self._compiling else contextlib.nullcontext():
            graphs = counters["stats"]["unique_graphs"]
            yield
            self._compiling = counters["stats"]["unique_graphs"] > graphs

    def around(self, build: Callable[..., BlockMask]) -> Callable[..., BlockMask]:
        """``build`` under the lock."""

        def locked(*args: Any, **kwargs: Any) -> BlockMask:
            with self.taken():
                return build(*args, **kwargs)

        return locked


def run_rank(
    size: Size,
    placement: Placement,
    rank: int,
    seconds: float,
    tally: Tally,
    *,
    build: Callable[..., BlockMask],
    barrier: Any,
    lock: Any = None,
    patched: bool = False,
    group: Group | None = None,
) -> None:
    """Step for some seconds; a step that raises is counted and the next one tried.

    Args:
        size: Model and data.
        placement: All devices.
        rank: Which of them.
        seconds: No step begins later.
        tally: Filled in.
        build: ``create_block_mask`` or a compiled form of it.
        barrier: Where all ranks meet before the first step.
        lock: See ``Turns``.
        patched: Whether Dynamo's tracing check is switched off.
        group: Sums gradients; its ranks all take the lengths of rank 0. None sums nothing.
    """
    enter_thread(placement.devices[rank], placement.threads)
    # In this thread: from torch 2.12 on Dynamo's settings belong to the thread.
    torch._dynamo.config.error_on_nested_fx_trace = not patched
    try:
        step = NaiveStep(size, placement, rank, group)
    except Exception as error:
        tally.crash(error)
        barrier.abort()
        raise
    turns = Turns(lock, tally)
    build = turns.around(build)
    attend = torch.compile(flex_attention)
    barrier.wait()
    tally.start()
    number = 0
    while step.agree(tally.passed() < seconds):
        context = length_of(size, rank if group is None else 0, number)
        number += 1
        try:
            with turns.step():
                step.run(context, build, attend)
            tally.count(context)
        except Exception as error:
            tally.crash(error)
            traceback.clear_frames(error.__traceback__)
    tally.finish()
