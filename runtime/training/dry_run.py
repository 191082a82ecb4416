"""What a run will be, before it starts: steps, padding, memory, graphs, and time where it is known.

No weights are read, nothing is compiled and nothing is written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cache
from cache.errors import StoreNotFoundError
from maskgen.entry import MaskEntry
from runtime.config import Config
from runtime.data.plan import StepPlan
from runtime.errors import BucketMissingError, DatasetError, TrainingError
from runtime.ranks.devices import Placement, place
from runtime.shaping import shaping_settings
from runtime.static.attention import backend_of
from runtime.static.masks import BucketMasks
from runtime.static.optimizer import flat_size
from runtime.training.differences import differing
from runtime.training.entries import load_buckets
from runtime.training.inputs import Rows, open_data
from runtime.training.method import Method
from runtime.training.parts import Parts, parameters_of
from runtime.training.past_run import read_past_run
from runtime.training.replica import rows_of_rank
from runtime.training.run_folder import RUN_FILE
from runtime.training.targets import place_targets
from runtime.training.wanted_masks import WantedMasks, wanted_masks

FP32 = 4
"""Bytes of a number."""


@dataclass(frozen=True, kw_only=True)
class BucketUse:
    """What falls into one bucket in a pass over the data."""

    length: int
    """Tokens of a row."""
    rows: int
    padding: float
    """Share of the rows' tokens that is padding."""
    steps: int
    """Of an epoch."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What is known of a run; sizes are in bytes, on each of its devices."""

    devices: tuple[str, ...]
    dtype: str
    rows_a_device: int
    """Of a micro-batch."""
    steps: int
    buckets: Sequence[BucketUse]
    """In use, ascending; empty where there are no prepared data."""
    samples: int | None
    padding: float | None
    steps_an_epoch: int | None
    empty_rows: int | None
    """Of an epoch: what fills up the last step of each bucket."""
    epochs: float | None
    parameters: Mapping[str, int]
    """Trained ones by part."""
    memory: Mapping[str, int]
    """On each device that trains."""
    memory_apart: Mapping[str, int]
    """On each device of ``run.target_devices``."""
    graphs: int
    """Captured on each device."""
    compiled: tuple[str, ...]
    step_ms: float | None
    """Median of the intervals that the run folder's metrics.jsonl has."""
    unknown: Sequence[str]
    """What is not known, and why; a sentence each."""

    @property
    def seconds(self) -> float | None:
        """Of all steps."""
        return None if self.step_ms is None else self.steps * self.step_ms / 1e3

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "seconds": self.seconds}


def dry_run(method: Method[Any], config: Config, config_path: str) -> DryRun:
    """Work out what a run of one process will be.

    Args:
        method: What kind of training.
        config: The run file.
        config_path: Its path, named in what is said.

    Raises:
        ConfigError: The run would be refused, too.
        DeviceUnavailableError: A GPU is asked for that is not there.
        TargetNotFoundError: The target cannot be found or read.
    """
    masks = wanted_masks(method, config)
    placement = place(config.run.devices, dtype=config.target.dtype, threads=config.run.threads)
    place_targets(config, placement, (0, 1))
    ranks = len(placement.devices)
    method.check(config, placement, ranks)
    unknown: list[str] = []
    dataset, rows = None, None
    try:
        dataset = open_data(config, max(masks.specs))
        method.check(config, placement, ranks, dataset)
        rows = method.rows(config, dataset, tuple(masks.specs))
    except DatasetError as error:
        unknown.append(f"buckets, padding and epochs: {error}")
    plan = None
    if rows is not None:
        plan = StepPlan(rows.lengths, rows.buckets, config.train.global_batch, config.run.seed)
    lengths = plan.buckets if plan is not None else tuple(masks.specs)
    parts = method.parts(config, placement, dataset)
    memory: dict[str, int] = {}
    if parts is None:
        unknown.append(f"parameters and their memory: the method {method.name} does not say")
    else:
        memory |= _memory(parts, placement.compute_dtype)
    batch = rows_of_rank(config.train, ranks)
    try:
        entries = _entries(masks, config, lengths, config_path)
        memory["masks"] = sum(_mask_bytes(entry, batch, placement) for entry in entries)
    except (BucketMissingError, StoreNotFoundError) as error:
        unknown.append(f"memory of the masks: {error}")
    unknown.append("memory of activations, of the compilers' workspaces and of the input slots")
    step_ms, why = _time(config)
    unknown += why
    on_gpu = placement.kind == "cuda"
    captured = len(lengths) * (2 if config.train.accumulate > 1 else 1) + len(masks.heldout)
    itemsize = placement.compute_dtype.itemsize
    return DryRun(
        devices=tuple(map(str, placement.devices)),
        dtype=str(placement.compute_dtype).removeprefix("torch."),
        rows_a_device=batch,
        steps=config.train.steps,
        buckets=[] if rows is None else list(_uses(rows, config.train.global_batch)),
        samples=None if dataset is None else len(dataset),
        padding=None if rows is None else _padding(rows.lengths, rows.buckets),
        steps_an_epoch=None if plan is None else plan.steps_per_epoch,
        empty_rows=(
            None
            if plan is None or rows is None
            else plan.steps_per_epoch * config.train.global_batch - len(rows.lengths)
        ),
        epochs=None if plan is None else config.train.steps / plan.steps_per_epoch,
        parameters={} if parts is None else parameters_of(parts.trained),
        memory=memory,
        memory_apart={} if parts is None else _sized(parts.apart, itemsize),
        graphs=captured if on_gpu else 0,
        compiled=parts.compiled if parts is not None and on_gpu else (),
        step_ms=step_ms,
        unknown=unknown,
    )


