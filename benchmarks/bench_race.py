"""One thread per GPU, four ways: how threads that compile and build masks get in each other's way.

    python benchmarks/bench_race.py --size large --devices cuda:0,cuda:1 --seconds 40

a  naive: every thread builds each step's mask with a compiled ``create_block_mask`` and calls a
   compiled ``flex_attention``; lengths change from step to step. Crashes are counted.
b  the tracing check patched away (``error_on_nested_fx_trace = False``).
c  a lock around mask building and around each step of a length that was not seen before.
d  this runtime: prebuilt masks, buckets, one captured graph a bucket.
u  the usual way: one process per GPU, attention alone compiled, eager ``create_block_mask``.

All train the same drafter on the same draws of lengths and anchors with the same optimizer; only d
sums gradients over the ranks, which the others are spared. Tokens are true context tokens, padding
not counted. ``late`` is the second half of the time, when most compiling is over.
"""

import argparse
import collections
import contextlib
import logging
import multiprocessing
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from benchmarks.results import Results
from benchmarks.workload import SIZES, Size, build_entries, fill_inputs, frozen_target, make_replica
from maskgen.entry import MaskEntry
from runtime.collectives import Group, make_groups
from runtime.compilation import size_recompile_limits
from runtime.devices import Placement, enter_thread, place
from runtime.drafter import Drafter
from runtime.draws import raw_words
from runtime.exchange import GradientExchange
from runtime.freeze import FreezeGuard
from runtime.loss import block_targets
from runtime.optimizer import FlatAdamW
from runtime.replica import Replica, adamw_settings, backward_stages
from runtime.step import draft_objective


