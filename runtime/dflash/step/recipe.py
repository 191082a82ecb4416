"""A drafter's recipe: how the slots of a draft block weigh in its loss, and what they match."""

from dataclasses import dataclass

from runtime.dflash.loss.distillation import Distillation
from runtime.dflash.settings import DFlashTrain


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What the loss of a drafter is made of."""

    gamma: float = 0.0
    """Decay length in slots of weights by position; 0 weighs all alike, as D-PACE needs it."""
    dpace_alpha: float | None = None
    """Of D-PACE; None for weights by position alone."""
    distill: Distillation | None = None
    """From the target's distributions; None for cross entropy alone."""

    @property
    def has_teacher(self) -> bool:
        """Whether the loss reads the target's last hidden state."""
        return self.distill is not None


def recipe_of(train: DFlashTrain) -> Recipe:
    """The recipe that ``[train]`` asks for."""
    dpace = train.loss == "dpace"
    return Recipe(
        gamma=0.0 if dpace else train.gamma,
        dpace_alpha=train.dpace_alpha if dpace else None,
        distill=Distillation(train.distill, train.distill_share) if train.has_teacher else None,
    )
