"""The damage drill: ``python -m tests.cache.drill`` prints one table and exits 1 on a bad row.

``--quick`` runs the share that the tests run. Outcomes: refused (a typed error), right (what
loads is what was published), SILENT (something else loads), CRASH (an untyped exception). A row
that cannot be tried here, such as a mount without the right to mount, says so.
"""

import argparse
import collections
import concurrent.futures
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import cache
from cache import chunk
from tests.cache import crash, fuzz
from tests.cache.damage import Drill, seeded, zip_damage
from tests.cache.samples import entries, published, truth_of


def damage_rows(scratch: Path, *, flips_a_file: int, seed: int) -> Drill:
    """Damage a store of two versions with many small chunks in every way."""
    with mock.patch.object(chunk, "MAX_CHUNK_VALUES", 24):
        folder = scratch / "m.zarr"
        store = published(folder, entries(4))
        first = store.current
        store.publish(entries(4, scale=7))
        truth = truth_of(store)
        rng = seeded(seed)
        drill = Drill(folder, truth)
        drill.flip_bits(flips_a_file, rng)
        drill.truncate()
        drill.delete()
        drill.swap()
        drill.make_foreign()
        drill.empty_links()
        cache.pack(store, scratch / "m.zip", first)
        packed = (scratch / "m.zip").read_bytes()
        for row, outcome, what in zip_damage(packed, truth, scratch, rng, flips_a_file * 10):
            drill.count(row, outcome, what)
    return drill


def table(rows) -> str:
    """Rows of counts as text."""
    columns = ("tried", "refused", "right", "SILENT", "CRASH")
    lines = [f"{'damage':42}" + "".join(f"{column:>9}" for column in columns) + f"{'s':>8}"]
    for name, (counts, seconds) in rows.items():
        tried = sum(counts.values()) - counts["untried"]
        cells = [tried, *(counts[column] for column in columns[1:])]
        lines.append(f"{name:42}" + "".join(f"{cell:>9}" for cell in cells) + f"{seconds:>8.1f}")
    return "\n".join(lines)


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description="Damage a cache in every way and count outcomes.")
    parser.add_argument("--quick", action="store_true", help="the share that the tests run")
    parser.add_argument("--seed", type=int, default=0, help="of all that is random")
    options = parser.parse_args(arguments)
    quick = options.quick
    rows = {}
    bad = []

    def timed(run):
        start = time.perf_counter()
        return run(), time.perf_counter() - start

    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        drill, seconds = timed(
            lambda: damage_rows(scratch, flips_a_file=2 if quick else 40, seed=options.seed)
        )
        share = seconds / sum(sum(counts.values()) for counts in drill.rows.values())
        rows |= {row: (counts, share * sum(counts.values())) for row, counts in drill.rows.items()}
        bad += drill.bad
        # Two at a time, on two cores; each is a process of its own.
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            parts = crash.QUICK if quick else crash.FULL
            done = list(pool.map(lambda part: timed(lambda: crash.run(*part)), parts))
        for (row, *_), ((outcomes, wrong), seconds) in zip(parts, done, strict=True):
            before = rows.get(row, (collections.Counter(), 0.0))
            rows[row] = (before[0] + outcomes, before[1] + seconds)
            bad += wrong
        fuzzed, seconds = timed(
            lambda: fuzz.run(scratch / "fuzz", 500 if quick else 10_000, options.seed)
        )
        counts = collections.Counter()
        for row, outcomes in fuzzed.rows.items():
            rows[f"fuzz: {row}"] = (outcomes, seconds * sum(outcomes.values()) / fuzzed.total)
            counts.update(outcomes)
        bad += fuzzed.bad
    print(table(rows))
    total = collections.Counter()
    for outcomes, _ in rows.values():
        total.update(outcomes)
    bad_count = total["SILENT"] + total["CRASH"] + total["another"]
    tried = sum(total.values()) - total["untried"]
    print(f"{tried} tried, {bad_count} silent or crashed")
    for line in bad[:20]:
        print(f"  {line}")
    return 1 if bad_count else 0


if __name__ == "__main__":
    sys.exit(main())
