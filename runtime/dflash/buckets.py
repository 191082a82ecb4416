"""The mask entries of a drafter's run, and which of them a sample falls into."""

from maskgen.mask_spec import MaskSpec
from runtime.dflash.settings import DFlashConfig
from runtime.errors import ConfigError
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


def heldout_specs(config: DFlashConfig) -> dict[int, MaskSpec]:
    """The entries that held-out text is scored on, by context: those that take any anchors.

    Raises:
        ConfigError: ``[masks]`` has none that fit the run's.
        MaskSpecError: ``[masks]`` is wrong.
    """
    ours = run_specs(config)
    name = entries_name(config.train.masks, "data")
    try:
        found = named_specs(config, name, context_of)
    except ConfigError:
        found = {}
    fitting = {
        context: found[context]
        for context, spec in ours.items()
        if context in found and _drafts_alike(spec, found[context])
    }
    if len(fitting) < len(ours):
        raise ConfigError(
            "evaluate.every",
            config.evaluate.every,
            f"needs entries {name!r} in [masks], of kind 'parametric', with the contexts, the "
            f"draft_block_size and all other parameters of {next(iter(ours.values())).name!r} and "
            "those beside it; add them and build the masks, or set it to 0",
        )
    return fitting


def _drafts_alike(ours: MaskSpec, other: MaskSpec) -> bool:
    kinds = (other.family, other.kind)
    return kinds == (ours.family, "parametric") and ours.family_params == other.family_params
