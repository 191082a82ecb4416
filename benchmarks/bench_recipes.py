"""Recipes on the same data, steps and first weights: what each makes of held-out text.

    python -m runtime.prepare --config benchmarks/configs/recipes.toml
    python -m maskgen build --config benchmarks/configs/recipes.toml
    python -m benchmarks.bench_recipes --seeds 1,2,3 --jobs 3 --out results.csv

Trains each recipe with each seed by ``runtime.train``, several at once (their times say nothing:
``bench_step`` measures steps alone), and scores what they export. Prints a row a recipe: tau and
overlap as means over the seeds, with 95 % intervals by bootstrap over samples, and the difference
to the first recipe, paired by sample and seed, with samples and seeds drawn anew. Runs that are
there are not trained again.
"""

import argparse
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.recipe_scores import scores
from benchmarks.results import Results
from runtime.data.dataset import Dataset
from runtime.methods import read_run
from runtime.target.model import Target

RECIPES: Mapping[str, Mapping[str, object]] = {
    "decay": {},
    "dpace": {"train.loss": "dpace"},
    "l1": {"train.distill": "l1"},
    "dpace l1": {"train.loss": "dpace", "train.distill": "l1"},
    "dspark": {"drafter.markov_rank": 256},
    "dspark l1": {"drafter.markov_rank": 256, "train.distill": "l1"},
    "dspark dpace l1": {
        "drafter.markov_rank": 256,
        "train.loss": "dpace",
        "train.distill": "l1",
    },
    "data anchors": {"train.anchors": "data"},
}
"""By name, what each sets beside the run file."""
RESAMPLES = 2000


class Trained:
    """The drafters of all recipes and seeds.

    Args:
        config: The run file.
        settings: Of every run, beside the recipe's.
        folder: A folder for each run, and its log beside it.
    """

    def __init__(self, config: str, settings: Sequence[str], folder: Path) -> None:
        self.config = config
        self.settings = settings
        self.folder = folder
        self._printing = threading.Lock()

    def drafter(self, recipe: str, seed: int) -> Path:
        """Where a run leaves its drafter."""
        return self.folder / f"{recipe.replace(' ', '-')}-{seed}" / "drafter"

    def train(self, recipe: str, seed: int) -> None:
        """Train one, unless it is there.

        Raises:
            SystemExit: The run failed.
        """
        run = self.drafter(recipe, seed).parent
        if (run / "drafter" / "config.json").exists():
            return
        said = {**RECIPES[recipe], "run.folder": str(run), "run.seed": seed}
        pairs = [*(f"{key}={value}" for key, value in said.items()), *self.settings]
        sets = [part for pair in pairs for part in ("--set", pair)]
        command = [sys.executable, "-m", "runtime.train", "--config", self.config, *sets]
        log = run.with_suffix(".log")
        with log.open("w") as file:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
        lines = log.read_text().splitlines()
        kept = [line for line in lines if "after freeze" in line or "best held-out" in line]
        with self._printing:
            print(f"{recipe}, seed {seed}: exit {code}; {'; '.join(kept)}", flush=True)
        if code:
            raise SystemExit("\n".join(lines[-20:]))


def intervals(
    found: NDArray[np.float64], over: int, under: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Resampled means of a ratio: samples drawn anew, the same of every recipe and seed.

    Args:
        found: ``[recipes, seeds, samples, columns]``.
        over: Column above.
        under: Column below.
        generator: Of the draws.

    Returns:
        ``[1 + RESAMPLES, recipes, seeds]``, what was found first.
    """
    samples = found.shape[2]
    counts = generator.multinomial(samples, np.full(samples, 1 / samples), size=RESAMPLES)
    weights = np.concatenate([np.ones((1, samples)), counts])
    sums = np.einsum("ws,rksc->wrkc", weights, found[..., [over, under]])
    return sums[..., 0] / sums[..., 1]


def report(
    found: NDArray[np.float64], names: Sequence[str], seeds: Sequence[int], results: Results
) -> None:
    """Print and keep the figures of all recipes; the arrays are those of ``intervals``."""
    generator = np.random.Generator(np.random.PCG64(1))
    measures = {"tau": (0, 1), "overlap": (2, 3), "tau if drafts were sampled": (4, 1)}
    for measure, columns in measures.items():
        ratios = intervals(found, *columns, generator)
        drawn = generator.integers(len(seeds), size=(RESAMPLES + 1, len(seeds)))
        drawn[0] = range(len(seeds))
        over_seeds = np.take_along_axis(ratios, drawn[:, None], axis=2).mean(axis=2)
        for index, name in enumerate(names):
            mean, alone = over_seeds[0, index], ratios[:, index].mean(axis=1)[1:]
            low, high = np.quantile(alone, (0.025, 0.975))
            change = over_seeds[:, index] - over_seeds[:, 0]
            ends = np.quantile(change[1:], (0.025, 0.975))
            of_seeds = " ".join(f"{value:.3f}" for value in ratios[0, index])
            results.add(name, measure, mean, "", mean / over_seeds[0, 0])
            print(
                f"    {low:.3f} to {high:.3f}; seeds {of_seeds}; against {names[0]} "
                f"{change[0]:+.3f} ({ends[0]:+.3f} to {ends[1]:+.3f})",
                flush=True,
            )


def main() -> None:
    """Train, score and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="benchmarks/configs/recipes.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--jobs", type=int, default=1, help="Runs at once.")
    parser.add_argument("--folder", default="runs/recipes")
    parser.add_argument("--out", default="benchmarks/results.csv")
    options = parser.parse_args()
    names = options.recipes.split(",")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    trained = Trained(options.config, options.set, folder)
    pairs = [(name, seed) for seed in seeds for name in names]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda pair: trained.train(*pair), pairs))
    _, config = read_run(options.config, tuple(options.set))
    dataset = Dataset.open(config.data.folder, "heldout")
    device = "cuda" if config.run.devices == "auto" else config.run.devices
    target = Target.load(config.target.model, device=device, dtype="float32")
    folders = [trained.drafter(name, seed) for name in names for seed in seeds]
    found = scores(target, folders, dataset)
    found = found.reshape(len(names), len(seeds), *found.shape[1:])
    np.savez_compressed(folder / "scores.npz", found=found, names=names, seeds=seeds)
    report(found, names, seeds, Results("bench_recipes", options.out, target.device.type))


if __name__ == "__main__":
    main()
