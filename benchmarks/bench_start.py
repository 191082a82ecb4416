"""Seconds until a replica is ready, bucket by bucket: cold, and with what an earlier start left.

``python -m benchmarks.bench_start --size large`` (on a GPU machine). Each case is a process of its
own: cold; with the compile caches of the first on this machine; with empty caches and the first's
warm-up artifacts. The cold one also warms a second device, if there is one. On a CPU (``--size
tiny``) nothing compiles, and the script runs as a check of itself.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import Results

CASES = ("cold", "warm caches", "artifacts only")
VERSION = "0" * 64
"""Artifacts stand beside a cache, in the folder of a version's id."""


def measure(size_name: str, devices: str, folder: Path, case: str) -> dict[str, Any]:
    """Warm up and capture every bucket of every device, in this process.

    Args:
        size_name: One of ``SIZES``.
        devices: As ``run.devices``.
        folder: Where artifacts are saved (cold) or loaded from (artifacts only).
        case: One of ``CASES``.

    Returns:
        ``rows``: (what, seconds); ``hits`` and ``misses`` of Inductor's cache; ``artifacts``: what
        was loaded or saved.
    """
    import cache
    from benchmarks.workload import SIZES, build_entries, make_replica
    from runtime.ranks.collectives import Group
    from runtime.ranks.devices import enter_thread, place
    from runtime.static.artifacts import ArtifactFile, toolchain_of
    from runtime.static.compilation import size_recompile_limits
    from runtime.static.torch_internals import compile_cache_counts

    placement = place(devices)
    store = cache.open_store(str(folder / "masks.zarr"), writable=True)
    file = ArtifactFile(store, VERSION, toolchain_of(placement.devices))
    size, counted = SIZES[size_name], None
    entries = build_entries(size)
    size_recompile_limits(len(entries), len(placement.devices))
    rows = []
    if case == "artifacts only":
        began = time.perf_counter()
        counted = file.load() if file.path.exists() else None
        rows.append(("load artifacts", time.perf_counter() - began))
    for rank, device in enumerate(placement.devices):
        enter_thread(device, placement.threads)
        # Ranks that reduce nothing: the collectives are no part of what is measured here.
        group = Group(None, rank, 1, index=rank)
        replica = make_replica(size, placement, group, entries, batch=1)
        for doing in ("warm_up", "capture"):
            for context, step in replica.steps.items():
                began = time.perf_counter()
                getattr(step, doing)()
                seconds = time.perf_counter() - began
                rows.append((f"device {rank}, ctx{context}, {doing}", seconds))
        replica.teardown()
        del replica
    if case == "cold":
        began = time.perf_counter()
        counted = file.save()
        rows.append(("save artifacts", time.perf_counter() - began))
    hits, misses = compile_cache_counts()
    return {"rows": rows, "hits": hits, "misses": misses, "artifacts": str(counted or "none")}


def in_a_process(case: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run ``measure`` in a fresh process, with the caches of the case."""
    caches = folder / ("fresh" if case == "artifacts only" else "first")
    places = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    environment = {**os.environ, **{name: str(caches / at) for name, at in places.items()}}
    command = [sys.executable, "-m", "benchmarks.bench_start", "--child", case]
    command += ["--size", options.size, "--devices", options.devices, "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def default_devices() -> str:
    """Up to two GPUs, or the CPU."""
    import torch

    return ",".join(f"cuda:{n}" for n in range(min(2, torch.cuda.device_count()))) or "cpu"


def main() -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny", choices=("large", "small", "tiny"))
    parser.add_argument("--devices", help="default: two GPUs, one, or the CPU")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--keep", type=Path, help="leave the caches in this folder")
    parser.add_argument("--out", default="benchmarks/results.csv")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.devices = options.devices or default_devices()
    if options.child:
        found = measure(options.size, options.devices, options.folder, options.child)
        print(json.dumps(found))
        return
    results = Results("bench_start", options.out, options.devices.partition(":")[0])
    with tempfile.TemporaryDirectory() as name:
        for case in options.cases.split(","):
            found = in_a_process(case, options, options.keep or Path(name))
            where = f"{options.size}, {case}"
            for what, seconds in found["rows"]:
                results.add(where, what, seconds, "s")
            results.add(where, "graphs reused", found["hits"], "graphs")
            results.add(where, "graphs compiled", found["misses"], "graphs")
            print(f"{where}: artifacts {found['artifacts']}")


if __name__ == "__main__":
    main()
