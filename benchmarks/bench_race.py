"""Threads that compile and build masks get in each other's way; static graphs do not.

    python -m benchmarks.bench_race --size large --devices cuda:0,cuda:1

a  naive: every thread builds each step's mask with a compiled ``create_block_mask`` and calls a
   compiled ``flex_attention``; lengths change from step to step. Crashes are counted.
b  the tracing check patched away (``error_on_nested_fx_trace = False``).
c  a lock around mask building (eager) and around each step for as long as steps still compile.
d  this runtime: prebuilt masks, buckets, one captured graph a bucket, gradients summed.
d1 the same on the first device alone; dc as d, gradients summed in the dtype of compute.
u  the usual way: one process per GPU, attention alone compiled, eager ``create_block_mask``,
   gradients summed while the backward pass goes on.

All train the same drafter on the same draws of lengths and anchors with the same optimizer. The
threads of a, b and c sum no gradients: where one crashes or stands still, the others would hang.
A thread that does not end is counted, too. Tokens are true context tokens, padding not counted.
``late`` is the second half of the time, when most compiling is over. A ratio is that of d to the
line's own figure.
"""

import argparse
import collections
import dataclasses
import gc
import logging
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from functools import partial

import torch
import torch._dynamo

from benchmarks.contenders import Outcome, run_processes, run_threads
from benchmarks.naive import length_of
from benchmarks.results import Results
from benchmarks.tally import Tally
from benchmarks.workload import SIZES, Size, build_entries, fill_inputs, make_replica
from maskgen.entry import MaskEntry
from runtime.data.plan import Step
from runtime.ranks.collectives import leave_groups, make_groups
from runtime.ranks.devices import Placement, enter_thread, place
from runtime.static.buffers import InputSlot
from runtime.static.channels import Channel, Lane
from runtime.static.compilation import size_recompile_limits
from runtime.static.freeze import FreezeGuard
from runtime.training.replica import Replica
from runtime.training.worker import Coordinator, Worker

FAR = 1_000_000
STATIC = ("d", "d1", "dc")
"""Variants of this runtime."""


def steps_of(size: Size) -> Iterator[tuple[int, Step]]:
    """True length and step of every number: lengths of rank 0, each in its bucket."""
    for number in range(FAR):
        length = length_of(size, 0, number)
        bucket = min(context for context in size.contexts if context >= length)
        yield length, Step(number, 0, bucket, (0,))


def feed(size: Size, replica: Replica, lane: Lane[tuple[Step, InputSlot]]) -> None:
    """A feeder's work on random text, until the lane is stopped."""
    generator = torch.Generator().manual_seed(replica.group.rank)
    ids = torch.randint(size.vocab_size - 1, (1, max(size.contexts)), generator=generator)
    stream = torch.cuda.Stream(replica.device) if replica.device.type == "cuda" else None
    try:
        with torch.cuda.stream(stream):
            for length, step in steps_of(size):
                slot = replica.free.get()
                host = slot.open(replica.fields(step.bucket))
                host["input_ids"].zero_()[:, :length] = ids[:, :length]
                host["loss_mask"].zero_()[:, :length] = True
                host["layout"].fill_(step.number % 4)
                slot.send()
                if not lane.put((step, slot)):
                    return
    except Exception as error:
        lane.fail(error)


def run_static(
    size: Size,
    placement: Placement,
    entries: dict[int, MaskEntry],
    seconds: float,
    results: Results,
    reduce_dtype: str = "float32",
) -> Outcome:
    """Variant d: this runtime."""
    torch._dynamo.reset()
    size_recompile_limits(len(entries), len(placement.devices))
    groups = make_groups(placement)
    replicas = []
    for group in groups:
        began = time.perf_counter()
        replica = make_replica(
            size, placement, group, entries, batch=1, steps=FAR, reduce_dtype=reduce_dtype
        )
        replica.prepare(lambda line: None)
        fill_inputs(size, replica)
        took = time.perf_counter() - began
        case = f"{size.name}, {len(groups)} x d, {replica.device}"
        results.add(case, f"warm-up and capture of {len(entries)} buckets", took, "s")
        replicas.append(replica)
    tallies = [Tally() for _ in replicas]
    lengths = [length_of(size, 0, number) for number in range(100_000)]
    coordinator = Coordinator(FAR)
    lanes: list[Lane[tuple[Step, InputSlot]]] = [Lane([Channel()]) for _ in replicas]

    def count(tally: Tally, finished: int, step: Step) -> None:
        del finished
        tally.count(lengths[step.number])

    workers = [
        Worker(
            rank=replica.group.rank,
            stepper=replica,
            source=lane,
            coordinator=coordinator,
            first_step=0,
            after_step=partial(count, tally),
        )
        for replica, lane, tally in zip(replicas, lanes, tallies, strict=True)
    ]
    feeders = [
        threading.Thread(target=feed, args=(size, replica, lane), daemon=True)
        for replica, lane in zip(replicas, lanes, strict=True)
    ]
    guard = FreezeGuard()
    with guard.active():
        for tally in tallies:
            tally.start()
        for thread in (*feeders, *workers):
            thread.start()
        coordinator.failed.wait(seconds)
        coordinator.stop(signal.SIGTERM)
        for worker, tally in zip(workers, tallies, strict=True):
            worker.join()
            tally.finish()
        for replica, lane in zip(replicas, lanes, strict=True):
            replica.free.stop()
            lane.stop()
    if coordinator.error is not None:
        raise coordinator.error
    for worker, tally in zip(workers, tallies, strict=True):
        tally.host_ms = 1e3 * statistics.median(worker.host_s)
    steps = sum(worker.finished for worker in workers)
    eager = placement.kind == "cpu"
    print(guard.summary(steps, sum(r.replays for r in replicas), eager=eager), flush=True)
    for replica in replicas:
        replica.teardown()
    leave_groups(groups, 60.0)
    return Outcome(tallies)


