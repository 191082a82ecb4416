"""The loss of a fine-tuned model on held-out documents, before and after."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from maskgen.progress import Progress, say
from runtime.data.dataset import Dataset, open_splits
from runtime.data.folder import PREPARE
from runtime.data.prepared import check_prepared
from runtime.errors import CheckpointError, NoSamplesError
from runtime.packed.objective import summed_loss
from runtime.packed.published import AGAIN, RECORD, WRITTEN, read_record
from runtime.packed.settings import PackedConfig
from runtime.ranks.devices import enter_thread, place
from runtime.target.model import Target
from runtime.training.checkpoint import TRAIN


@dataclass(frozen=True, kw_only=True)
class PackedEvaluation:
    """See ``runtime.training.evaluation.Evaluation``."""

    documents: int
    """Held-out documents scored, each by itself."""
    predictions: int
    """Their learned tokens."""
    before: float
    """Mean cross entropy of the model that the run began with, in nats."""
    after: float
    """Of the model that it left."""
    device: str
    dtype: str

    @property
    def exact(self) -> bool:
        """There is nothing to disagree with."""
        return True

    @property
    def ends(self) -> Mapping[str, tuple[float, float]]:
        """The held-out loss."""
        return {"heldout_loss": (self.before, self.after)}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def table(self) -> str:
        """For people."""
        head = f"{self.documents} held-out documents, {self.predictions:,} predicted tokens"
        where = f"{self.device}, {self.dtype}"
        rows = f"loss (nats a token)  before {self.before:.4f}  after {self.after:.4f}"
        return f"{head} ({where})\n{rows}"


def evaluate(config: PackedConfig, folder: str | Path | None = None) -> PackedEvaluation:
    """Measure the model of a run file against the one that it began with.

    Args:
        config: The run file.
        folder: A model; the run's own if left out.

    Raises:
        CheckpointError: There is no model, or it is not as it was written.
        DatasetError: The data were prepared with another model than the run file's.
        NoSamplesError: No held-out document has a learned token.
    """
    where = Path(folder) if folder else Path(config.run.folder) / "model"
    placement = place(config.run.devices, dtype=config.target.dtype, threads=config.run.threads)
    device = placement.devices[0]
    enter_thread(device, placement.threads)
    _, heldout = open_splits(config.data.folder)
    check_prepared(config.data, heldout)
    if not where.exists():
        what = f"there is no model in {where}"
        raise CheckpointError(f"{what}; {TRAIN if folder is None else WRITTEN}")
    if (where / RECORD).exists() and read_record(where) is None:
        raise CheckpointError(f"{where} is not as it was written: {AGAIN}")
    found: list[tuple[float, int, int]] = []
    for name in (config.target.model, str(where)):
        say(f"loading model {name}")
        model = Target.load(name, device=device, dtype=placement.compute_dtype)
        if not found:
            heldout.check_target(model.digest)
        found.append(_mean_loss(model, heldout, config.evaluate.documents))
    (before, predictions, documents), (after, _, _) = found
    return PackedEvaluation(
        documents=documents,
        predictions=predictions,
        before=before,
        after=after,
        device=str(device),
        dtype=str(placement.compute_dtype).removeprefix("torch."),
    )


@torch.no_grad()
def _mean_loss(model: Target, dataset: Dataset, wanted: int) -> tuple[float, int, int]:
    total, predictions, documents = 0.0, 0, min(wanted, len(dataset))
    with Progress("evaluate", documents) as progress:
        for index in range(documents):
            sample = dataset.sample(index)
            tokens = sample.input_ids.long().to(model.device)
            learned = sample.loss_mask[1:].to(model.device).float()
            logits = model.model(tokens[None], use_cache=False).logits[0, :-1]
            total += float(summed_loss(logits, tokens[1:], learned))
            predictions += int(learned.sum())
            progress.advance()
    if not predictions:
        raise NoSamplesError(
            f"{dataset.folder} must have a held-out document with learned tokens; set "
            f"data.heldout and {PREPARE}",
            {"held-out documents": documents},
        )
    return total / predictions, predictions, documents
