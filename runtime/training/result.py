"""How a run ended."""

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.ranks.devices import Placement
from runtime.static.freeze import FreezeGuard
from runtime.training.outcome import StepCounts


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended."""

    steps: int
    """Finished steps, those of an earlier part included."""
    summary: str
    """The after-freeze line."""
    seconds: float
    """From freeze to the last step."""
    rates: Mapping[str, str]
    """For people: thread -> how fast it was and what it waited for."""
    signal: signal.Signals | None
    """What stopped it early, if anything did."""
    counts: StepCounts
    """What became of the steps."""
    scores: Mapping[str, str]
    """For people: the held-out scores, and what they cost; empty where there were none."""


def nothing_run(counts: StepCounts, placement: Placement) -> RunResult:
    """The result of a run that was finished before."""
    summary = FreezeGuard().summary(0, 0, eager=placement.kind == "cpu")
    return RunResult(
        steps=counts.begun,
        summary=summary,
        seconds=0.0,
        rates={},
        signal=None,
        counts=counts,
        scores={},
    )
