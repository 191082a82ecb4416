"""Prompt files into a folder of tokenised samples that the target answered.

A folder that has just what the prompts, the target and the settings make, whole, is left as it
is; one that only divides its samples otherwise is divided anew.
"""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskgen.progress import say
from runtime.config import Config
from runtime.data.answer_store import AnswerStore
from runtime.data.candidate import to_samples
from runtime.data.dataset import Sample, open_splits, read_samples, write_dataset
from runtime.data.folder import PREPARE, check_replaceable, check_writable, read_meta, state_of
from runtime.data.prepared import sample_settings
from runtime.data.split import split
from runtime.errors import ConfigError, DatasetError, NoSamplesError
from runtime.prompts.counts import Counts, ordered
from runtime.prompts.records import Record, open_prompts, read_records
from runtime.prompts.template import TemplateChoice
from runtime.ranks.devices import Placement, enter_thread, place
from runtime.target.files import find_target
from runtime.target.model import Target

RULES = 4
"""Raised whenever the rules of ``runtime.data.samples`` change what a folder holds."""
WRITTEN = {"counts", "dropped", "noted", "places", "split", "target"}
"""What ``meta.json`` must have to be shown again or divided anew."""
DROPPED = "dropped: "
"""How the lines of the closing table begin that count what was left out."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What the samples of a run are to be."""

    config: Config
    placement: Placement
    """One device, which does all the work."""
    context: int
    """Tokens of the longest sample."""
    num_features: int
    """Decoder layers of the target whose outputs the samples have."""
    stores: bool
    """Whether they lie beside the samples; a run computes them otherwise."""
    fit: Callable[[], object]
    """Refuses a target by its outline, before a prompt is answered."""
    check: Callable[[Target], object]
    """Refuses a target once it is loaded."""
    last_hidden: bool = False
    """Whether the target's last hidden state is to lie beside stored features."""

    def run(self) -> dict[str, Any]:
        """Write the folder, or leave it as it is.

        Returns:
            The lines of the closing table: what was kept, what was dropped by reason, notes, and
            under ``places`` where what was dropped stood.

        Raises:
            ConfigError: A setting or a prompt file is wrong.
            TargetNotFoundError: The target cannot be loaded.
            NoSamplesError: Nothing is left to train on.
            SampleTooLongError: A sample is too long and ``data.too_long`` is ``refuse``.
            DatasetError: The folder holds something else than prepared data, cannot be written, or
                another process writes other data there.
            LaterFormatError: The folder holds data of a later release.
        """
        folder = Path(self.config.data.folder)
        split = self._split_settings()
        files = open_prompts(self.config.data.prompts)
        prompts = [file.sha256 for file in files]
        digest = find_target(self.config.target.model).digest
        # Data with the last hidden state serve a run that reads none just as well.
        keys = {self._key(prompts, digest, last) for last in (self.last_hidden, True)}
        seen = state_of(folder)
        found = _kept(folder, keys)
        if found is not None and found["split"] == split:
            return _table(found, f"{folder} (up to date)")
        # Loading and answering take long: what would be refused at the end is refused now.
        check_writable(folder)
        began = time.perf_counter()
        if found is not None:
            say(f"dividing the samples of {folder} anew")
            samples, about = read_samples(folder), found
        else:
            self.fit()
            counts = Counts()
            records = read_records(files, counts)
            del files
            if not records:
                raise NoSamplesError(
                    "the prompt files hold nothing to use", counts.dropped, counts.places
                )
            samples, about = self._make(prompts, records, counts)
        meta = _write(folder, samples, about, split, seen)
        return {**_table(meta, str(folder)), "seconds": round(time.perf_counter() - began, 1)}

    def _split_settings(self) -> dict[str, Any]:
        """What decides which samples are held out, as ``meta.json`` has it."""
        wanted, prompts = self.config.data.heldout_from, self.config.data.prompts
        files = [*map(Path, prompts)]
        if wanted and Path(wanted) not in files:
            raise ConfigError(
                "data.heldout_from",
                wanted,
                f"must be one of data.prompts ({', '.join(prompts)}) or empty",
            )
        return {
            "seed": self.config.run.seed,
            "heldout": self.config.data.heldout,
            "heldout_from": files.index(Path(wanted)) if wanted else None,
        }

    def _template(self) -> dict[str, Any]:
        data = self.config.data
        return TemplateChoice.read(data.chat_template, data.template).as_dict()

    def _key(self, prompts: Sequence[str], target_digest: str, last_hidden: bool) -> str:
        """SHA-256 of everything that the folder's samples depend on; the split is apart.

        ``prompts`` are the digests of the files as they were read.
        """
        document = {
            "rules": RULES,
            "prompts": list(prompts),
            "target": target_digest,
            "dtype": str(self.placement.compute_dtype),
            "num_features": self.num_features,
            "store": self.stores,
            "context": self.context,
            "data": sample_settings(self.config.data),
            "template": self._template(),
        }
        if self.stores and last_hidden:
            document["last_hidden"] = True
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def _make(
        self, prompts: Sequence[str], records: Sequence[Record], counts: Counts
    ) -> tuple[list[Sample], dict[str, Any]]:
        """All samples of the records, and of ``meta.json`` what does not depend on the split.

        ``prompts`` are the digests of the files that the records are from.
        """
        # With transformers, which takes seconds and is not needed where all is up to date.
        from runtime.data.samples import SampleMaker

        config, placement = self.config, self.placement
        enter_thread(placement.devices[0], placement.threads)
        say(f"loading target {config.target.model}")
        target = Target.load(
            config.target.model, device=placement.devices[0], dtype=placement.compute_dtype
        )
        self.check(target)
        dtype = str(placement.compute_dtype).removeprefix("torch.")
        maker = SampleMaker(
            target=target,
            data=config.data,
            context=self.context,
            layer_ids=target.default_layer_ids(self.num_features),
            store=self.stores,
            answers=AnswerStore(config.data.answers, target.digest, dtype),
            counts=counts,
            last_hidden=self.stores and self.last_hidden,
        )
        candidates = maker.make(records)
        if not candidates:
            raise NoSamplesError(
                f"no sample came of {len(records)} records", counts.dropped, counts.places
            )
        return to_samples(candidates), {
            # Of a model of the hub more files may be there now than before it was loaded.
            "key": self._key(prompts, target.digest, self.last_hidden),
            "target": {"name": target.name, "digest": target.digest},
            "settings": sample_settings(config.data),
            "template": self._template(),
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "layer_ids": list(maker.layer_ids),
            "features": "stored" if maker.store else "online",
            "feature_dtype": "bfloat16",
            "feature_scale": maker.feature_scale(candidates),
            "context": self.context,
            "counts": {"records": len(records)},
            "dropped": ordered(counts.dropped),
            "places": dict(sorted(counts.places.items())),
            "noted": ordered(counts.noted),
            **({"stored_layer_ids": list(maker.stored_layer_ids)} if maker.last_hidden else {}),
        }


