"""What became of a run's steps, and whether it may be called trained."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import Tensor

from runtime.errors import NonFiniteError, NothingLearnedError
from runtime.static.step import COUNTERS


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Of all steps of a run, those before a resume included."""

    begun: int
    learned: int
    """Changed the weights."""
    skipped: int
    """Their loss or gradient was not finite."""
    skips_in_a_row: int
    """Up to the last step."""
    worst_skips_in_a_row: int
    """Since the run was started or resumed."""

    @property
    def empty(self) -> int:
        """Steps without a supervised token."""
        return self.begun - self.learned - self.skipped

    def unlearned_lines(self) -> dict[str, str]:
        """For people: of steps that changed nothing, if there are any."""
        found = {
            "skipped": (self.skipped, "a loss or gradient that was not finite"),
            "empty": (self.empty, "no supervised token"),
        }
        return {
            name: f"{count} of the steps, which had {cause}"
            for name, (count, cause) in found.items()
            if count
        }

    def as_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)


def step_counts(state: Mapping[str, Tensor]) -> StepCounts:
    """Read them from a training state: ``step`` and ``counters`` of ``Replica.state``."""
    counters = dict(zip(COUNTERS, map(int, state["counters"][:4].tolist()), strict=False))
    return StepCounts(
        begun=counters["steps"],
        learned=int(state["step"]),
        skipped=counters["skipped"],
        skips_in_a_row=counters["skips_in_a_row"],
        worst_skips_in_a_row=counters["worst_skips_in_a_row"],
    )


def check_skips(in_a_row: int, limit: int, step: int) -> None:
    """Refuse to go on, or to call a run trained, after too many skipped steps.

    Args:
        in_a_row: The most that were skipped one after another.
        limit: ``train.max_skipped``.
        step: Finished steps.

    Raises:
        NonFiniteError: The limit is reached.
    """
    if in_a_row >= limit:
        raise NonFiniteError(
            f"{in_a_row} steps in a row had a loss or gradient that was not finite (limit "
            f"train.max_skipped = {limit}), the last about step {step}; the weights are those of "
            "the last finite step. Look for NaN in the features, or lower train.lr"
        )


def check_learned(counts: StepCounts, limit: int) -> None:
    """Refuse to call a finished run trained that is not.

    Args:
        counts: Of its steps.
        limit: ``train.max_skipped``.

    Raises:
        NonFiniteError: It was ended by too many skipped steps, at its last ones.
        NothingLearnedError: No step changed the weights.
    """
    check_skips(counts.worst_skips_in_a_row, limit, counts.begun)
    if counts.learned == 0:
        raise NothingLearnedError(
            f"nothing was learned in {counts.begun} steps, and nothing is exported: "
            f"{counts.empty} had no supervised token, {counts.skipped} a loss or gradient that "
            "was not finite. What prepare said of the data tells which tokens are supervised"
        )
