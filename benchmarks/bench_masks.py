"""What masks cost on the CPU: spans and tables, beside torch's own create_block_mask.

    python -m benchmarks.bench_masks [--out benchmarks/results.csv] [--small]

Every figure is a median; ratios are taken inside one run. ``--small`` shrinks the sizes and runs
in seconds, to see that everything works.
"""

import argparse
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

import maskgen
from benchmarks.results import Results


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    """Median wall time of a call after one warm-up, in milliseconds."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def doc_ids(length: int, documents: int) -> torch.Tensor:
    """Document number of each token, int32 ``[length]``, the lengths drawn at random."""
    generator = torch.Generator().manual_seed(0)
    cuts = torch.randperm(length - 1, generator=generator)[: documents - 1] + 1
    ids = torch.zeros(length, dtype=torch.int32)
    ids[cuts] = 1
    return ids.cumsum(0, dtype=torch.int32)


def packed_documents(results: Results, length: int, documents: int) -> None:
    """Packed causal documents: our builder, torch's, and reading the spans off a mask_mod."""
    ids = doc_ids(length, documents)
    case = f"document {documents} in {length} x {length}"

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (ids[q] == ids[kv]) & (q >= kv)

    def ours() -> maskgen.BlockTables:
        return maskgen.compile_mask(maskgen.document(length, length, doc_ids=ids), 128)

    our_ms = median_ms(ours, 21)
    results.add(case, "spans + eight tables", our_ms, "ms")
    start = time.perf_counter()
    wanted = create_block_mask(mask_mod, None, None, length, length, device="cpu")
    torch_ms = (time.perf_counter() - start) * 1e3
    results.add(case, "create_block_mask, eager", torch_ms, "ms", torch_ms / our_ms)
    tables = ours()
    for counts in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        if not torch.equal(getattr(tables, counts), getattr(wanted, counts)):
            raise SystemExit(f"{case}: {counts} differs from create_block_mask")
    del wanted
    maskgen.from_mask_mod(mask_mod, Q_LEN=16, KV_LEN=16)
    start = time.perf_counter()
    spans = maskgen.from_mask_mod(mask_mod, Q_LEN=length, KV_LEN=length)
    results.add(case, "from_mask_mod", time.perf_counter() - start, "s")
    if not spans.equals(maskgen.document(length, length, doc_ids=ids)):
        raise SystemExit(f"{case}: from_mask_mod differs from the family")


def from_mask_mod_memory(results: Results, length: int, documents: int) -> None:
    """Peak memory of from_mask_mod; first of all, since the process's peak only grows."""
    ids = doc_ids(length, documents)
    maskgen.from_mask_mod(lambda b, h, q, kv: q >= kv, Q_LEN=16, KV_LEN=16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    maskgen.from_mask_mod(
        lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), Q_LEN=1024, KV_LEN=length
    )
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    case = f"document {documents} in {length} x {length}"
    results.add(case, "from_mask_mod, added peak", (after - before) / 1024, "MiB")


def huge_causal(results: Results, length: int, BLOCK_SIZE: int) -> None:
    """Causal at a million tokens: time, and peak memory against the tables' own bytes."""
    case = f"causal {length} x {length}, BLOCK_SIZE {BLOCK_SIZE}"

    def ours() -> maskgen.BlockTables:
        return maskgen.compile_mask(maskgen.causal(length, length), BLOCK_SIZE)

    results.add(case, "spans + eight tables", median_ms(ours, 5), "ms")
    spans = maskgen.causal(length, length)
    # NumPy's allocations only: the tables are torch's, and all that torch allocates.
    tracemalloc.start()
    tables = maskgen.compile_mask(spans, BLOCK_SIZE)
    peak = tables.nbytes + tracemalloc.get_traced_memory()[1] + tables.kv_indices.numel() * 2
    tracemalloc.stop()
    results.add(case, "peak memory", peak / 2**20, "MiB", peak / tables.nbytes)


def many_buckets(results: Results, buckets: int) -> None:
    """What a cache of three families over many buckets takes to compute."""

    def ours() -> None:
        for i in range(1, buckets + 1):
            length = 128 * i
            anchors = torch.arange(0, length, 16, dtype=torch.int32)[None, :32]
            anchors = torch.nn.functional.pad(anchors, (0, 32 - anchors.shape[1]))
            for spans in (
                maskgen.causal(length, length),
                maskgen.sliding_window(length, length, window=1024),
                maskgen.dflash(
                    512, length + 512, anchors=anchors.sort(1).values, draft_block_size=16
                ),
            ):
                maskgen.compile_mask(spans, 128)

    results.add(f"{buckets} buckets x 3 families", "spans + tables", median_ms(ours, 3) / 1e3, "s")


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="CSV file to append to")
    parser.add_argument("--small", action="store_true", help="small sizes, seconds only")
    options = parser.parse_args()
    results = Results("masks-cpu", options.out, "cpu")
    length = 2048 if options.small else 32768
    from_mask_mod_memory(results, length, 32)
    packed_documents(results, length, 32)
    huge_causal(results, length if options.small else 1 << 20, 512)
    many_buckets(results, 4 if options.small else 64)


if __name__ == "__main__":
    main()
