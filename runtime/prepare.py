"""``python -m runtime.prepare``: prompt files into tokenised samples that the target answered."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from maskgen.progress import say
from runtime.options import Command, config_options, devices_option, overriding

if TYPE_CHECKING:
    from runtime.data.dataset import Sample
    from runtime.dflash.settings import DFlashConfig
    from runtime.prompts.counts import Counts
    from runtime.prompts.records import Record
    from runtime.ranks.devices import Placement

RULES = 4
"""Raised whenever the rules of ``runtime.data.samples`` change what a folder holds."""
WRITTEN = {"counts", "dropped", "noted", "places", "split", "target"}
"""What ``meta.json`` must have to be shown again or divided anew."""
DROPPED = "dropped: "
"""How the rows of the closing table begin that count what was left out."""


@click.command(cls=Command)
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
    from runtime.dflash.settings import as_dflash
    from runtime.methods import read_run

    options = {"target.model": target, "run.devices": devices}
    _, config = read_run(config_path, overriding(config_path, settings, options))
    rows = prepare(as_dflash(config))
    if as_json:
        click.echo(json.dumps(rows))
    else:
        places = rows.pop("places")
        for name, value in rows.items():
            where = ", ".join(places.get(name.removeprefix(DROPPED), ()))
            click.echo(f"{name:36} {value}" + (f"  {where}" if where else ""))


def prepare(config: "DFlashConfig") -> dict[str, Any]:
    """Run the whole command.

    Returns:
        The rows of the closing table: what was kept, what was dropped by reason, and notes.

    Raises:
        ConfigError: A setting or a prompt file is wrong.
        TargetNotFoundError: The target cannot be loaded.
        NoSamplesError: Nothing is left to train on.
        SampleTooLongError: A sample is too long and ``data.too_long`` is ``refuse``.
        DatasetError: The folder holds something else than prepared data, cannot be written, or
            another process writes other data there.
        LaterFormatError: The folder holds data of a later release.
    """
    from runtime.data.dataset import read_samples
    from runtime.data.folder import check_writable, state_of
    from runtime.dflash.capabilities import Request, check_request
    from runtime.errors import NoSamplesError
    from runtime.prompts.counts import Counts
    from runtime.prompts.records import open_prompts, read_records
    from runtime.ranks.devices import place
    from runtime.target.files import find_target
    from runtime.training.inputs import run_specs
    from runtime.training.targets import fit_drafter

    # One device does all the work here, so it gets the cores that workers would share.
    device = config.run.devices.split(",")[0]
    placement = place(device, dtype=config.target.dtype, threads=config.run.threads)
    folder = Path(config.data.folder)
    split = _split_settings(config)
    request = Request(
        config=config,
        specs=run_specs(config),
        placement=placement,
        ranks=len(config.run.devices.split(",")),
        features="stored" if _stores(config, placement) else "online",
    )
    check_request(request)
    files = open_prompts(config.data.prompts)
    prompts = [file.sha256 for file in files]
    key = _key(config, placement, prompts, find_target(config.target.model).digest)
    seen = state_of(folder)
    found = _kept(folder, key)
    if found is not None and found["split"] == split:
        return _table(found, f"{folder} (up to date)")
    # Loading and answering take long: what would be refused at the end is refused now.
    check_writable(folder)
    began = time.perf_counter()
    if found is not None:
        say(f"dividing the samples of {folder} anew")
        samples, about = read_samples(folder), found
    else:
        fit_drafter(request)
        counts = Counts()
        records = read_records(files, counts)
        del files
        if not records:
            raise NoSamplesError(
                "the prompt files hold nothing to use", counts.dropped, counts.places
            )
        samples, about = _make(config, placement, prompts, records, counts)
    meta = _write(folder, samples, about, split, seen)
    return {**_table(meta, str(folder)), "seconds": round(time.perf_counter() - began, 1)}


def largest_context(config: "DFlashConfig") -> int:
    """The largest context of the run's mask entries, in tokens: the longest sample.

    Raises:
        ConfigError: ``[masks]`` has no entry of the run's name.
        MaskSpecError: ``[masks]`` is wrong.
    """
    from runtime.training.inputs import run_specs

    return max(run_specs(config))


def _split_settings(config: "DFlashConfig") -> dict[str, Any]:
    """What decides which samples are held out, as ``meta.json`` has it."""
    from runtime.errors import ConfigError

    wanted, prompts = config.data.heldout_from, config.data.prompts
    files = [*map(Path, prompts)]
    if wanted and Path(wanted) not in files:
        raise ConfigError(
            "data.heldout_from",
            wanted,
            f"must be one of data.prompts ({', '.join(prompts)}) or empty",
        )
    return {
        "seed": config.run.seed,
        "heldout": config.data.heldout,
        "heldout_from": files.index(Path(wanted)) if wanted else None,
    }


def _kept(folder: Path, key: str) -> dict[str, Any] | None:
    """The ``meta.json`` of a folder that is of this key and whole; None otherwise.

    Raises:
        DatasetError: The folder cannot be read, and holds something else than prepared data.
        LaterFormatError: It holds data of a later release.
    """
    from runtime.data.dataset import open_splits
    from runtime.data.folder import PREPARE, check_replaceable, read_meta
    from runtime.errors import DatasetError

    try:
        found = read_meta(folder)
        if found is None or found.get("key") != key or not found.keys() >= WRITTEN:
            return None
        # Another process may replace the data between two looks.
        found = dict(open_splits(folder)[0].meta)
    except DatasetError as error:
        check_replaceable(folder)
        say(f"preparing again: {str(error).removesuffix(f'; {PREPARE}')}")
        return None
    return found if found.get("key") == key and found.keys() >= WRITTEN else None


def _make(
    config: "DFlashConfig",
    placement: "Placement",
    prompts: Sequence[str],
    records: "Sequence[Record]",
    counts: "Counts",
) -> "tuple[list[Sample], dict[str, Any]]":
    """All samples of the records, and of ``meta.json`` what does not depend on the split.

    ``prompts`` are the digests of the files that the records are from.
    """
    from runtime.data.answer_store import AnswerStore
    from runtime.data.samples import SampleMaker, to_samples
    from runtime.dflash.embedding import fed_scale
    from runtime.errors import NoSamplesError
    from runtime.prompts.counts import ordered
    from runtime.prompts.template import TemplateChoice
    from runtime.ranks.devices import enter_thread
    from runtime.target.model import Target
    from runtime.training.inputs import sample_settings

    context = largest_context(config)
    enter_thread(placement.devices[0], placement.threads)
    say(f"loading target {config.target.model}")
    target = Target.load(
        config.target.model, device=placement.devices[0], dtype=placement.compute_dtype
    )
    fed_scale(target, config.drafter.embedding)
    dtype = str(placement.compute_dtype).removeprefix("torch.")
    maker = SampleMaker(
        target=target,
        data=config.data,
        context=context,
        layer_ids=target.default_layer_ids(config.target.num_features),
        store=_stores(config, placement),
        answers=AnswerStore(config.data.answers, target.digest, dtype),
        counts=counts,
    )
    drafts = maker.make(records)
    if not drafts:
        raise NoSamplesError(
            f"no sample came of {len(records)} records", counts.dropped, counts.places
        )
    return to_samples(drafts), {
        # Of a model of the hub more files may be there now than before it was loaded.
        "key": _key(config, placement, prompts, target.digest),
        "target": {"name": target.name, "digest": target.digest},
        "settings": sample_settings(config),
        "template": TemplateChoice.read(config.data.chat_template, config.data.template).as_dict(),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "layer_ids": list(maker.layer_ids),
        "features": "stored" if maker.store else "online",
        "feature_dtype": "bfloat16",
        "feature_scale": maker.feature_scale(drafts),
        "context": context,
        "counts": {"records": len(records)},
        "dropped": ordered(counts.dropped),
        "places": dict(sorted(counts.places.items())),
        "noted": ordered(counts.noted),
    }


def _write(
    folder: Path,
    samples: "Sequence[Sample]",
    about: Mapping[str, Any],
    settings: Mapping[str, Any],
    seen: str,
) -> dict[str, Any]:
    """Divide samples into train and held-out ones and write the folder; returns its meta.

    ``seen`` is what stood there when this began.
    """
    from runtime.data.dataset import write_dataset
    from runtime.data.samples import split
    from runtime.errors import NoSamplesError

    asked = settings["heldout"]
    train, heldout = split(samples, asked, settings["seed"], file=settings["heldout_from"])
    if not train:
        raise NoSamplesError(
            f"no sample is left for training: data.heldout keeps {len(heldout)} of {len(samples)} "
            "out",
            about["dropped"],
            about["places"],
        )
    missing = {"held-out samples asked for": asked} if len(heldout) < asked else {}
    meta = {
        **about,
        "split": dict(settings),
        "counts": {
            "records": about["counts"]["records"],
            "train samples": len(train),
            "held-out samples": len(heldout),
            **missing,
            "train tokens": sum(sample.input_ids.numel() for sample in train),
            "train supervised tokens": sum(int(sample.loss_mask.sum()) for sample in train),
        },
    }
    return write_dataset(folder, {"train": train, "heldout": heldout}, meta, seen)


def _key(
    config: "DFlashConfig", placement: "Placement", prompts: Sequence[str], target_digest: str
) -> str:
    """SHA-256 of everything that the folder's samples depend on; the split is apart.

    ``prompts`` are the digests of the files as they were read.
    """
    from runtime.prompts.template import TemplateChoice
    from runtime.training.inputs import sample_settings

    data = config.data
    document = {
        "rules": RULES,
        "prompts": list(prompts),
        "target": target_digest,
        "dtype": str(placement.compute_dtype),
        "num_features": config.target.num_features,
        "store": _stores(config, placement),
        "context": largest_context(config),
        "data": sample_settings(config),
        "template": TemplateChoice.read(data.chat_template, data.template).as_dict(),
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _stores(config: "DFlashConfig", placement: "Placement") -> bool:
    wanted = config.data.features
    return placement.kind == "cpu" if wanted == "auto" else wanted == "stored"


def _table(meta: Mapping[str, Any], folder: str) -> dict[str, Any]:
    rows: dict[str, Any] = {"folder": folder, "target": meta["target"]["name"], **meta["counts"]}
    rows |= {f"{DROPPED}{reason}": count for reason, count in meta["dropped"].items()}
    rows |= {f"noted: {what}": count for what, count in meta["noted"].items()}
    return rows | {"places": meta["places"]}


if __name__ == "__main__":
    main()
