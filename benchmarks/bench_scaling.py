"""What a step loses to the sums of gradients over GPUs.

    python -m benchmarks.bench_scaling --size large --devices cuda:0,cuda:1

Each case replays the graphs of the largest bucket on all devices side by side, and names the median
time of a step on the slowest. ``alone`` has one device busy; ``no sums`` all, each for itself; the
others sum gradients in the dtype named. A ratio is the time of ``alone`` to the case's: the share
of perfect scaling that is reached.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.bench_step import kernel_times
from benchmarks.results import Results
from benchmarks.workload import SIZES, Size, build_entries, make_replica
from maskgen.entry import MaskEntry
from runtime.ranks.collectives import Group, leave_groups, make_groups, on_every_rank
from runtime.ranks.devices import Placement, enter_thread, place
from runtime.static.compilation import size_recompile_limits
from runtime.static.graph import StaticStep
from runtime.training.replica import Replica

DTYPES = ("float32", "compute")


def only_step(replica: Replica) -> StaticStep:
    """The step of the one bucket."""
    (step,) = replica.steps.values()
    return step


def step_times(replica: Replica, runs: int) -> list[float]:
    """Milliseconds of each step of one device, run one after another."""
    step, times = only_step(replica), []
    enter_thread(replica.device, replica.threads)
    with replica.pool.activated():
        if replica.device.type != "cuda":
            for _ in range(runs):
                began = time.perf_counter()
                step.run()
                times.append(1e3 * (time.perf_counter() - began))
            return times
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(runs + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step.run()
            mark.record()
        marks[-1].synchronize()
    return [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]


def slowest(replicas: Sequence[Replica], runs: int) -> float:
    """Median milliseconds of a step on the slowest device, all stepping side by side."""
    on_every_rank(lambda replica: step_times(replica, 3), replicas)
    found = on_every_rank(lambda replica: step_times(replica, runs), replicas)
    return max(statistics.median(times) for times in found)


def sum_alone(replicas: Sequence[Replica], runs: int) -> float:
    """Median milliseconds that summing all gradients takes by itself."""

    def run(replica: Replica) -> list[float]:
        enter_thread(replica.device, replica.threads)
        times = []
        with replica.pool.activated():
            for _ in range(runs):
                began = time.perf_counter()
                replica.group.all_reduce(replica.optimizer.grads)
                replica.pool.synchronize()
                times.append(1e3 * (time.perf_counter() - began))
        return times

    return max(statistics.median(times) for times in on_every_rank(run, replicas))


def prepared(
    size: Size,
    placement: Placement,
    groups: Sequence[Group],
    entries: dict[int, MaskEntry],
    reduce_dtype: str,
) -> list[Replica]:
    """A captured replica on each device."""
    replicas = [
        make_replica(size, placement, group, entries, batch=1, reduce_dtype=reduce_dtype)
        for group in groups
    ]
    for replica in replicas:
        replica.prepare(print)
    return replicas


def measure_apart(
    size: Size, placement: Placement, entries: dict[int, MaskEntry], runs: int, results: Results
) -> float:
    """The cases without sums; gives the milliseconds of ``alone``."""
    groups = [Group(None, rank, 1, rank) for rank in range(len(placement.devices))]
    replicas = prepared(size, placement, groups, entries, DTYPES[0])
    alone_ms = slowest(replicas[:1], runs)
    results.add(f"{size.name}, alone", "step", alone_ms, "ms", 1.0)
    ms = slowest(replicas, runs)
    results.add(f"{size.name}, no sums", "step", ms, "ms", alone_ms / ms)
    return alone_ms


def measure_sums(
    size: Size,
    placement: Placement,
    entries: dict[int, MaskEntry],
    dtype: str,
    alone_ms: float,
    runs: int,
    results: Results,
) -> None:
    """The case of one dtype."""
    groups = make_groups(placement)
    replicas = prepared(size, placement, groups, entries, dtype)
    case = f"{size.name}, {dtype} sums"
    ms = slowest(replicas, runs)
    results.add(case, "step", ms, "ms", alone_ms / ms)
    if dtype == DTYPES[0]:
        results.add(case, "all gradients summed alone", sum_alone(replicas, runs), "ms")
    if placement.kind == "cuda":
        for kernels, ms in kernel_times(partial(all_once, replicas)).items():
            results.add(case, f"kernels, {kernels}", ms / len(replicas), "ms")
    for replica in replicas:
        only_step(replica).teardown()
    leave_groups(groups, 60.0)


def all_once(replicas: Sequence[Replica]) -> None:
    """Begin one step on every device."""
    for replica in replicas:
        with replica.pool.activated():
            only_step(replica).run()


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--out", default="benchmarks/results.csv")
    options = parser.parse_args()
    placement = place(options.devices)
    enter_thread(placement.devices[0], placement.threads)
    results = Results("bench_scaling", options.out, placement.kind)
    size = SIZES[options.size]
    entries = build_entries(size)
    entries = {max(entries): entries[max(entries)]}
    size_recompile_limits(2, len(placement.devices))
    alone_ms = measure_apart(size, placement, entries, options.runs, results)
    for dtype in DTYPES:
        measure_sums(size, placement, entries, dtype, alone_ms, options.runs, results)


if __name__ == "__main__":
    main()
