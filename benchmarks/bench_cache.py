"""What it costs to open and verify a cache, beside other ways to keep the same masks.

    python -m benchmarks.bench_cache [--out results.csv] [--runs 30]

Caches of 64 masks are built: DFlash layouts (8.4 MB of spans), an entry each and as a bucket keeps
them, parametric masks, and static masks of five families up to 32K. Each is opened anew, every
entry is loaded and its digest checked, with the page cache warm; decoding and hashing take up to
four cores, "SHA-256 of as many bytes" is the time of one thread. Beside it: zarr with one group a
mask, safetensors and ``torch.save``, holding the spans and the eight expanded tables of the same
BlockMasks; none of the three checks a digest. Figures are of single runs in one process: the best,
and the median.
"""

import argparse
import gc
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import zarr

import cache
from benchmarks.results import Results
from maskgen import TABLE_FIELDS, to_block_mask
from maskgen.build import build
from maskgen.entry import load_entry
from maskgen.spec import read_specs

MASKS = 64
"""Masks of each cache."""

LENGTHS = (1024, 2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
FAMILIES: tuple[tuple[str, dict[str, int]], ...] = (
    ("causal", {}),
    ("sliding_window", {"window": 1024}),
    ("sink_window", {"sinks": 4, "window": 512}),
    ("chunked", {"chunk": 1024}),
    ("prefix_lm", {"prefix": 256}),
    ("sliding_window", {"window": 256}),
    ("chunked", {"chunk": 512}),
    ("prefix_lm", {"prefix": 1024}),
)


def mask_sections() -> dict[str, dict[str, Any]]:
    """The caches' [masks] sections, 64 masks each."""
    layouts = {
        "name": "dflash",
        "family": "dflash",
        "kind": "layouts",
        "context": [2048 + 128 * i for i in range(64)],
        "anchors": 512,
        "draft_block_size": 16,
        "draws": 1,
        "answer_starts": [0],
        "answer_ends": [2048],
    }
    parametric = {
        "name": "packed",
        "family": "document",
        "kind": "parametric",
        "Q_LEN": [512 * (i + 1) for i in range(64)],
    }
    pairs = [(family, params, length) for length in LENGTHS for family, params in FAMILIES]
    static = [
        {"name": f"{family}-{index}", "family": family, "Q_LEN": length, **params}
        for index, (family, params, length) in enumerate(pairs[-64:])
    ]
    bucket = layouts | {
        "context": 4096,
        "draws": 16,
        "answer_starts": [0, 512, 1024, 2048],
        "answer_ends": [4096],
    }
    return {
        "64 layouts, an entry each": {"masks": {"entry": [layouts]}},
        "64 layouts in one entry": {"masks": {"entry": [bucket]}},
        "64 parametric": {"masks": {"entry": [parametric]}},
        "64 static up to 32K": {"masks": {"entry": static}},
    }


def timed(run: Callable[[], object], runs: int) -> tuple[float, float]:
    """Best and median milliseconds; what a run made is dropped outside of its time."""
    times = []
    for _ in range(runs + 2):
        gc.collect()
        began = time.perf_counter()
        made = run()
        times.append(1e3 * (time.perf_counter() - began))
        del made
    return min(times[2:]), statistics.median(times[2:])


def open_and_verify(location: Path) -> dict[str, cache.Entry]:
    """Open a cache and load every entry, its digest checked."""
    return cache.open_store(location).load_all()


def block_masks(location: Path) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """The spans and the eight expanded tables of each mask of a cache."""
    store = cache.open_store(location)
    for name in store.version().entries:
        entry = load_entry(store, name)
        block_mask = to_block_mask(entry.tables, entry.spans)
        tensors = {"starts": entry.spans.starts, "ends": entry.spans.ends}
        for field in TABLE_FIELDS:
            tensors[field] = getattr(block_mask, field).contiguous()
        yield name, tensors


def tree_bytes(path: Path) -> int:
    """Bytes of a file, or of the files below a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def write_others(location: Path, folder: Path) -> dict[str, tuple[Path, Callable[[], object]]]:
    """Write the same masks in the other ways; how to read each."""
    masks = dict(block_masks(location))
    flat = {f"{name}/{key}": t for name, tensors in masks.items() for key, t in tensors.items()}
    saved, tensors, groups = folder / "m.pt", folder / "m.safetensors", folder / "groups.zarr"
    torch.save(masks, saved)
    safetensors.torch.save_file(flat, tensors)
    root = zarr.open_group(groups, mode="w")
    for name, values in flat.items():
        root.create_array(name, data=values.numpy())

    def read_groups() -> list[Any]:
        opened = zarr.open_group(groups, mode="r")
        return [opened[name][:] for name in flat]

    def read_tensors() -> list[torch.Tensor]:
        # The file is mapped; a sum touches every page, as a copy to the device would.
        return [t.sum() for t in safetensors.torch.load_file(tensors).values()]

    return {
        "zarr, a group a mask": (groups, read_groups),
        "safetensors": (tensors, read_tensors),
        "torch.save": (saved, lambda: torch.load(saved, weights_only=True)),
    }


def measure(case: str, section: dict[str, Any], runs: int, folder: Path, results: Results) -> None:
    """Build one cache and time it beside the others."""
    location = folder / "m.zarr"
    store = cache.open_store(location, writable=True)
    specs = read_specs(section)
    masks = sum(spec.num_layouts for spec in specs)
    if masks != MASKS:
        # A default of maskgen that moved would change the work under an unchanged label.
        raise RuntimeError(f"{case} must be {MASKS} masks, found {masks}: pin what changed")
    build(specs, store)
    raw = sum(entry.nbytes for entry in store.version().entries.values())
    results.add(case, "logical bytes", raw / 1e6, "MB")
    results.add(case, "on disk", tree_bytes(location) / 1e6, "MB")
    results.add(case, "files", len([p for p in location.rglob("*") if p.is_file()]), "files")

    def record(metric: str, run: Callable[[], object], count: int) -> float:
        best, median = timed(run, count)
        results.add(case, f"{metric}, best", best, "ms")
        results.add(case, f"{metric}, median", median, "ms")
        return best

    record("open and verify", lambda: open_and_verify(location), runs)
    record("SHA-256 of as many bytes", lambda: hashlib.sha256(bytes(raw)).digest(), runs)
    packed = folder / "m.zip"
    cache.pack(store, packed)
    results.add(case, "packed", tree_bytes(packed) / 1e6, "MB")
    record("open and verify the zip", lambda: open_and_verify(packed), runs)
    if "parametric" in case:
        return
    for name, (path, read) in write_others(location, folder).items():
        results.add(case, f"{name}, on disk", tree_bytes(path) / 1e6, "MB")
        record(name, read, 3 if "zarr" in name else runs)


def main() -> None:
    """Measure the caches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--out", help="CSV file to append rows to")
    parser.add_argument("--runs", type=int, default=30, help="runs of each figure")
    options = parser.parse_args()
    results = Results("bench_cache", options.out, "cpu")
    for case, section in mask_sections().items():
        with tempfile.TemporaryDirectory() as folder:
            measure(case, section, options.runs, Path(folder), results)


if __name__ == "__main__":
    main()
