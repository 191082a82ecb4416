"""What a run trains on: data, masks and buckets, checked against each other, and a fingerprint."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cache
from maskgen.buckets import BucketPlan
from maskgen.entry import MaskEntry
from maskgen.mask_spec import MaskSpec
from runtime.config import Config
from runtime.data.dataset import Dataset
from runtime.data.folder import PREPARE
from runtime.data.plan import StepPlan
from runtime.data.prepared import check_prepared
from runtime.errors import DatasetError, NoSamplesError
from runtime.shaping import shaping_settings
from runtime.training.entries import load_buckets
from runtime.training.heldout import HeldOutInputs

NONE_BESIDE: Mapping[str, Mapping[int, Any]] = {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """How samples are arranged into rows, of which a step takes so many."""

    lengths: NDArray[np.int64]
    """Tokens of each row, ``[n]``."""
    buckets: NDArray[np.int64]
    """Length of the bucket of each row, ``[n]``."""


def sample_rows(dataset: Dataset, lengths: Sequence[int]) -> Rows:
    """A row for every sample, of the smallest bucket that takes it.

    Args:
        dataset: The samples.
        lengths: Of the buckets, ascending.

    Raises:
        DatasetError: A sample fits no bucket.
    """
    tokens = np.asarray(dataset.lengths, dtype=np.int64)
    return Rows(lengths=tokens, buckets=BucketPlan(tuple(lengths)).buckets_of(tokens))


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Data and masks of a run, checked against each other."""

    dataset: Dataset
    rows: Rows
    plan: StepPlan
    """Of rows."""
    entries: Mapping[int, MaskEntry]
    """Bucket length -> entry, of every bucket that rows fall into."""
    beside: Mapping[str, Mapping[int, MaskEntry]] = field(default_factory=dict)
    """Further masks of these buckets, as ``Method.specs_beside`` names them."""
    heldout: HeldOutInputs | None
    """What the run is scored on meanwhile, if it is; it shapes nothing."""
    mask_version: str
    """Id of the cache version that the entries were read from."""
    shaping: Mapping[str, Any]
    """What ``shaping`` returned."""
    fingerprint: str
    """Of ``shaping``, or of the run that ``train.steps`` raises."""
    config_type: type[Config]
    """Of the run file: which settings shape a run, those of an earlier one too."""
    began_from: Mapping[str, Any] = field(default_factory=dict)
    """What ``Method.began_from`` returned."""


def gather_inputs(
    config: Config,
    config_path: str,
    *,
    specs: Mapping[int, MaskSpec],
    dataset: Dataset,
    rows: Rows,
    heldout_specs: Mapping[int, MaskSpec],
    beside: Mapping[str, Mapping[int, MaskSpec]] = NONE_BESIDE,
    heldout_beside: Mapping[str, Mapping[int, MaskSpec]] = NONE_BESIDE,
    began_from: Mapping[str, Any] = MappingProxyType({}),
) -> Inputs:
    """Plan the steps and load the masks that they need.

    Args:
        config: The run file.
        config_path: Its path, named in errors.
        specs: Bucket length -> the run's mask entry, ascending.
        dataset: Training samples.
        rows: Made of them.
        heldout_specs: Bucket length -> entry that held-out rows are scored on; empty where the
            run is not scored.
        beside: Further entries of the buckets of ``specs``.
        heldout_beside: Those of the buckets of ``heldout_specs``.
        began_from: See ``Method.began_from``.

    Raises:
        DatasetError: The held-out split cannot be read, or is of other data.
        NoSamplesError: It is empty.
        BucketMissingError: The cache lacks an entry.
        StoreNotFoundError: There is no cache.
    """
    plan = StepPlan(rows.lengths, rows.buckets, config.train.global_batch, config.run.seed)
    store = cache.open_store(config.cache)
    needed = {length: specs[length] for length in plan.buckets}
    entries, more = load_buckets(store, needed, beside, config_path)
    shapes = shaping(config, entries, dataset, more)
    if began_from:
        shapes["began_from"] = dict(began_from["files"])
    return Inputs(
        dataset=dataset,
        rows=rows,
        plan=plan,
        entries=entries,
        beside=more,
        heldout=_heldout(dataset, heldout_specs, heldout_beside, store, config_path),
        mask_version=next(iter(entries.values())).version,
        shaping=shapes,
        fingerprint=fingerprint_of(shapes),
        config_type=type(config),
        began_from=began_from,
    )


def fingerprint_of(shapes: Mapping[str, Any], steps: int | None = None) -> str:
    """SHA-256 of what shapes a run.

    Args:
        shapes: What ``shaping`` returned.
        steps: ``train.steps`` of its first cycle, where that is another.
    """
    if steps is not None:
        shapes = {**shapes, "train": {**shapes["train"], "steps": steps}}
    return cache.sha256_hex(json.dumps(shapes, sort_keys=True).encode())


def _heldout(
    dataset: Dataset,
    specs: Mapping[int, MaskSpec],
    beside: Mapping[str, Mapping[int, MaskSpec]],
    store: cache.Store,
    config_path: str,
) -> HeldOutInputs | None:
    if not specs:
        return None
    heldout = Dataset.open(dataset.folder, "heldout")
    if heldout.meta != dataset.meta:
        raise DatasetError(f"{dataset.folder} was replaced meanwhile; run the same command again")
    if not len(heldout):
        raise NoSamplesError(
            f"{dataset.folder} must hold held-out samples to score; set data.heldout and "
            f"{PREPARE}, or set evaluate.every = 0",
            {},
        )
    entries, more = load_buckets(store, specs, beside, config_path)
    return HeldOutInputs(dataset=heldout, entries=entries, beside=more)


def open_data(config: Config, longest: int) -> Dataset:
    """Open the training samples.

    Args:
        config: The run file.
        longest: Tokens of the largest bucket.

    Raises:
        DatasetError: The data folder is missing, damaged, of other settings, or has samples that
            may be longer.
    """
    dataset = Dataset.open(config.data.folder, "train")
    check_prepared(config.data, dataset)
    if dataset.meta["context"] > longest:
        raise DatasetError(
            f"{config.data.folder} was prepared for contexts up to {dataset.meta['context']}, the "
            f"run's largest is {longest}; {PREPARE}"
        )
    return dataset


def shaping(
    config: Config,
    entries: Mapping[int, MaskEntry],
    dataset: Dataset,
    beside: Mapping[str, Mapping[int, MaskEntry]] = NONE_BESIDE,
) -> dict[str, Any]:
    """Settings, masks and data as JSON: equal when two runs compute the same."""
    shapes: dict[str, Any] = shaping_settings(config.as_dict(), type(config))
    shapes["masks"] = {str(context): entry.sha256 for context, entry in sorted(entries.items())}
    for name, more in sorted(beside.items()):
        shapes["masks"] |= {f"{name}/{length}": e.sha256 for length, e in sorted(more.items())}
    # Where bad lines are depends on how the prompt files are spelled, and the target may have moved
    # since; its digest stands there too.
    data = {key: value for key, value in dataset.meta.items() if key != "places"}
    shapes["data"] = {**data, "target": dataset.meta["target"]["digest"]}
    plain: dict[str, Any] = json.loads(json.dumps(shapes, default=str))
    return plain
