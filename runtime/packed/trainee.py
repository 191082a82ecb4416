"""A causal LM in training on packed documents."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maskgen.entry import MaskEntry
from runtime.errors import SampleTooLongError
from runtime.packed.model import backward_stages, compile_layers, layers_path, trainable
from runtime.packed.objective import SUMS, LossOf, PackedObjective, summed_loss
from runtime.packed.packing import PackedRows
from runtime.packed.published import save_model
from runtime.packed.settings import PackedConfig
from runtime.static.attention import Backend
from runtime.static.masks import BucketMasks
from runtime.target.model import Target
from runtime.training.inputs import Inputs
from runtime.training.method import Trainee


class PackedTrainee(Trainee):
    """A Hugging Face causal LM as a ``Trainee``.

    Args:
        config: The run file.
        inputs: Data and masks.
        target: The model, in float32 on the CPU.
    """

    sums = SUMS

    def __init__(self, *, config: PackedConfig, inputs: Inputs, target: Target) -> None:
        assert isinstance(inputs.rows, PackedRows)
        self.config = config
        self.dataset = inputs.dataset
        self.rows = inputs.rows
        self.target = target
        self.model = trainable(target)
        self.layers = layers_path(target)
        self._losses: dict[nn.Module, LossOf] = {}
        self.published: Mapping[str, Any] = {"model": target.name, "digest": target.digest}

    def module(self, device: torch.device) -> nn.Module:
        """A copy of the model on a device."""
        model: nn.Module = copy.deepcopy(self.model).to(device)
        return model

    def stages(self, module: nn.Module) -> list[list[str]]:
        """See ``backward_stages``."""
        return backward_stages(module, self.layers)

    def objective(
        self, module: nn.Module, length: int, entry: MaskEntry, batch: int, index: int
    ) -> PackedObjective:
        """The loss of one row length."""
        del index
        device = next(module.parameters()).device
        # The start of each document, of the rest of the row, and the row's end.
        offsets = self.config.packed.max_documents + 2
        masks = BucketMasks(entry, batch, device, {"doc_offsets": (offsets,)})
        if module not in self._losses:
            self._losses[module] = self._loss_on(module, masks.backend)
        loss_of = self._losses[module]
        return PackedObjective(model=module, masks=masks, length=length, loss_of=loss_of)

    def _loss_on(self, module: nn.Module, backend: Backend) -> LossOf:
        """One loss for all buckets of a device; compiled, and the layers too, where it must be."""
        if not backend.compiled:
            return summed_loss
        compile_layers(module, self.layers)
        loss: LossOf = torch.compile(summed_loss, fullgraph=True, dynamic=False)
        return loss

    def first_weights(self) -> Mapping[str, Tensor]:
        """The model's own."""
        return {name: weight.detach() for name, weight in self.model.named_parameters()}

    def fill(self, tensors: Mapping[str, Tensor], row: int, number: int, *, epoch: int) -> None:
        """Put a row's documents end to end; see ``Trainee.fill``."""
        del epoch
        length, at = tensors["input_ids"].shape[1], 0
        for order, document in enumerate(self.rows.documents[number]):
            sample = self.dataset.sample(document)
            size = len(sample.input_ids)
            if at + size > length:
                raise SampleTooLongError(
                    f"sample {document} has {size} tokens, and its row of {length} has "
                    f"{length - at} left: the data were changed since the run began; prepare them "
                    "again"
                )
            tensors["input_ids"][row, at : at + size] = sample.input_ids
            tensors["loss_mask"][row, at : at + size] = sample.loss_mask
            tensors["doc_lens"][row, order] = size
            at += size

    def export(self, folder: Path, weights: Mapping[str, Tensor], run: Mapping[str, Any]) -> None:
        """Write the model as transformers loads it."""
        save_model(folder, self.target, weights, run)
