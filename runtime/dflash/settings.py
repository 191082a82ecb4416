"""What a run file of DFlash says beside ``runtime.config``: its own keys and sections."""

from dataclasses import dataclass, field, replace

from maskgen.checks import MAX_LENGTH
from runtime.config import Config, DataConfig, EvaluateConfig, TargetConfig, TrainConfig
from runtime.dflash.network.config import LAYER_KINDS
from runtime.errors import ConfigError
from runtime.rules import UNSHAPING, setting

STARTS = ("target", "random")
"""What ``drafter.init`` may name beside a folder."""
NUM_LAYERS = 4
NUM_FEATURES = 5
SLIDING_WINDOW = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashTarget(TargetConfig):
    """``[target]``: the frozen model that the drafter drafts for."""

    num_features: int = setting(0, at_least=1)
    """Decoder layers whose outputs are fused, spread by the DFlash rule; left out, 5, or those that
    the drafter of ``drafter.init`` reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashData(DataConfig):
    """``[data]``: samples with the target's features."""

    features: str = setting("auto", one_of=("auto", "stored", "online"))
    """``stored`` beside the samples, ``online`` in the step, or ``auto``: stored on the CPU."""
    features_dtype: str = setting("target", one_of=("target", "bfloat16"))
    """What stored features, which are bfloat16, are computed in: the ``target``'s dtype, or
    ``bfloat16`` where the processor multiplies in it. Answers are always in the target's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterOptions:
    """``[drafter]``: the network's size; draft_block_size comes from the mask entries."""

    num_layers: int = setting(0, at_least=1)
    """Decoder layers; left out, 4, or those of the drafter of ``init``."""
    init: str = setting("target")
    """``target`` (its last layers), ``random``, or the folder of a published drafter, which then
    fixes the network."""
    embedding: str = setting("module", one_of=("module", "rows"))
    """What the drafter is fed: ``module``, the output of the target's embedding module, or
    ``rows``, the rows of its weight. They differ for targets that scale them, as Gemma does."""
    layers: tuple[str, ...] = setting((), newer=True)
    """``full`` or ``sliding`` for each of ``num_layers``; left out, all full, or those of the
    drafter of ``init``. Sliding layers have mask entries of their own, ``<masks>-sliding`` beside
    ``<masks>``."""
    sliding_window: int = setting(
        0, at_least=1, at_most=MAX_LENGTH, newer=True, stands_for=SLIDING_WINDOW
    )
    """Keys that a row of a sliding layer sees, itself counted; at least draft_block_size. Left out,
    2048, or the window of the drafter of ``init``."""
    markov_rank: int = setting(0, at_least=0, at_most=2**14, newer=True)
    """Rank of a Markov head, which makes a drafter DSpark's: each draft adds to the logits of the
    next slot. 256 is usual; 0 for none, DFlash."""
    confidence: bool = setting(False, newer=True)
    """Whether a head learns how likely each draft is accepted; needs ``markov_rank`` and
    ``train.distill``."""

    def __post_init__(self) -> None:
        if self.init in STARTS:
            object.__setattr__(self, "num_layers", self.num_layers or NUM_LAYERS)
            object.__setattr__(self, "sliding_window", self.sliding_window or SLIDING_WINDOW)
        known = set(self.layers) <= set(LAYER_KINDS)
        number = self.num_layers or len(self.layers)
        if self.layers and not (known and len(self.layers) == number):
            rule = (
                f"must be {' or '.join(LAYER_KINDS)} for each of drafter.num_layers = "
                f"{self.num_layers} layers, or empty"
            )
            raise ConfigError("drafter.layers", list(self.layers), rule)
        if self.confidence and not self.markov_rank:
            rule = "must be false where drafter.markov_rank is 0: it reads what that looks up"
            raise ConfigError("drafter.confidence", True, rule)

    @property
    def slides(self) -> bool:
        """Whether a layer slides."""
        return "sliding" in self.layers


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashTrain(TrainConfig):
    """``[train]``: the optimisation, and where draft blocks begin."""

    masks: str = "dflash"
    """Entry prefix for layouts; ``<masks>-data`` holds the parametric entries."""
    anchors: str = setting("layouts", one_of=("layouts", "data"))
    """``layouts`` (drawn and prebuilt offline) or ``data`` (drawn from each sample's own
    supervised tokens, tables computed in the graph)."""
    loss: str = setting("decay", one_of=("decay", "dpace"), newer=True)
    """How the slots of a draft block weigh in the loss: ``decay``, by their position, or
    ``dpace``, by what each adds now to the length that is accepted, see
    ``runtime.dflash.loss.dpace``."""
    gamma: float = setting(4.0, at_least=0)
    """With ``decay`` the weight of slot k is exp(-(k-1)/gamma); 0 weighs all alike."""
    dpace_alpha: float = setting(0.5, above=0, at_most=1, newer=True)
    """With ``dpace`` the share of a slot's weight that no doubt takes away. 1 counts the slots from
    it on, whatever is drafted; 0 is refused, since a block drafted badly would weigh nothing."""
    distill: str = setting("none", one_of=("none", "l1", "kl", "lk"), newer=True)
    """What the loss compares with the target's own distribution of each token, beside the cross
    entropy of the label: nothing, or a divergence of ``runtime.dflash.loss.distillation``."""
    distill_share: float = setting(0.9, above=0, at_most=1, newer=True)
    """The share of that in the loss; the rest is cross entropy."""

    softmax: str = setting("all", one_of=("all", "seen"), newer=True)
    """Tokens that cross entropy compares a label with: ``all``, or ``seen``, those of the training
    data and the commonest ones, which halves a step of few rows on a CPU and costs a little tau."""

    @property
    def has_teacher(self) -> bool:
        """Whether the loss reads the target's last hidden state."""
        return self.distill != "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashEvaluate(EvaluateConfig):
    """``[evaluate]``: draft-and-verify on held-out prompts, and tau while a run trains."""

    prompts: int = setting(24, at_least=1)
    """Held-out prompts used."""
    compared: int = setting(0, at_least=0)
    """Those of them that the untrained drafter and the target alone answer, too, one at a time, for
    its tau and for the speeds; 0 for all. The text of the others is compared with greedy text that
    the target writes for many at once."""
    max_new_tokens: int = setting(96, at_least=1)
    """Longest answer, in tokens."""
    confidence: float = setting(0.0, at_least=0, at_most=1)
    """A draft block is cut before the first draft that the drafter's confidence head puts below
    this; 0 never cuts. The text stays the target's own, whatever it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashConfig(Config):
    """A whole run file of DFlash."""

    target: DFlashTarget = field(default_factory=DFlashTarget)
    data: DFlashData = field(default_factory=DFlashData, metadata=UNSHAPING)
    drafter: DrafterOptions = field(default_factory=DrafterOptions)
    train: DFlashTrain = field(default_factory=DFlashTrain)
    evaluate: DFlashEvaluate = field(default_factory=DFlashEvaluate, metadata=UNSHAPING)

    def __post_init__(self) -> None:
        if self.drafter.init in STARTS:
            number = self.target.num_features or NUM_FEATURES
            object.__setattr__(self, "target", replace(self.target, num_features=number))
        if self.drafter.confidence and not self.train.has_teacher:
            rule = (
                "must be false without a teacher, whose overlap with the drafter it learns: set "
                "train.distill as well"
            )
            raise ConfigError("drafter.confidence", True, rule)
