"""What a command needs before it trains or evaluates: data, masks, buckets, and a fingerprint."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import cache
from maskgen.buckets import BucketPlan
from maskgen.entry import MaskEntry
from maskgen.mask_spec import MaskSpec
from maskgen.spec import read_specs
from runtime.config import Config, shaping_settings
from runtime.data.dataset import Dataset
from runtime.data.folder import PREPARE
from runtime.data.plan import StepPlan
from runtime.data.prepared import check_prepared
from runtime.dflash.capabilities import Request, check_request
from runtime.dflash.settings import DFlashConfig
from runtime.errors import ConfigError, DatasetError
from runtime.ranks.devices import Placement
from runtime.training.entries import entries_name, load_buckets


@dataclass(frozen=True, kw_only=True)
class Session:
    """Data and masks of a run, checked against each other."""

    dataset: Dataset
    plan: StepPlan
    entries: Mapping[int, MaskEntry]
    """Context -> entry, of every bucket that samples fall into."""
    mask_version: str
    """Id of the cache version that the entries were read from."""
    draft_block_size: int
    shaping: Mapping[str, Any]
    """What ``shaping`` gave."""
    fingerprint: str
    """SHA-256 of ``shaping``."""
    config_type: type[Config]
    """Of the run file: which settings shape a run, those of an earlier one too."""


def open_session(
    config: DFlashConfig, config_path: str, *, placement: Placement | None = None, ranks: int = 1
) -> Session:
    """Open the training data and the masks that it needs.

    Args:
        config: The run file.
        config_path: Its path, named in errors.
        placement: The drafters' devices, so that what they cannot do is refused.
        ranks: Drafters' devices of all processes.

    Raises:
        DatasetError: The data folder is missing, damaged or of other settings.
        BucketMissingError: The cache lacks an entry.
        StoreNotFoundError: There is no cache.
        ConfigError: ``[masks]`` has no entry of that name, or a row of
            ``runtime.dflash.capabilities`` applies.
    """
    train = config.train
    specs = run_specs(config)
    request = Request(config=config, specs=specs, placement=placement, ranks=ranks)
    check_request(request)
    dataset = Dataset.open(config.data.folder, "train")
    _check_features(config, dataset)
    check_prepared(config.data, dataset)
    check_request(replace(request, features=dataset.meta["features"]))
    contexts = tuple(specs)
    if dataset.meta["context"] > contexts[-1]:
        raise DatasetError(
            f"{config.data.folder} was prepared for contexts up to {dataset.meta['context']}, the "
            f"run's largest is {contexts[-1]}; {PREPARE}"
        )
    lengths = np.asarray(dataset.lengths, dtype=np.int64)
    plan = StepPlan(
        lengths, BucketPlan(contexts).buckets_of(lengths), train.global_batch, config.run.seed
    )
    store = cache.open_store(config.cache)
    entries = load_buckets(
        store, {context: specs[context] for context in plan.contexts}, config_path
    )
    first = next(iter(entries.values()))
    shapes = shaping(config, entries, dataset)
    return Session(
        dataset=dataset,
        plan=plan,
        entries=entries,
        mask_version=first.version,
        draft_block_size=int(first.spec.params["draft_block_size"]),
        shaping=shapes,
        fingerprint=cache.sha256_hex(json.dumps(shapes, sort_keys=True).encode()),
        config_type=type(config),
    )


def _check_features(config: DFlashConfig, dataset: Dataset) -> None:
    """Refuse data whose features lie elsewhere than the run file says."""
    asked, held = config.data.features, dataset.meta["features"]
    if asked not in ("auto", held):
        raise DatasetError(
            f"{dataset.folder} was prepared with data.features = {held!r}, and the run asks for "
            f"{asked!r}; {PREPARE}"
        )


def run_specs(config: DFlashConfig) -> dict[int, MaskSpec]:
    """The run's mask entries as ``[masks]`` asks for them, by context, ascending.

    Raises:
        ConfigError: No entry has the run's name, or two have one context.
        MaskSpecError: ``[masks]`` is wrong.
    """
    name = entries_name(config.train.masks, config.train.anchors)
    listed = read_specs({"masks": config.masks})
    ours = [spec for spec in listed if spec.name.rpartition("/")[0] == name]
    if not ours:
        names = ", ".join(sorted({spec.name.rpartition("/")[0] for spec in listed})) or "none"
        raise ConfigError("train.masks", name, f"must name an entry of [masks]; it has {names}")
    by_context = {spec.KV_LEN - spec.Q_LEN: spec for spec in ours}
    if len(by_context) < len(ours):
        raise ConfigError("train.masks", name, "must have one entry for each context")
    return dict(sorted(by_context.items()))


def shaping(config: Config, entries: Mapping[int, MaskEntry], dataset: Dataset) -> dict[str, Any]:
    """Settings, masks and data as JSON: equal when two runs compute the same."""
    shapes: dict[str, Any] = shaping_settings(config.as_dict(), type(config))
    shapes["masks"] = {str(context): entry.sha256 for context, entry in sorted(entries.items())}
    # Where bad lines are depends on how the prompt files are spelled, and the target may have moved
    # since; its digest stands there too.
    data = {key: value for key, value in dataset.meta.items() if key != "places"}
    shapes["data"] = {**data, "target": dataset.meta["target"]["digest"]}
    plain: dict[str, Any] = json.loads(json.dumps(shapes, default=str))
    return plain
