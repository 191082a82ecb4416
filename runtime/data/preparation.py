"""Prompt files into a folder of tokenised samples that the target answered.

A folder that has just what the prompts, the target and the settings make, whole, is left as it
is; one that only divides its samples otherwise is divided anew.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from maskgen.progress import say
from runtime.config import Config
from runtime.data.answer_store import AnswerStore
from runtime.data.candidate import to_samples
from runtime.data.dataset import Sample, read_samples
from runtime.data.folder import check_writable, state_of
from runtime.data.prepared import sample_settings
from runtime.data.shipped_answers import (
    ShippedAnswers,
    check_packable,
    check_shipped,
    pack_answers,
)
from runtime.data.written import kept, table, write
from runtime.errors import ConfigError, NoSamplesError
from runtime.prompts.counts import Counts, ordered
from runtime.prompts.records import Record, open_prompts, read_records
from runtime.prompts.template import TemplateChoice
from runtime.ranks.devices import Placement, enter_thread, place
from runtime.target.files import find_target
from runtime.target.model import Target

if TYPE_CHECKING:
    from runtime.data.samples import SampleMaker

RULES = 4
"""Raised whenever the rules of ``runtime.data.samples`` change what a folder holds."""


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
    layer_ids: tuple[int, ...] | None
    """Which, in order; None where they are spread by rule."""
    stores: bool
    """Whether they lie beside the samples; a run computes them otherwise."""
    fit: Callable[[], object]
    """Refuses a target by its outline, before a prompt is answered."""
    check: Callable[[Target], object]
    """Refuses a target once it is loaded."""
    last_hidden: bool = False
    """Whether the target's last hidden state is to lie beside stored features."""
    features_dtype: torch.dtype | None = None
    """What stored features are computed in; None for the target's own."""

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
        found = kept(folder, keys)
        if found is not None and found["split"] == split:
            return table(found, f"{folder} (up to date)")
        # Loading and answering take long: what would be refused at the end is refused now.
        check_shipped(self.config.data.shipped)
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
        meta = write(folder, samples, about, split, seen)
        return {**table(meta, str(folder)), "seconds": round(time.perf_counter() - began, 1)}

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
            **({"layer_ids": list(self.layer_ids)} if self.layer_ids else {}),
            "store": self.stores,
            "context": self.context,
            "data": sample_settings(self.config.data),
            "template": self._template(),
        }
        if self.stores and last_hidden:
            document["last_hidden"] = True
        if self.features_dtype is not None:
            document["features_dtype"] = str(self.features_dtype)
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def pack(self, path: Path, made_by: str) -> dict[str, Any]:
        """Answer the prompts and write the answers into a file that can be handed on.

        The data folder is left as it is.

        Args:
            path: The file, see ``runtime.data.shipped_answers``.
            made_by: The command, kept in the file's header.

        Returns:
            The lines of the closing table.

        Raises:
            ConfigError: A setting or a prompt file is wrong, or the file is there and is another's.
            TargetNotFoundError: The target cannot be loaded.
            NoSamplesError: There is nothing to answer.
            SampleTooLongError: A prompt is too long and ``data.too_long`` is ``refuse``.
            DatasetError: The file or the answers cannot be written.
        """
        check_packable(path)
        check_shipped(self.config.data.shipped)
        counts = Counts()
        records = read_records(open_prompts(self.config.data.prompts), counts)
        maker = self._maker(counts)
        prompts, answers = maker.answer(records)
        if not prompts:
            raise NoSamplesError("no prompt has to be answered", counts.dropped, counts.places)
        header = {
            "target": maker.target.digest,
            "dtype": self._dtype,
            "max_new_tokens": self.config.data.max_new_tokens,
            "made_by": made_by,
        }
        size = pack_answers(path, header, prompts, answers, maker.target.tokenizer.decode)
        return {
            "file": str(path),
            "target": maker.target.name,
            "answers": len(answers),
            "answer tokens": sum(len(answer.token_ids) for answer in answers),
            "bytes": size,
        }

    @property
    def _dtype(self) -> str:
        return str(self.placement.compute_dtype).removeprefix("torch.")

    def _maker(self, counts: Counts) -> "SampleMaker":
        """What makes the samples, with the target loaded."""
        # With transformers, which takes seconds and is not needed where all is up to date.
        from runtime.data.samples import SampleMaker

        config, placement = self.config, self.placement
        enter_thread(placement.devices[0], placement.threads)
        say(f"loading target {config.target.model}")
        target = Target.load(
            config.target.model, device=placement.devices[0], dtype=placement.compute_dtype
        )
        self.check(target)
        whose = (target.digest, self._dtype)
        return SampleMaker(
            target=target,
            data=config.data,
            context=self.context,
            layer_ids=self.layer_ids or target.default_layer_ids(self.num_features),
            store=self.stores,
            answers=AnswerStore(config.data.answers, *whose, vocab_size=target.vocab_size),
            counts=counts,
            shipped=[
                ShippedAnswers(path, *whose, vocab_size=target.vocab_size)
                for path in config.data.shipped
            ],
            last_hidden=self.stores and self.last_hidden,
            features_dtype=self.features_dtype,
        )

    def _make(
        self, prompts: Sequence[str], records: Sequence[Record], counts: Counts
    ) -> tuple[list[Sample], dict[str, Any]]:
        """All samples of the records, and of ``meta.json`` what does not depend on the split.

        ``prompts`` are the digests of the files that the records are from.
        """
        maker = self._maker(counts)
        target = maker.target
        candidates = maker.make(records)
        if not candidates:
            raise NoSamplesError(
                f"no sample came of {len(records)} records", counts.dropped, counts.places
            )
        return to_samples(candidates), {
            # Of a model of the hub more files may be there now than before it was loaded.
            "key": self._key(prompts, target.digest, self.last_hidden),
            "target": {"name": target.name, "digest": target.digest},
            "settings": sample_settings(self.config.data),
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
            **({"computed_in": str(self.features_dtype)} if self.features_dtype else {}),
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
        layer_ids=None,
        stores=False,
        fit=lambda: None,
        check=lambda target: None,
    )
