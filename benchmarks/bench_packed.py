"""A step of packed fine-tuning against the same model trained with transformers' own batches.

    python -m benchmarks.bench_packed --size 135m --out results.csv

Each way trains the same random weights on the same documents, step by step, with the same AdamW:

- ``packed``: this project's step, as ``runtime.train`` runs it.
- ``hf rows``: the same rows through transformers, which finds the documents by ``position_ids``;
  ``hf rows compiled``: with every layer compiled, which is not transformers' default.
- ``hf padded``: each document a row of its own, padded to the longest of the step.

transformers attends by sdpa, and in bf16 runs under autocast over float32 weights, as its Trainer
does. All batches lie on the device before the clock starts; nobody waits between two steps. The
first pass compares the losses and warms up, the second one is timed: medians of document tokens a
second, padding not counted, and as the ratio how many times as fast ``packed`` is. On the CPU
(``--size tiny``) the same script is a check of itself.
"""

import argparse
import gc
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.packed_load import SIZES, PackedLoad, make_load
from benchmarks.packed_ways import WAYS, Ran
from benchmarks.results import Results
from runtime.data.plan import NO_ROW, Step
from runtime.ranks.devices import enter_thread, place

DEFAULT_WAYS = "packed,hf rows,hf padded"


def speeds(load: PackedLoad, steps: Sequence[Step], ran: Ran) -> dict[int, float]:
    """Median document tokens a second, by row length."""
    tokens = load.inputs.rows.lengths
    found: dict[int, list[float]] = {}
    for step, seconds in zip(steps, ran.seconds, strict=True):
        used = sum(int(tokens[number]) for number in step.rows if number != NO_ROW)
        found.setdefault(step.bucket, []).append(used / seconds)
    return {length: statistics.median(found[length]) for length in sorted(found)}


def measure(load: PackedLoad, dtype: str, options: argparse.Namespace, results: Results) -> None:
    """Run every way in one dtype, the project's own first."""
    placement = place(options.device, dtype=dtype)
    steps = [load.inputs.plan[number] for number in range(options.steps)]
    ways = options.ways.split(",")
    first: Ran | None = None
    for way in ways:
        ran = WAYS[way](load, placement, steps)
        case = f"{load.size.name}, {dtype}, {way}"
        first = first or ran
        against = speeds(load, steps, first)
        for length, speed in speeds(load, steps, ran).items():
            ratio = None if ran is first else against[length] / speed
            results.add(f"{case}, rows of {length}", "document tokens", speed, "1/s", ratio)
        if placement.kind == "cuda":
            peak = torch.cuda.max_memory_reserved() / 2**30
            results.add(case, "peak reserved", peak, "GiB")
        if ran is first:
            results.add(case, "last loss", ran.losses[-1], "nats")
        else:
            pairs = zip(first.losses, ran.losses, strict=True)
            worst = max(abs(ours - other) / other for ours, other in pairs)
            results.add(case, f"largest difference in {len(steps)} losses", worst, "relative")
        _forget()


def _forget() -> None:
    """Let the next way begin with an empty GPU and nothing compiled."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    """Measure all ways in both dtypes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--ways", default=DEFAULT_WAYS, help=f"Of {', '.join(WAYS)}.")
    parser.add_argument("--rows", type=int, default=8, help="Rows of a step.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="benchmarks/results.csv")
    options = parser.parse_args()
    placement = place(options.device)
    enter_thread(placement.devices[0], placement.threads)
    results = Results("bench_packed", options.out, placement.kind)
    with tempfile.TemporaryDirectory() as folder:
        load = make_load(SIZES[options.size], placement, Path(folder), options.rows, options.steps)
        rows = load.inputs.rows
        full = rows.lengths.sum() / rows.buckets.sum()
        results.add(load.size.name, "tokens of documents in rows", 100 * full, "%")
        for dtype in options.dtypes.split(","):
            measure(load, dtype, options, results)


if __name__ == "__main__":
    main()
