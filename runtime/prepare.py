"""``python -m runtime.prepare``: prompt files into tokenised samples that the target answered."""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runtime.options import config_options, devices_option, reporting, with_options
from runtime.progress import say

if TYPE_CHECKING:
    from runtime.config import Config
    from runtime.devices import Placement

RULES = 2
"""Raised whenever the rules of ``runtime.samples`` change what a folder holds."""


@click.command()
@config_options
@click.option("--target", help="A folder, a .gguf file or a hub name; overrides target.model.")
@devices_option
@click.option("--json", "as_json", is_flag=True, help="Print the closing table as JSON.")
def main(
    config_path: str,
    settings: tuple[str, ...],
    target: str | None,
    devices: str | None,
    as_json: bool,
) -> None:
    """Prepare data: read prompts, let the target answer them, write tokenised samples.

    Does nothing when the folder holds just what these prompts, target and settings give, whole.
    """
    overrides = with_options(settings, {"target.model": target, "run.devices": devices})
    with reporting(config_path, overrides):
        from runtime.config import read_config

        rows = prepare(read_config(config_path, overrides))
    if as_json:
        click.echo(json.dumps(rows))
    else:
        click.echo("\n".join(f"{name:36} {value}" for name, value in rows.items()))


def prepare(config: "Config") -> dict[str, Any]:
    """Run the whole command.

    Returns:
        The rows of the closing table: what was kept, what was dropped by reason, and notes.

    Raises:
        ConfigError: A setting or a prompt file is wrong.
        TargetNotFoundError: The target cannot be loaded.
        NoSamplesError: Nothing is left to train on.
        SampleTooLongError: A sample is too long and ``data.too_long`` is ``refuse``.
        DatasetError: The folder holds something else than prepared data.
    """
    from runtime.capabilities import Request, check_request
    from runtime.dataset import check_replaceable
    from runtime.devices import enter_thread, place
    from runtime.session import run_specs
    from runtime.target_files import find_target

    # One device does all the work here, so it gets the cores that workers would share.
    device = config.run.devices.split(",")[0]
    placement = place(device, dtype=config.target.dtype, threads=config.run.threads)
    folder = Path(config.data.folder)
    _check_heldout_from(config)
    check_request(
        Request(
            config=config,
            specs=run_specs(config),
            placement=placement,
            ranks=len(config.run.devices.split(",")),
            features="stored" if _stores(config, placement) else "online",
        )
    )
    key = _key(config, placement, find_target(config.target.model).digest)
    found = _up_to_date(folder, key)
    if found is not None:
        return _table(found, f"{folder} (up to date)")
    # Loading and answering take long: what would be refused at the end is refused now.
    check_replaceable(folder)
    enter_thread(placement.devices[0], placement.threads)
    began = time.perf_counter()
    meta = _make(config, placement, folder)
    return {**_table(meta, str(folder)), "seconds": round(time.perf_counter() - began, 1)}


def largest_context(config: "Config") -> int:
    """The largest context of the run's mask entries, in tokens: the longest sample.

    Raises:
        ConfigError: ``[masks]`` has no entry of the run's name.
        MaskSpecError: ``[masks]`` is wrong.
    """
    from runtime.session import run_specs

    return max(run_specs(config))


def _check_heldout_from(config: "Config") -> None:
    from runtime.errors import ConfigError

    wanted = config.data.heldout_from
    if wanted and Path(wanted) not in map(Path, config.data.prompts):
        raise ConfigError(
            "data.heldout_from",
            wanted,
            f"must be one of data.prompts ({', '.join(config.data.prompts)}) or empty",
        )


def _up_to_date(folder: Path, key: str) -> dict[str, Any] | None:
    """The ``meta.json`` of a folder that is of this key and whole; None otherwise.

    Raises:
        DatasetError: The folder cannot be read, and holds something else than prepared data.
    """
    from runtime.dataset import PREPARE, SPLITS, Dataset, check_replaceable, read_meta
    from runtime.errors import DatasetError

    try:
        found = read_meta(folder)
        if found is None or found.get("key") != key:
            return None
        for split in SPLITS:
            Dataset.open(folder, split)
    except DatasetError as error:
        check_replaceable(folder)
        say(f"preparing again: {str(error).removesuffix(f'; {PREPARE}')}")
        return None
    return found


