"""Compose sums with worked answers, short and long: documents for configs/packed.toml.

    python examples/compose_sums.py --count 400 examples/sums.jsonl

The numbers are drawn by counter, so the same count gives the same file anywhere.
"""

import argparse
import json
from pathlib import Path

import numpy as np

ASKED = (
    "Add {} step by step.",
    "What is the sum of {}?",
    "Somebody counts {} apples in the baskets of a market. How many are there?",
    "A walker covers {} miles, one day after another. How far does the walk go?",
)


def record(number: int) -> dict[str, str]:
    """A question and its answer: 2 numbers mostly, up to 14 at times."""
    generator = np.random.default_rng(number)
    count = 2 + min(int(generator.geometric(0.3)) - 1, 12)
    values = generator.integers(1, 60, count).tolist()
    listed = f"{', '.join(map(str, values[:-1]))} and {values[-1]}"
    question = ASKED[generator.integers(len(ASKED))].format(listed)
    total, steps = values[0], []
    for value in values[1:]:
        steps.append(f"{total} + {value} = {total + value}.")
        total += value
    return {"prompt": question, "answer": f"{' '.join(steps)} So the sum is {total}."}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("path", type=Path)
    options = parser.parse_args()
    lines = (json.dumps(record(number)) for number in range(options.count))
    options.path.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