def _memory(parts: Parts, dtype: torch.dtype) -> dict[str, int]:
    size = flat_size(parts.trained)
    found = {"fp32 weights": size * FP32, "fp32 gradients": size * FP32}
    found["moments"] = 2 * size * FP32
    if dtype != torch.float32:
        # Else the masters are what is computed with.
        found[f"{str(dtype).removeprefix('torch.')} weights"] = size * dtype.itemsize
    frozen = _sized(parts.frozen, dtype.itemsize)
    return found | {f"frozen {name}": count for name, count in frozen.items()}


def _sized(parameters: Mapping[str, int], itemsize: int) -> dict[str, int]:
    return {name: count * itemsize for name, count in parameters.items()}


def _entries(
    masks: WantedMasks, config: Config, lengths: Sequence[int], config_path: str
) -> list[MaskEntry]:
    store = cache.open_store(config.cache)
    asked = [({length: masks.specs[length] for length in lengths}, masks.beside)]
    if masks.heldout:
        asked.append((dict(masks.heldout), masks.heldout_beside))
    found: list[MaskEntry] = []
    for specs, beside in asked:
        entries, more = load_buckets(store, specs, beside, config_path)
        found += entries.values()
        found += [entry for by_length in more.values() for entry in by_length.values()]
    return found


def _mask_bytes(entry: MaskEntry, batch: int, placement: Placement) -> int:
    # What a batch says of a parametric mask is a few numbers a row.
    shapes: dict[str, tuple[int, ...]] | None = {} if entry.kind == "parametric" else None
    backend = backend_of(placement.devices[0])
    return BucketMasks(entry, batch, torch.device("meta"), shapes, backend=backend).nbytes


def _uses(rows: Rows, global_batch: int) -> Iterator[BucketUse]:
    for length in np.unique(rows.buckets):
        tokens = rows.lengths[rows.buckets == length]
        yield BucketUse(
            length=int(length),
            rows=len(tokens),
            padding=_padding(tokens, np.full_like(tokens, length)),
            steps=-(-len(tokens) // global_batch),
        )


def _padding(lengths: Any, buckets: Any) -> float:
    return 1.0 - float(lengths.sum()) / float(buckets.sum())


def _time(config: Config) -> tuple[float | None, list[str]]:
    """The time of a step as the run folder has it, and what is not known or has changed since."""
    folder = Path(config.run.folder)
    if not (folder / RUN_FILE).exists():
        return None, [f"time of a step: {folder} has no run yet"]
    try:
        past = read_past_run(folder)
        was = shaping_settings(past.config, type(config))
    except (TrainingError, LookupError) as error:
        return None, [f"time of a step: {error}"]
    step_ms = past.usual("step_ms")
    if step_ms is None:
        return None, [f"time of a step: {folder} has no metrics"]
    now = shaping_settings(config.as_dict(), type(config))
    for settings, section in ((was, past.config), (now, config.as_dict())):
        settings["run"] = {**settings["run"], "devices": section["run"].get("devices")}
        settings["train"] = {**settings["train"], "steps": None}
    changed = [name for name, *_ in differing("", was, now)]
    note = f"time of a step after a change: it was measured with another {', '.join(changed)}"
    return step_ms, [note] if changed else []