@dataclass
class Tally:
    """What one rank did."""

    tokens: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the start, tokens) of every finished step."""
    crashes: collections.Counter[str] = field(default_factory=collections.Counter)
    waited_s: float = 0.0
    host_ms: list[float] = field(default_factory=list)

    def rate(self, begin: float, end: float) -> float:
        """Tokens a second between two times."""
        return sum(tokens for at, tokens in self.tokens if begin <= at < end) / (end - begin)


def length_of(size: Size, rank: int, step: int) -> int:
    """Context tokens of one step, from half the smallest bucket to the largest."""
    low, high = size.contexts[0] // 2, size.contexts[-1]
    return low + int(raw_words(1, key=(7, rank), counter=(step, 0, 0))[0] % (high - low))


class NaiveStep:
    """One rank's eager training step with compiled attention, as trainers write it."""

    def __init__(self, size: Size, placement: Placement, rank: int, mode: str) -> None:
        self.size = size
        self.mode = mode
        self.device = placement.devices[rank]
        self.target = frozen_target(size, placement, self.device)
        self.drafter = Drafter(size.drafter_config()).to(self.device)
        self.optimizer = FlatAdamW(
            self.drafter,
            adamw_settings(train_config(size)),
            device=self.device,
            dtype=placement.compute_dtype,
            num_sums=0,
            stages=backward_stages(self.drafter),
        )
        self.exchange = GradientExchange(self.optimizer, Group(None, 0, 1))
        self.generator = torch.Generator(self.device).manual_seed(rank)
        self.steps = torch.zeros((), device=self.device)

    def run(
        self, context: int, build: Callable[..., BlockMask], attend: Callable[..., Any]
    ) -> None:
        """Draw, mask, forward, backward, update."""
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
        KV_LEN = context + Q_LEN

        def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            j = q // block
            seen = (kv < context) & (kv < anchors[b, j]) & (j < n_valid[b])
            return seen | ((kv >= context) & ((kv - context) // block == j))

        mask = build(mask_mod, 1, None, Q_LEN, KV_LEN, device=device)
        targets = block_targets(
            ids, torch.ones_like(ids, dtype=torch.bool), anchors, n_valid,
            draft_block_size=block, gamma=4.0,
        )  # fmt: skip
        assert self.target.features is not None
        result = draft_objective(
            self.drafter,
            self.target,
            ids,
            self.target.features(ids),
            anchors,
            targets.labels,
            targets.weights,
            lambda q, k, v: attend(q, k, v, block_mask=mask, enable_gqa=True),
        )
        self.exchange.backward(result.loss)
        with torch.no_grad():
            self.optimizer.step(targets.weights.sum(), self.steps)
            self.steps.add_(1)
        torch.cuda.current_stream(device).synchronize()


def train_config(size: Size) -> Any:
    """The optimizer settings of all variants."""
    from runtime.config import TrainConfig

    del size
    return TrainConfig(steps=100_000, lr=1e-5)


def run_naive(
    size: Size, placement: Placement, rank: int, mode: str, seconds: float, tally: Tally,
    shared: dict[str, Any],
) -> None:  # fmt: skip
    """Variants a, b, c and u of one rank."""
    enter_thread(placement.devices[rank], placement.threads)
    if mode == "b":
        torch._dynamo.config.error_on_nested_fx_trace = False
    step = NaiveStep(size, placement, rank, mode)
    shared["barrier"].wait()
    began = time.monotonic()
    number = 0
    seen: set[int] = set()
    while (now := time.monotonic() - began) < seconds:
        context = length_of(size, rank, number)
        number += 1
        held = contextlib.nullcontext()
        if mode == "c":
            asked = time.monotonic()
            held = shared["lock"]
            with held:
                tally.waited_s += time.monotonic() - asked
                if context not in seen:
                    step.run(context, shared["build"], shared["attend"])
                    seen.add(context)
                    tally.tokens.append((time.monotonic() - began, context))
                    continue
            held = contextlib.nullcontext()
        try:
            step.run(context, shared["build"], shared["attend"])
            tally.tokens.append((time.monotonic() - began, context))
        except Exception as error:
            del now
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            tally.crashes[f"{type(error).__name__}: {text[:90]}"] += 1
            traceback.clear_frames(error.__traceback__)


def run_threads(size: Size, placement: Placement, mode: str, seconds: float) -> list[Tally]:
    """Variants a, b and c: a thread per device."""
    torch._dynamo.reset()
    shared = {
        "lock": threading.Lock(),
        "barrier": threading.Barrier(len(placement.devices)),
        "build": torch.compile(create_block_mask),
        "attend": torch.compile(flex_attention),
    }
    tallies = [Tally() for _ in placement.devices]
    threads = [
        threading.Thread(
            target=run_naive, args=(size, placement, rank, mode, seconds, tally, shared)
        )
        for rank, tally in enumerate(tallies)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tallies


def usual_process(
    size: Size, placement: Placement, rank: int, seconds: float, barrier: Any, answer: Any
) -> None:
    """Variant u in its own process."""
    tally = Tally()
    shared = {
        "barrier": barrier,
        "build": create_block_mask,
        "attend": torch.compile(flex_attention),
    }
    run_naive(size, placement, rank, "u", seconds, tally, shared)
    answer.put((rank, tally))


def run_processes(size: Size, placement: Placement, seconds: float) -> list[Tally]:
    """Variant u: a process per device."""
    context = multiprocessing.get_context("spawn")
    barrier, answer = context.Barrier(len(placement.devices)), context.Queue()
    processes = [
        context.Process(
            target=usual_process, args=(size, placement, rank, seconds, barrier, answer)
        )
        for rank in range(len(placement.devices))
    ]
    for process in processes:
        process.start()
    found = dict(answer.get() for _ in processes)
    for process in processes:
        process.join()
    return [found[rank] for rank in sorted(found)]


def run_static(
    size: Size,
    placement: Placement,
    entries: dict[int, MaskEntry],
    seconds: float,
    results: Results,
) -> list[Tally]:
    """Variant d: this runtime."""
    size_recompile_limits(len(entries), len(placement.devices))
    groups = make_groups(placement)
    replicas = []
    for group in groups:
        began = time.perf_counter()
        replica = make_replica(size, placement, group, entries, batch=1, steps=100_000)
        replica.prepare(lambda line: None)
        fill_inputs(size, replica)
        took = time.perf_counter() - began
        results.add(size.name, f"prepare {replica.device}, {len(entries)} buckets", took, "s")
        replicas.append(replica)
    tallies = [Tally() for _ in replicas]
    guard = FreezeGuard()
    barrier = threading.Barrier(len(replicas))
    # Every rank ends after the same step: the first to see the time over names it.
    limit = [1 << 60]
    lock = threading.Lock()

    def work(rank: int) -> None:
        replica, tally = replicas[rank], tallies[rank]
        enter_thread(replica.device, placement.threads)
        with replica.pool.activated():
            barrier.wait()
            began = time.monotonic()
            number = 0
            while True:
                with lock:
                    if time.monotonic() - began > seconds:
                        limit[0] = min(limit[0], number + 2)
                    if number >= limit[0]:
                        break
                context = length_of(size, 0, number)
                bucket = min(c for c in size.contexts if c >= context)
                host = time.perf_counter()
                replica.steps[bucket].run()
                tally.host_ms.append(1e3 * (time.perf_counter() - host))
                replica.pool.synchronize()
                tally.tokens.append((time.monotonic() - began, context))
                number += 1

    with guard.active():
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(replicas))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    steps = sum(len(tally.tokens) for tally in tallies)
    eager = placement.kind == "cpu"
    print(guard.summary(steps, sum(r.replays for r in replicas), eager=eager), flush=True)
    teardown(replicas, groups)
    return tallies


def teardown(replicas: list[Replica], groups: list[Group]) -> None:
    """Free graphs and communicators."""
    for replica in replicas:
        replica.teardown()
    threads = [threading.Thread(target=group.shutdown) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class DynamoLog(logging.Handler):
    """Counts what Dynamo says about limits that it hit."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.limits = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count one record."""
        self.limits += "recompile_limit" in record.getMessage()


def main() -> None:
    """Run the variants and print what each gave."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--modes", default="d,u,c,b,a")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", default="benchmarks/results.csv")
    options = parser.parse_args()
    size = SIZES[options.size]
    placement = place(options.devices)
    enter_thread(placement.devices[0], placement.threads)
    results = Results("bench_race", options.out, placement.kind)
    log = DynamoLog()
    logging.getLogger("torch._dynamo").addHandler(log)
    reference: dict[str, float] = {}
    for mode in options.modes.split(","):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        limits = log.limits
        if mode == "d":
            tallies = run_static(size, placement, build_entries(size), options.seconds, results)
        elif mode == "u":
            tallies = run_processes(size, placement, options.seconds)
        else:
            tallies = run_threads(size, placement, mode, options.seconds)
        case = f"{size.name}, {len(tallies)} x {mode}"
        half = options.seconds / 2
        whole = sum(tally.rate(0, options.seconds) for tally in tallies)
        late = sum(tally.rate(half, options.seconds) for tally in tallies)
        reference.setdefault("whole", whole)
        reference.setdefault("late", late)
        against = (
            (reference["whole"] / whole if whole else None),
            (reference["late"] / late if late else None),
        )
        results.add(case, "tokens/s", whole, "tokens/s", against[0])
        results.add(case, "tokens/s late", late, "tokens/s", against[1])
        results.add(case, "steps", sum(len(t.tokens) for t in tallies), "steps")
        crashes = sum((tally.crashes for tally in tallies), collections.Counter())
        results.add(case, "crashes", sum(crashes.values()), "steps")
        for text, count in crashes.most_common(3):
            print(f"    {count} x {text}")
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        results.add(case, "Dynamo graphs", graphs, "graphs")
        results.add(case, "recompile limit hit", log.limits - limits, "times")
        if mode == "c":
            results.add(case, "waited for the lock", sum(t.waited_s for t in tallies), "s")
        host = sorted(ms for tally in tallies for ms in tally.host_ms)
        if host:
            results.add(case, "host time of a replay", host[len(host) // 2], "ms")
        if placement.kind == "cuda":
            for device in placement.devices:
                with torch.cuda.device(device):
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
