"""A drafter in training: its network, the target's frozen parts, and how samples become rows."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maskgen.entry import MaskEntry
from maskgen.families.answer_windows import answer_windows
from runtime.dflash.folder.files import target_record
from runtime.dflash.folder.saved_drafter import FEATURE_SCALE, TARGET, save_published
from runtime.dflash.loss.head import HeadLoss
from runtime.dflash.loss.vocabulary import seen_tokens
from runtime.dflash.network.config import DrafterConfig
from runtime.dflash.network.drafter import Drafter, backward_stages
from runtime.dflash.settings import DFlashConfig
from runtime.dflash.start.beginning import layers_of
from runtime.dflash.step.anchors import LayoutChooser, draw_anchors
from runtime.dflash.step.buckets import context_of
from runtime.dflash.step.draft_bucket import DraftBucket
from runtime.dflash.step.draft_loss import loss_on_device
from runtime.dflash.step.heldout import HeldOutDrafts
from runtime.dflash.step.objective import DraftObjective
from runtime.dflash.step.recipe import recipe_of
from runtime.dflash.step.samples import fill_sample, sliding_entry
from runtime.dflash.step.sums import sum_names
from runtime.errors import ConfigError
from runtime.target.frozen import FrozenTarget
from runtime.training.inputs import Inputs
from runtime.training.method import Trainee
from runtime.training.target_worker import RemoteTarget


class DrafterTrainee(Trainee):
    """A DFlash drafter as a ``Trainee``.

    Args:
        config: The run file.
        inputs: Data and masks.
        network: The drafter's config.
        targets: Frozen parts, one for each of the process's devices.
        remote_targets: Targets on devices of their own.
        weights: To start from; on the leading process of a run that begins.
    """

    memory_hint = (
        "raise train.accumulate, or lower train.global_batch, the number of anchors, or the "
        "largest context in [masks]"
    )

    def __init__(
        self,
        *,
        config: DFlashConfig,
        inputs: Inputs,
        network: DrafterConfig,
        targets: Sequence[FrozenTarget],
        remote_targets: Sequence[RemoteTarget] = (),
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        _check_layers(config, network)
        self.config = config
        self.dataset = inputs.dataset
        self.network = network
        self.targets = targets
        self.remote_targets = remote_targets
        self.recipe = recipe_of(config.train)
        self.sums = sum_names(network, self.recipe)
        self._target = target_record(inputs.dataset.meta, inputs.began_from)
        self.published: Mapping[str, Any] = {
            **network.to_published(),
            FEATURE_SCALE: list(inputs.dataset.feature_scale),
            TARGET: self._target,
        }
        if inputs.heldout is not None:
            self.heldout = HeldOutDrafts(
                inputs.heldout,
                targets,
                network=network,
                samples=config.evaluate.samples,
            )
        self.beside = inputs.beside
        self._seen = None
        if config.train.softmax == "seen":
            self._seen = seen_tokens(inputs.dataset, network.vocab_size)
        self._weights = weights
        self._losses: dict[nn.Module, Callable[..., HeadLoss]] = {}
        self._choosers = {
            context_of(entry.spec): LayoutChooser(
                answer_windows(
                    entry.spec.params["answer_starts"], entry.spec.params["answer_ends"]
                ),
                entry.spec.params["draws"],
            )
            for entry in inputs.entries.values()
            if entry.kind == "layouts"
        }

    def module(self, device: torch.device) -> nn.Module:
        """A drafter whose weights are still to be loaded."""
        return Drafter(self.network).to(device)

    def stages(self, module: nn.Module) -> list[list[str]]:
        """See ``backward_stages``."""
        assert isinstance(module, Drafter)
        return backward_stages(module)

    def objective(
        self, module: nn.Module, length: int, entry: MaskEntry, batch: int, index: int
    ) -> DraftObjective:
        """The loss of one bucket, see ``Trainee.objective``."""
        assert isinstance(module, Drafter)
        if module not in self._losses:
            self._losses[module] = loss_on_device(module, self.recipe)
        bucket = DraftBucket(
            module,
            self.targets[index],
            entry,
            batch,
            sliding=sliding_entry(self.beside, entry),
            teacher=self.recipe.has_teacher,
        )
        return DraftObjective(bucket, self.recipe, self._losses[module], seen=self._seen)

    def first_weights(self) -> Mapping[str, Tensor]:
        """What ``initial_drafter`` made; kept no longer, since it lies on the target's device."""
        weights, self._weights = self._weights, None
        assert weights is not None, "they are made where a run begins, and taken once"
        return weights

    def fill(self, tensors: Mapping[str, Tensor], row: int, number: int, *, epoch: int) -> None:
        """Write a sample, and its layout or its anchors, into one row; see ``Trainee.fill``."""
        loss_mask = fill_sample(tensors, row, self.dataset, number).loss_mask.numpy()
        context = tensors["input_ids"].shape[1]
        key = {"seed": self.config.run.seed, "epoch": epoch, "sample": number}
        if "layout" in tensors:
            tensors["layout"][row] = self._choosers[context].choose(loss_mask, **key)
        else:
            anchors, n_valid = draw_anchors(loss_mask, tensors["anchors"].shape[1], **key)
            tensors["anchors"][row] = torch.from_numpy(anchors)
            tensors["n_valid"][row] = n_valid

    def export(self, folder: Path, weights: Mapping[str, Tensor], run: Mapping[str, Any]) -> None:
        """Write the drafter as servers read it."""
        scale = self.dataset.feature_scale
        save_published(
            folder,
            self.network,
            weights,
            feature_scale=torch.tensor(scale, dtype=torch.float32, device="cpu"),
            target=self._target,
            run=run,
        )


def _check_layers(config: DFlashConfig, network: DrafterConfig) -> None:
    """Refuse a network whose layers are not those that the masks are for."""
    layers, window = layers_of(config)
    if (layers, window) != (network.layers, network.sliding_window):
        kinds = ["sliding" if slides else "full" for slides in network.slides]
        rule = f"must be the drafter's own, {kinds} with sliding_window = {network.sliding_window}"
        raise ConfigError("drafter.layers", list(layers), rule)
