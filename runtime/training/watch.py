"""How a run does on held-out data while it trains: when it is scored, and what came of it."""

import time
from dataclasses import dataclass
from typing import Any

from runtime.config import Config
from runtime.training.heldout import HeldOut
from runtime.training.interval import ratio_interval
from runtime.training.replica import Replica


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A held-out score, with its 95 % interval over samples."""

    step: int
    """Finished steps."""
    value: float
    low: float
    high: float


class Watch:
    """Scores held-out data in the thread of rank 0, as often as the run file asks.

    Args:
        heldout: What is scored.
        config: The run file.
    """

    def __init__(self, heldout: HeldOut, config: Config) -> None:
        self.heldout = heldout
        self.config = config
        self.scores: list[Score] = []
        """Of this part of the run, in order."""
        self._seconds = 0.0

    def is_due(self, finished: int) -> bool:
        """Whether the data are scored after so many steps; after the last they are."""
        last = self.config.train.steps
        return finished % self.config.evaluate.every == 0 or finished == last

    def score(self, replica: Replica, finished: int) -> Score:
        """Score a replica that has a ``scoring``."""
        assert replica.scoring is not None
        began = time.monotonic()
        sums = replica.scoring.sums()
        over, under = sums.sum(axis=0)
        low, high = ratio_interval(sums, self.config.run.seed)
        found = Score(step=finished, value=float(over / under), low=low, high=high)
        self.scores.append(found)
        self._seconds += time.monotonic() - began
        return found

    def row(self, score: Score) -> dict[str, Any]:
        """Of ``metrics.jsonl``."""
        key = f"heldout_{self.heldout.name}"
        ends = {"heldout_low": score.low, "heldout_high": score.high}
        return {"step": score.step, key: score.value, **ends}

    def line(self, score: Score) -> str:
        """For people."""
        return f"held-out {self.heldout.name} {_said(score)}"

    def announcement(self) -> str:
        """For people, before the first step."""
        samples = len({row.sample for row in self.heldout.rows})
        return (
            f"held-out {self.heldout.name}: every {self.config.evaluate.every} steps, on "
            f"{samples} samples, with the 95 % interval by bootstrap over them"
        )

    def closing_lines(self, seconds: float) -> dict[str, str]:
        """For people: the last score, the best, and the share of a run of so many seconds."""
        if not self.scores:
            return {}
        name = self.heldout.name
        choose = max if self.heldout.more_is_better else min
        best = choose(self.scores, key=lambda score: score.value)
        share = self._seconds / max(seconds, 1e-9)
        return {
            f"held-out {name}": f"{_said(self.scores[-1])} at step {self.scores[-1].step}",
            f"best held-out {name}": f"{_said(best)} at step {best.step}",
            "scoring": f"{len(self.scores)} times, {self._seconds:.1f} s, {share:.1%} of the run",
        }


def _said(score: Score) -> str:
    return f"{score.value:.3f} ({score.low:.3f} to {score.high:.3f})"
