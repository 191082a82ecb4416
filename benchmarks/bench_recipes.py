"""Recipes on the same data, steps and first weights: what each makes of held-out text.

    python -m runtime.prepare --config benchmarks/configs/recipes.toml
    python -m maskgen build --config benchmarks/configs/recipes.toml
    python -m benchmarks.bench_recipes --seeds 1,2,3 --jobs 3 --out results.csv

Trains each recipe with each seed by ``runtime.train``, several at once (their times say nothing:
``bench_step`` measures steps alone), and scores each as soon as it has exported. Prints a row a
recipe: tau and overlap as means over the seeds, with 95 % intervals by bootstrap over samples, and
the difference to the first recipe, paired by sample and seed, with samples and seeds drawn anew.
Runs that are there are neither trained nor scored again; ``--report`` shows what is there alone.
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
from runtime.ranks.devices import place
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
ENDS = (0.025, 0.975)


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


class Scored:
    """The scores of runs, each beside its drafter.

    Args:
        trained: The runs.
        model: The target.
        device: Where it is read.
        dataset: Held-out samples.
    """

    def __init__(self, trained: Trained, model: str, device: str, dataset: Dataset) -> None:
        self.trained = trained
        self.model = model
        self.device = device
        self.dataset = dataset
        self._target: Target | None = None
        self._alone = threading.Lock()

    def path(self, recipe: str, seed: int) -> Path:
        """Where the scores of a run lie."""
        return self.trained.drafter(recipe, seed).parent / "scores.npy"

    def score(self, recipe: str, seed: int) -> None:
        """Score what a run has left, unless it is done."""
        path = self.path(recipe, seed)
        with self._alone:
            if path.exists():
                return
            if self._target is None:
                self._target = Target.load(self.model, device=self.device, dtype="float32")
            np.save(path, scores(self._target, self.trained.drafter(recipe, seed), self.dataset))

    def found(self, recipes: Sequence[str], seeds: Sequence[int]) -> NDArray[np.float64]:
        """``[recipes, seeds, samples, columns]`` of the seeds that all of these have."""
        common = [s for s in seeds if all(self.path(name, s).exists() for name in recipes)]
        return np.array([[np.load(self.path(name, s)) for s in common] for name in recipes])


def resampled(
    found: NDArray[np.float64], over: int, under: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """A ratio of sums, with samples drawn anew, the same of every recipe and seed.

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
    sums = np.tensordot(weights, found[..., [over, under]], axes=(1, 2))
    return np.asarray(sums[..., 0] / sums[..., 1])


MEASURES = {"tau": (0, 1), "overlap": (2, 3), "tau if drafts were sampled": (4, 1)}
"""Name -> columns of ``benchmarks.recipe_scores.COLUMNS``."""


def report(scored: Scored, names: Sequence[str], seeds: Sequence[int], results: Results) -> None:
    """Print and keep the figures of all recipes that have a seed in common with the first."""
    for measure, columns in MEASURES.items():
        for name in names:
            found = scored.found([names[0], name], seeds)
            if not found.shape[1]:
                continue
            generator = np.random.Generator(np.random.PCG64(1))
            ratios = resampled(found, *columns, generator)
            of_seeds = ratios[0, 1]
            low, high = np.quantile(ratios[1:, 1].mean(axis=1), ENDS)
            drawn = generator.integers(len(of_seeds), size=(RESAMPLES, len(of_seeds)))
            apart = ratios[:, 1] - ratios[:, 0]
            ends = np.quantile(np.take_along_axis(apart[1:], drawn, axis=1).mean(axis=1), ENDS)
            mean = of_seeds.mean()
            results.add(name, measure, mean, "", mean / ratios[0, 0].mean())
            shown = " ".join(f"{value:.3f}" for value in of_seeds)
            print(
                f"    {low:.3f} to {high:.3f}; seeds {shown}; against {names[0]} "
                f"{apart[0].mean():+.3f} ({ends[0]:+.3f} to {ends[1]:+.3f})",
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
    parser.add_argument("--report", action="store_true", help="Report what is there alone.")
    parser.add_argument("--out", default="benchmarks/results.csv")
    options = parser.parse_args()
    names = options.recipes.split(",")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    _, config = read_run(options.config, tuple(options.set))
    placement = place(config.run.devices)
    device = str(placement.devices[0])
    trained = Trained(options.config, options.set, folder)
    dataset = Dataset.open(config.data.folder, "heldout")
    scored = Scored(trained, config.target.model, device, dataset)

    def run(pair: tuple[str, int]) -> None:
        trained.train(*pair)
        scored.score(*pair)

    if not options.report:
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(run, [(name, seed) for seed in seeds for name in names]))
    report(scored, names, seeds, Results("bench_recipes", options.out, placement.kind))


if __name__ == "__main__":
    main()