def run(
    mode: str, size_name: str, placement: Placement, seconds: float, results: Results
) -> Outcome:
    """One variant."""
    size = SIZES[size_name]
    if mode in STATIC:
        chosen = placement
        if mode == "d1":
            chosen = dataclasses.replace(placement, devices=placement.devices[:1])
        dtype = "compute" if mode == "dc" else "float32"
        return run_static(size, chosen, build_entries(size), seconds, results, dtype)
    if mode == "u":
        return run_processes(size_name, placement, seconds)
    return run_threads(size_name, placement, seconds, locked=mode == "c", patched=mode == "b")


def report(
    mode: str, size: Size, outcome: Outcome, best: dict[str, float], results: Results
) -> None:
    """Rows of one variant."""
    tallies = outcome.tallies
    case = f"{size.name}, {len(tallies)} x {mode}"
    rates = {
        "tokens/s": sum(tally.rate() for tally in tallies),
        "tokens/s late": sum(tally.rate(tally.ended / 2) for tally in tallies),
    }
    for name, rate in rates.items():
        best.setdefault(name, rate)
        results.add(case, name, rate, "tokens/s", best[name] / rate if rate else None)
    results.add(case, "steps", sum(len(tally.tokens) for tally in tallies), "steps")
    crashes: collections.Counter[str] = collections.Counter()
    for tally in tallies:
        crashes += tally.crashes
    results.add(case, "crashes", sum(crashes.values()), "steps")
    for text, times in crashes.most_common(3):
        print(f"    {times} x {text}")
    if mode == "c":
        waited = sum(tally.waited_s for tally in tallies)
        results.add(case, "waited for the lock", waited, "s")
    if mode in ("a", "b", "c"):
        results.add(case, "threads that did not end", outcome.stuck, "threads")
        results.add(case, "graphs compiled by Dynamo", outcome.graphs, "graphs")
        results.add(case, "recompile limit hit", outcome.limits, "times")
        results.add(case, "eager calls of flex_attention", outcome.eager_calls, "calls")
    if mode in STATIC:
        host_ms = max(tally.host_ms for tally in tallies)
        results.add(case, "host time of a step, copies and replay", host_ms, "ms")


def main() -> None:
    """Run the variants and print what each gave."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--modes", default="d,d1,u,c,b,a")
    parser.add_argument("--seconds", type=float, default=45.0, help="of a, b, c and u")
    parser.add_argument("--static-seconds", type=float, default=15.0, help="of d, d1 and dc")
    parser.add_argument("--out", default="benchmarks/results.csv")
    options = parser.parse_args()
    logging.getLogger("torch._dynamo").setLevel(logging.WARNING)
    size = SIZES[options.size]
    placement = place(options.devices)
    enter_thread(placement.devices[0], placement.threads)
    results = Results("bench_race", options.out, placement.kind)
    best: dict[str, float] = {}
    for mode in options.modes.split(","):
        began = time.monotonic()
        seconds = options.static_seconds if mode in STATIC else options.seconds
        outcome = run(mode, options.size, placement, seconds, results)
        report(mode, size, outcome, best, results)
        print(f"    {mode} took {time.monotonic() - began:.0f} s", flush=True)
        gc.collect()
        if placement.kind == "cuda":
            for device in placement.devices:
                with torch.cuda.device(device):
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
