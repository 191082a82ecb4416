"""What a command needs before it trains or evaluates: data, masks, buckets, and a fingerprint."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cache
from maskgen.entry import MaskEntry
from runtime.batches import StepPlan
from runtime.config import Config
from runtime.dataset import Dataset
from runtime.errors import ConfigError
from runtime.masks import entry_name, load_bucket

UNSHAPING: Mapping[str, tuple[str, ...]] = {
    "run": ("folder", "devices", "threads"),
    "train": ("log_every", "save_every", "keep"),
}
"""Keys that change where or how often a run reports, not what it computes."""


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
    fingerprint: str
    """SHA-256 of everything that shapes the run."""


def open_session(config: Config, config_path: str) -> Session:
    """Open the training data and the masks that it needs.

    Args:
        config: The run file.
        config_path: Its path, named in errors.

    Raises:
        DatasetError: The data folder is missing, damaged or of other settings.
        BucketMissingError: The cache lacks an entry.
        StoreNotFoundError: There is no cache.
        ConfigError: ``[masks]`` has no entry of that name, or entries disagree.
    """
    dataset = Dataset.open(config.data.folder, "train")
    train = config.train
    contexts = configured_contexts(config)
    lengths = np.asarray(dataset.lengths, dtype=np.int64)
    plan = StepPlan(lengths, bucket_of(lengths, contexts), train.global_batch, config.run.seed)
    store = cache.open_store(config.cache)
    entries = {
        context: load_bucket(store, train.masks, train.anchors, context, config_path)
        for context in plan.contexts
    }
    sizes = {int(entry.spec.params["draft_block_size"]) for entry in entries.values()}
    if len(sizes) > 1:
        raise ConfigError(
            "train.masks", train.masks, f"entries must share one draft_block_size, found {sizes}"
        )
    version = next(iter(entries.values())).version
    return Session(
        dataset=dataset,
        plan=plan,
        entries=entries,
        mask_version=version,
        draft_block_size=sizes.pop(),
        fingerprint=fingerprint(config, entries, dataset),
    )


def configured_contexts(config: Config) -> tuple[int, ...]:
    """Contexts of the run's mask entries as ``[masks]`` lists them, ascending.

    Raises:
        ConfigError: No entry has the run's name.
    """
    name = entry_name(config.train.masks, config.train.anchors, 0).partition("/")[0]
    listed = config.masks.get("entry", [])
    for item in listed:
        if item.get("name") == name:
            context = item.get("context", [])
            return tuple(sorted({int(c) for c in np.atleast_1d(context)}))
    names = ", ".join(str(item.get("name")) for item in listed) or "none"
    raise ConfigError("train.masks", name, f"must name an entry of [masks]; it has {names}")


def bucket_of(lengths: NDArray[np.int64], contexts: tuple[int, ...]) -> NDArray[np.int64]:
    """Smallest bucket of each sample; a sample over the largest is cut to it.

    Args:
        lengths: Tokens of each sample, int ``[n]``.
        contexts: Buckets, ascending.
    """
    sizes = np.asarray(contexts, dtype=np.int64)
    return sizes[np.minimum(np.searchsorted(sizes, lengths), len(sizes) - 1)]


def fingerprint(config: Config, entries: Mapping[int, MaskEntry], dataset: Dataset) -> str:
    """SHA-256 of settings, masks and data: equal when two runs compute the same."""
    settings = config.as_dict()
    shaping: dict[str, Any] = {
        section: {
            key: value
            for key, value in settings[section].items()
            if key not in UNSHAPING.get(section, ())
        }
        for section in ("run", "target", "drafter", "train")
    }
    shaping["masks"] = {str(context): entry.sha256 for context, entry in sorted(entries.items())}
    shaping["data"] = dataset.meta
    text = json.dumps(shaping, sort_keys=True, default=str)
    return cache.sha256_hex(text.encode())
