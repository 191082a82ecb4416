"""The drill of what a run writes: ``python -m tests.runtime.drill`` prints a table, 1 on a bad row.

Right: the old or the new is found whole, nothing is lost, and the same again ends as it ought to.
Refused: as right, after a typed error. SILENT: something else is found, or something is lost.
CRASH: an untyped error.
"""

import argparse
import collections
import sys

from tests.cache.drill import table
from tests.runtime import crash
from tests.runtime.crash_cases import CASES, SHARED


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description="Kill, tear and refuse what a run writes.")
    parser.add_argument("--quick", action="store_true", help="the share that the tests run")
    options = parser.parse_args(arguments)
    stride, numbers = (4, (3,)) if options.quick else (1, (2, 3, 4, 6) * 5)
    jobs = [(what, name, stride) for what in crash.MODES for name in CASES]
    jobs += [(what, name, 2 * stride) for what in ("beside", "held") for name in SHARED]
    jobs += [("together", name, number) for name in SHARED for number in numbers]
    rows, bad = {}, []
    for (what, _, number), (counts, seconds, wrong) in zip(jobs, crash.run(jobs), strict=True):
        row = f"{number} at once" if what == "together" else ROWS[what]
        before = rows.get(row, (collections.Counter(), 0.0))
        rows[row] = (before[0] + counts, before[1] + seconds)
        bad += wrong
    print(table(rows))
    print(f"{sum(sum(counts.values()) for counts, _ in rows.values())} tried, {len(bad)} bad")
    for line in bad[:20]:
        print(f"  {line}")
    return 1 if bad else 0


ROWS = {
    "kill": "killed at each file operation",
    "tear": "killed, with a file torn",
    "fill": "the disk full from there on",
    "beside": "killed beside another process",
    "held": "held up beside another process",
}

if __name__ == "__main__":
    sys.exit(main())