def tokens_only(config: Config, context: int) -> Preparation:
    """Samples of tokens, without features of the target; the first device makes them.

    Args:
        config: The run file.
        context: Tokens of the longest sample.

    Raises:
        ConfigError: There is no such device.
    """
    # One device does all the work here, so it gets the cores that workers would share.
    device = config.run.devices.split(",")[0]
    return Preparation(
        config=config,
        placement=place(device, dtype=config.target.dtype, threads=config.run.threads),
        context=context,
        num_features=0,
        stores=False,
        fit=lambda: None,
        check=lambda target: None,
    )


def _kept(folder: Path, keys: Collection[str]) -> dict[str, Any] | None:
    """The ``meta.json`` of a folder that is of one of these keys and whole; None otherwise.

    Raises:
        DatasetError: The folder cannot be read, and holds something else than prepared data.
        LaterFormatError: It holds data of a later release.
    """
    try:
        found = read_meta(folder)
        if found is None or found.get("key") not in keys or not found.keys() >= WRITTEN:
            return None
        # Another process may replace the data between two looks.
        found = dict(open_splits(folder)[0].meta)
    except DatasetError as error:
        check_replaceable(folder)
        say(f"preparing again: {str(error).removesuffix(f'; {PREPARE}')}")
        return None
    return found if found.get("key") in keys and found.keys() >= WRITTEN else None


def _write(
    folder: Path,
    samples: Sequence[Sample],
    about: Mapping[str, Any],
    settings: Mapping[str, Any],
    seen: str,
) -> dict[str, Any]:
    """Divide samples into train and held-out ones and write the folder; returns its meta.

    ``seen`` is what stood there when this began.
    """
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


def _table(meta: Mapping[str, Any], folder: str) -> dict[str, Any]:
    lines: dict[str, Any] = {"folder": folder, "target": meta["target"]["name"], **meta["counts"]}
    lines |= {f"{DROPPED}{reason}": count for reason, count in meta["dropped"].items()}
    lines |= {f"noted: {what}": count for what, count in meta["noted"].items()}
    return lines | {"places": meta["places"]}