def _make(config: "Config", placement: "Placement", folder: Path) -> dict[str, Any]:
    from runtime.dataset import write_dataset
    from runtime.embedding import fed_scale
    from runtime.errors import ConfigError, NoSamplesError
    from runtime.samples import Counts, SampleMaker, split, to_sample
    from runtime.target import Target
    from runtime.text import read_records

    counts = Counts()
    context = largest_context(config)
    records = read_records(config.data.prompts, counts.dropped)
    if not records:
        raise NoSamplesError("the prompt files hold nothing to use", counts.dropped)
    say(f"loading target {config.target.model}")
    target = Target.load(
        config.target.model, device=placement.devices[0], dtype=placement.compute_dtype
    )
    if target.max_positions is not None and context > target.max_positions:
        raise ConfigError(
            "masks.entry.context", context, f"must be at most the target's {target.max_positions}"
        )
    fed_scale(target, config.drafter.embedding)
    maker = SampleMaker(
        target=target,
        data=config.data,
        context=context,
        layer_ids=target.default_layer_ids(config.target.num_features),
        store=_stores(config, placement),
        counts=counts,
    )
    drafts = maker.make(records)
    train, heldout = split(
        drafts, config.data.heldout, config.run.seed, heldout_from=config.data.heldout_from
    )
    if not train:
        raise NoSamplesError(
            f"no sample is left for training: {len(records)} records gave {len(drafts)} samples, "
            f"data.heldout keeps {config.data.heldout} out",
            +counts.dropped,
        )
    asked = config.data.heldout
    missing = {"held-out samples asked for": asked} if len(heldout) < asked else {}
    meta = {
        "key": _key(config, placement, target.digest),
        "target": {"name": target.name, "digest": target.digest},
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "layer_ids": list(maker.layer_ids),
        "features": "stored" if maker.store else "online",
        "feature_dtype": "bfloat16",
        "feature_scale": maker.feature_scale(train),
        "context": context,
        "seed": config.run.seed,
        "counts": {
            "records": len(records),
            "train samples": len(train),
            "held-out samples": len(heldout),
            **missing,
            "train tokens": sum(len(draft.input_ids) for draft in train),
            "train supervised tokens": sum(sum(draft.loss_mask) for draft in train),
        },
        "dropped": _sorted(counts.dropped),
        "noted": _sorted(counts.noted),
    }
    samples = {
        name: [to_sample(d) for d in of] for name, of in (("train", train), ("heldout", heldout))
    }
    write_dataset(folder, samples, meta)
    return meta


def _key(config: "Config", placement: "Placement", target_digest: str) -> str:
    """SHA-256 of everything that the folder's content depends on."""
    from runtime.errors import ConfigError

    prompts = []
    for path in map(Path, config.data.prompts):
        try:
            with path.open("rb") as stream:
                prompts.append([path.suffix, hashlib.file_digest(stream, "sha256").hexdigest()])
        except OSError as error:
            raise ConfigError(
                "data.prompts", str(path), f"must be a readable file ({error.strerror})"
            ) from error
    data = config.data
    document = {
        "rules": RULES,
        "prompts": prompts,
        "target": target_digest,
        "dtype": str(placement.compute_dtype),
        "num_features": config.target.num_features,
        "store": _stores(config, placement),
        "context": largest_context(config),
        "seed": config.run.seed,
        "data": [
            data.heldout,
            data.heldout_from,
            data.max_new_tokens,
            data.min_answer_tokens,
            data.min_distinct_4grams,
            data.too_long,
        ],
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _stores(config: "Config", placement: "Placement") -> bool:
    wanted = config.data.features
    return placement.kind == "cpu" if wanted == "auto" else wanted == "stored"


def _table(meta: Mapping[str, Any], folder: str) -> dict[str, Any]:
    rows: dict[str, Any] = {"folder": folder, "target": meta["target"]["name"], **meta["counts"]}
    rows |= {f"dropped: {reason}": count for reason, count in meta["dropped"].items()}
    return rows | {f"noted: {what}": count for what, count in meta["noted"].items()}


def _sorted(counter: Mapping[str, int]) -> dict[str, int]:
    return {reason: count for reason, count in sorted(counter.items()) if count}


if __name__ == "__main__":
    main()
