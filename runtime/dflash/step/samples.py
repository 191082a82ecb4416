"""What training and scoring share: samples into host tensors, and a bucket's masks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from maskgen.entry import MaskEntry
from runtime.data.dataset import Dataset, Sample
from runtime.dflash.network.drafter import Drafter
from runtime.dflash.step.buckets import context_of
from runtime.errors import BucketMissingError, SampleTooLongError
from runtime.static.masks import BucketMasks

SLIDING = "sliding"
"""Name of the sliding layers' entries beside a run's own."""


def fill_sample(tensors: Mapping[str, Tensor], row: int, dataset: Dataset, number: int) -> Sample:
    """Write a sample's tokens, and its features where they come with it, into one row.

    Args:
        tensors: ``[batch, ...]`` by field name, 0 in the row.
        row: Where in the batch.
        dataset: Whose sample.
        number: Which one.

    Raises:
        SampleTooLongError: The data changed since the run began.
    """
    sample = dataset.sample(number)
    length, context = len(sample.input_ids), tensors["input_ids"].shape[1]
    if length > context:
        raise SampleTooLongError(
            f"sample {number} has {length} tokens, and its bucket holds {context}: the data "
            "were changed since the run began; prepare them again"
        )
    tensors["input_ids"][row, :length] = sample.input_ids
    tensors["loss_mask"][row, :length] = sample.loss_mask
    if sample.features is not None and "features" in tensors:
        # Without a teacher the last hidden state, which lies behind the features, is left out.
        width = tensors["features"].shape[-1]
        tensors["features"][row, :length] = sample.features[:, :width]
    return sample


def sliding_entry(
    beside: Mapping[str, Mapping[int, MaskEntry]], entry: MaskEntry
) -> MaskEntry | None:
    """The entry of the sliding layers beside a full one; None where no layer slides.

    Args:
        beside: Of ``Inputs`` or ``HeldOutInputs``.
        entry: The full one.

    Raises:
        BucketMissingError: Its layouts are others: it was built by another maskgen.
    """
    if SLIDING not in beside:
        return None
    sliding = beside[SLIDING][context_of(entry.spec)]
    for name, drawn in entry.params.items():
        if not torch.equal(sliding.params[name], drawn):
            raise BucketMissingError(
                f"mask {sliding.name!r} must have the {name} of {entry.name!r}, and has others; "
                "build both again, into another cache"
            )
    return sliding


def bucket_masks(drafter: Drafter, entry: MaskEntry, batch: int) -> BucketMasks:
    """The masks of one bucket on a drafter's device.

    Args:
        drafter: The network.
        entry: The bucket's mask.
        batch: Rows of a step.
    """
    anchors = entry.bucket.Q_LEN // drafter.config.draft_block_size
    shapes = {"anchors": (anchors,), "n_valid": ()}
    device = drafter.fc.weight.device
    return BucketMasks(entry, batch, device, None if entry.kind == "layouts" else shapes)
