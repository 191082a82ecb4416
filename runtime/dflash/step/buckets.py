"""The mask entries of a drafter's run, and which of them a sample falls into."""

from typing import Any

from maskgen.families.dflash_rules import layer_rule
from maskgen.mask_spec import MaskSpec
from runtime.dflash.settings import STARTS, DFlashConfig
from runtime.dflash.start.beginning import layers_of
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


def sliding_specs(config: DFlashConfig, *, heldout: bool = False) -> dict[int, MaskSpec]:
    """The entries of the sliding layers by context: none where no layer slides.

    Args:
        config: The run file.
        heldout: Of those that held-out text is scored on.

    Raises:
        ConfigError: ``[masks]`` has none that are the others' but for the layer, or the window is
            smaller than a draft block.
        MaskSpecError: ``[masks]`` is wrong.
    """
    layers, window = layers_of(config)
    if window is None:
        return {}
    full = heldout_specs(config) if heldout else run_specs(config)
    anchors = "data" if heldout else config.train.anchors
    name = entries_name(f"{config.train.masks}-sliding", anchors)
    try:
        found = named_specs(config, name, context_of)
    except ConfigError:
        found = {}
    for context, spec in full.items():
        size = int(spec.params["draft_block_size"])
        if window < size:
            rule = f"must be at least draft_block_size = {size}"
            raise ConfigError("drafter.sliding_window", window, rule)
        wrong = _not_its_twin(spec, found.get(context), window)
        if wrong is not None:
            own = spec.name.rpartition("/")[0]
            init = config.drafter.init
            said_by = "drafter.sliding_window" if init in STARTS else f"of the drafter in {init}"
            drawn_as = f", drawn_as = {own!r}" if spec.kind == "layouts" else ""
            raise ConfigError(
                "drafter.layers",
                list(layers),
                f"needs entries {name!r} in [masks] that are {own!r} but for layer = 'sliding', "
                f"window = {window} ({said_by}){drawn_as}; {wrong}",
            )
    return {context: found[context] for context in full}


def _not_its_twin(full: MaskSpec, sliding: MaskSpec | None, window: int) -> str | None:
    """What keeps an entry from being the sliding one beside a full one."""
    if sliding is None:
        return f"there is none of the size of {full.name!r}: add it and build the masks"
    ours, theirs = _compared(full), _compared(sliding)
    ours |= {"layer": "sliding", "window": window}
    if full.kind == "layouts":
        ours["drawn_as"] = full.digest
    for key in {**ours, **theirs}:
        if ours.get(key) != theirs.get(key):
            if key == "drawn_as":
                return f"drawn_as must name {full.name.rpartition('/')[0]!r}"
            return f"{key} must be {ours.get(key)}, and is {theirs.get(key)}"
    rule = layer_rule("sliding", sliding.params["in_block"], sliding.params["convention"])
    served = layer_rule("sliding", "default", "sglang")
    if (rule.moves, rule.causal) != (served.moves, served.causal):
        return "convention must be sglang or vllm, whose masks are served, and in_block left out"
    return None


def _compared(spec: MaskSpec) -> dict[str, Any]:
    said = spec.to_json()
    params = {k: v for k, v in said.pop("params").items() if k not in ("in_block", "convention")}
    return {**said, **params}


def _drafts_alike(ours: MaskSpec, other: MaskSpec) -> bool:
    kinds = (other.family, other.kind)
    return kinds == (ours.family, "parametric") and ours.family_params == other.family_params
