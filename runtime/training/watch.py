"""How a run does on held-out data while it trains: when it is scored, and what came of it."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from runtime.config import Config
from runtime.errors import ConfigError
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
        past: What ``record`` returned where this part of the run begins.
    """

    def __init__(
        self,
        heldout: HeldOut,
        config: Config,
        past: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.heldout = heldout
        self.config = config
        self.scores: list[Score] = []
        """Of this part of the run, in order."""
        self.best = Score(**past["best"]) if past else None
        """Of the whole run, the first of equals."""
        self._waited = int(past["waited"]) if past else 0
        self._seconds = 0.0

    def is_due(self, finished: int) -> bool:
        """See ``is_due``."""
        return is_due(self.config, finished)

    def is_best(self, finished: int) -> bool:
        """Whether the best score so far is that of so many steps."""
        return self.best is not None and self.best.step == finished

    @property
    def gave_up(self) -> bool:
        """Whether the run has gone on for long enough without a better score."""
        last = self.scores[-1].step if self.scores else 0
        return last < self.config.train.steps and has_given_up(self.config, self._waited)

    @property
    def spare(self) -> int | None:
        """Step whose checkpoint must stay, if one must."""
        keeps = self.config.train.export == "best"
        return self.best.step if keeps and self.best is not None else None

    def record(self, finished: int) -> dict[str, Any]:
        """What a checkpoint says of it: the score of its weights, the best so far, and the wait."""
        if self.best is None:
            return {}
        last = self.scores[-1] if self.scores else None
        merit = self._merit(last) if last is not None and last.step == finished else None
        return {"merit": merit, "best": asdict(self.best), "waited": self._waited}

    def _merit(self, score: Score) -> float:
        return score.value if self.heldout.more_is_better else -score.value

    def score(self, replica: Replica, finished: int) -> Score:
        """Score a replica that has a ``scoring``."""
        assert replica.scoring is not None
        began = time.monotonic()
        sums = replica.scoring.sums()
        over, under = sums.sum(axis=0)
        low, high = ratio_interval(sums, self.config.run.seed)
        found = Score(step=finished, value=float(over / under), low=low, high=high)
        self.scores.append(found)
        better = self.best is None or self._merit(found) > self._merit(self.best)
        self.best, self._waited = (found, 0) if better else (self.best, self._waited + 1)
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
        if not self.scores or self.best is None:
            return {}
        name, best = self.heldout.name, self.best
        share = self._seconds / max(seconds, 1e-9)
        lines = {
            f"held-out {name}": f"{_said(self.scores[-1])} at step {self.scores[-1].step}",
            f"best held-out {name}": f"{_said(best)} at step {best.step}",
            "scoring": f"{len(self.scores)} times, {self._seconds:.1f} s, {share:.1%} of the run",
        }
        if self.spare is not None:
            lines["exported"] = f"the best, that of step {self.spare}"
        if self.gave_up:
            lines["ended early"] = f"no better held-out {name} in {self._waited} scores"
        return lines


def is_due(config: Config, finished: int) -> bool:
    """Whether held-out data are scored after so many steps; after the last they are."""
    every = config.evaluate.every
    return bool(every) and (finished % every == 0 or finished == config.train.steps)


def saves_best(config: Config, finished: int) -> bool:
    """Whether the state after so many steps is saved if no score was better, see ``Watch``."""
    return config.train.export == "best" and is_due(config, finished)


def has_given_up(config: Config, waited: int) -> bool:
    """Whether a run ends after so many scores without a better one."""
    return 0 < config.evaluate.patience <= waited


def check_watch(config: Config) -> None:
    """Refuse what needs scores where none are taken.

    Raises:
        ConfigError: ``evaluate.every`` is 0, or no samples are held out for it.
    """
    if config.evaluate.every:
        if not config.data.heldout:
            rule = "needs held-out samples: set data.heldout above 0, or it to 0"
            raise ConfigError("evaluate.every", config.evaluate.every, rule)
        return
    rule = "needs evaluate.every above 0, so that there are held-out scores"
    if config.train.export == "best":
        raise ConfigError("train.export", config.train.export, rule)
    if config.evaluate.patience:
        raise ConfigError("evaluate.patience", config.evaluate.patience, rule)


def _said(score: Score) -> str:
    return f"{score.value:.3f} ({score.low:.3f} to {score.high:.3f})"
