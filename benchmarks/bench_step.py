"""What a bucket costs to compile and a step to run, and which kernels the step's time goes to.

    python benchmarks/bench_step.py --size large --out results.csv
    python benchmarks/bench_step.py --size large --losses decay,dpace,l1,kl,lk --out results.csv

Prints a table and appends rows to a CSV. Times are medians of CUDA events around graph replays; on
the CPU (``--size tiny``) the same script runs eagerly, as a check of itself.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.results import Results
from benchmarks.workload import DECAY, SIZES, build_entries, make_replica
from runtime.dflash.loss.distillation import KINDS, Distillation
from runtime.dflash.step.recipe import Recipe
from runtime.ranks.collectives import make_groups
from runtime.ranks.devices import Placement, enter_thread, place
from runtime.static.compilation import size_recompile_limits
from runtime.static.graph import StaticStep
from runtime.training.replica import Replica


def time_step(step: StaticStep, replica: Replica, runs: int) -> float:
    """Median milliseconds of a step."""
    times = []
    with replica.pool.activated():
        for _ in range(3):
            step.run()
        for _ in range(runs):
            if replica.device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                step.run()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
            else:
                began = time.perf_counter()
                step.run()
                times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


KINDS_OF_KERNEL = {
    "NCCL": ("nccl",),
    "flex attention": ("flex",),
    "AdamW": ("adam",),
    "GEMM": ("gemm", "nvjet", "cutlass", "cublas", "wgmma"),
    "Inductor": ("triton",),
}
"""What a kernel is, by what its name contains; the first that fits."""


def kernel_times(run: Callable[[], None], replays: int = 3) -> dict[str, float]:
    """Milliseconds of GPU time that each kind of kernel takes in a replay, which ``run`` begins."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(replays):
            run()
        torch.cuda.synchronize()
    times = dict.fromkeys((*KINDS_OF_KERNEL, "other"), 0.0)
    for event in profile.events():
        name = event.name.lower()
        fits = (kind for kind, parts in KINDS_OF_KERNEL.items() if any(p in name for p in parts))
        times[next(fits, "other")] += event.device_time_total / 1e3 / replays
    return times


LOSSES: dict[str, dict[str, Any]] = {
    "decay": {},
    "dpace": {"recipe": Recipe(dpace_alpha=0.5)},
    **{kind: {"recipe": replace(DECAY, distill=Distillation(kind, 0.9))} for kind in KINDS},
    "markov": {"markov_rank": 256},
    "dspark": {"markov_rank": 256, "recipe": replace(DECAY, distill=Distillation("l1", 0.9))},
}
"""By name, what ``make_replica`` takes of it."""


def measure(
    size_name: str, placement: Placement, kind: str, loss: str, runs: int, results: Results
) -> None:
    """Warm up, capture and time every bucket of one variant."""
    size = SIZES[size_name]
    entries = build_entries(size, kind)
    size_recompile_limits(len(entries), 1)
    (group,) = make_groups(placement)
    replica = make_replica(size, placement, group, entries, batch=1, **LOSSES[loss])
    case = f"{size.name}, {kind}" + (f", {loss}" if LOSSES[loss] else "")
    for context, step in replica.steps.items():
        began = time.perf_counter()
        step.warm_up()
        results.add(f"{case}, ctx{context}", "warm-up", time.perf_counter() - began, "s")
    for context, step in replica.steps.items():
        step.capture()
        ms = time_step(step, replica, runs)
        results.add(f"{case}, ctx{context}", "step", ms, "ms")
    if replica.device.type == "cuda":
        largest = max(replica.steps)
        with replica.pool.activated():
            found = kernel_times(replica.steps[largest].run)
        for kernels, ms in found.items():
            results.add(f"{case}, ctx{largest}", f"kernels, {kernels}", ms, "ms")
        peak = torch.cuda.max_memory_reserved(replica.device) / 2**30
        results.add(case, "peak reserved", peak, "GiB")
        torch.cuda.reset_peak_memory_stats()
    replica.teardown()


def main() -> None:
    """Measure all variants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--kinds", default="layouts")
    parser.add_argument("--losses", default="decay")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", default="benchmarks/results.csv")
    options = parser.parse_args()
    placement = place(options.device)
    enter_thread(placement.devices[0], placement.threads)
    results = Results("bench_step", options.out, placement.kind)
    variants = itertools.product(options.kinds.split(","), options.losses.split(","))
    for kind, loss in variants:
        measure(options.size, placement, kind, loss, options.runs, results)
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
