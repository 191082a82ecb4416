"""The cosines of a run, one after another, and what another ``train.steps`` does to them.

A run begins with one: warm-up, then a cosine down to ``train.min_lr_ratio`` at ``train.steps``. A
larger ``train.steps`` adds a new one, over the added steps, with a warm-up of its own (SGDR,
arXiv 1608.03983). A cosine that has begun ends where it was to end, so what was trained stays as it
is, and a run that is raised before its end is the run that is raised after it.
"""

from collections.abc import Sequence

from runtime.errors import ConfigError

Cycles = tuple[int, ...]
"""The step after which each ends, ascending; the last is the run's."""


def planned(cycles: Sequence[int], finished: int, steps: int) -> Cycles:
    """The cycles of a run that goes on to ``steps``.

    Args:
        cycles: Those of its checkpoint. Those that have not begun there are planned anew.
        finished: Steps of the checkpoint.
        steps: ``train.steps``.

    Raises:
        ConfigError: A cycle that has begun ends later.
    """
    starts = (0, *cycles)
    begun = tuple(
        end for start, end in zip(starts, cycles, strict=False) if start == 0 or start < finished
    )
    if steps < begun[-1]:
        raise ConfigError(
            "train.steps",
            steps,
            f"must be at least {begun[-1]}, where the learning rate of this run, which is at step "
            f"{finished}, comes to its end; use --fresh to start over, or another run.folder",
        )
    return begun if steps == begun[-1] else (*begun, steps)


def described(was: Sequence[int], now: Sequence[int]) -> str | None:
    """What becomes of the cycles of a checkpoint, in a line for people; None where they stay."""
    if tuple(was) == tuple(now):
        return None
    doing = "raising" if now[-1] > was[-1] else "lowering"
    begins = [*now[:-1]]
    what = f"a new cosine from step {begins[-1] + 1}" if begins else "no further cosine"
    return f"{doing} train.steps {was[-1]} -> {now[-1]}: {what}"
