"""What a run file of packed fine-tuning says beside ``runtime.config``."""

from dataclasses import dataclass, field

from runtime.config import Config, EvaluateConfig, TrainConfig
from runtime.rules import UNSHAPING, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedOptions:
    """``[packed]``: how documents share a row."""

    max_documents: int = setting(32, at_least=1, at_most=65536)
    """Most documents of a row; the mask's tables have room for so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTrain(TrainConfig):
    """``[train]``: the optimisation, in rows of documents."""

    masks: str = "packed"
    """Entry prefix of the document masks, one a row length."""
    lr: float = setting(2e-5, above=0)
    """Peak learning rate, reached after the warm-up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedEvaluate(EvaluateConfig):
    """``[evaluate]``: the loss on held-out documents."""

    documents: int = setting(256, at_least=1)
    """Held-out documents used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedConfig(Config):
    """A whole run file. ``[target] model`` is the model that is trained."""

    packed: PackedOptions = field(default_factory=PackedOptions)
    train: PackedTrain = field(default_factory=PackedTrain)
    evaluate: PackedEvaluate = field(default_factory=PackedEvaluate, metadata=UNSHAPING)
