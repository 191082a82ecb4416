"""The mask entries of a drafter's run, and which of them a sample falls into."""

from maskgen.mask_spec import MaskSpec
from runtime.dflash.settings import DFlashConfig
from runtime.training.entries import named_specs


def entries_name(masks: str, anchors: str) -> str:
    """Name that a run's entries share: ``dflash``, or ``dflash-data`` for data anchors."""
    return f"{masks}-data" if anchors == "data" else masks


def context_of(spec: MaskSpec) -> int:
    """Tokens of a row; the keys behind them are the draft blocks' own."""
    return spec.KV_LEN - spec.Q_LEN


def run_specs(config: DFlashConfig) -> dict[int, MaskSpec]:
    """The run's mask entries as ``[masks]`` asks for them, by context, ascending.

    Raises:
        ConfigError: No entry has the run's name, or two have one context.
        MaskSpecError: ``[masks]`` is wrong.
    """
    return named_specs(config, entries_name(config.train.masks, config.train.anchors), context_of)
