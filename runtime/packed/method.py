"""Packed fine-tuning as a ``Method``: what ``runtime.train`` asks of such a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from runtime.data.dataset import Dataset
from runtime.data.preparation import Preparation, tokens_only
from runtime.packed.evaluation import evaluate
from runtime.packed.limits import check_request
from runtime.packed.packing import PackedRows, pack
from runtime.packed.published import check_destination, is_of, save_model
from runtime.packed.settings import PackedConfig
from runtime.packed.trainee import PackedTrainee
from runtime.ranks.devices import Placement
from runtime.target.files import find_target
from runtime.target.model import Target, outline_target
from runtime.training.evaluation import Evaluation
from runtime.training.inputs import Inputs
from runtime.training.limits import Request
from runtime.training.method import Method
from runtime.training.metrics import ratio
from runtime.training.parts import Parts
from runtime.training.plots import Plot
from runtime.training.saved_state import Checkpoint


class Packed(Method[PackedConfig]):
    """See ``runtime.training.method.Method``."""

    name = "packed"
    product = "model"
    config_type = PackedConfig
    plots: Sequence[Plot] = (
        Plot(key="loss", axis="loss (nats a predicted token)", short="loss", label="training"),
        Plot(
            key="heldout_loss",
            axis="loss (nats a predicted token)",
            label="held-out documents",
            colour="tab:red",
            style="o",
        ),
    )
    legend = "loss: mean cross entropy of the predicted tokens, in nats"

    def preparation(self, config: PackedConfig) -> Preparation:
        """Tokens alone: the model that is trained also wrote the missing answers."""
        specs, devices = self.specs(config), config.run.devices.split(",")
        made = tokens_only(config, max(specs))
        request = Request(config=config, specs=specs, placement=made.placement, ranks=len(devices))
        check_request(request)
        return replace(made, fit=partial(_check_outline, request))

    def check(
        self,
        config: PackedConfig,
        placement: Placement,
        ranks: int,
        dataset: Dataset | None = None,
    ) -> None:
        """Ask ``runtime.packed.limits``."""
        del dataset
        specs = self.specs(config)
        check_request(Request(config=config, specs=specs, placement=placement, ranks=ranks))

    def evaluate(self, config: PackedConfig, folder: str | Path | None) -> Evaluation:
        """The loss on held-out documents."""
        return evaluate(config, folder)

    def rows(self, config: PackedConfig, dataset: Dataset, lengths: tuple[int, ...]) -> PackedRows:
        """Pack all samples, the same way on every process and at every resume."""
        return pack(dataset.lengths, lengths, config.packed.max_documents)

    def parts(self, config: PackedConfig, placement: Placement, dataset: Dataset | None) -> Parts:
        """The model, all of it trained."""
        specs, ranks = self.specs(config), len(placement.devices)
        request = Request(config=config, specs=specs, placement=placement, ranks=ranks)
        outline = outline_target(config.target.model)
        check_request(replace(request, outline=outline))
        del dataset
        return Parts(trained=outline.model, compiled=("a layer of the model", "the loss"))

    def load(
        self,
        config: PackedConfig,
        inputs: Inputs,
        placement: Placement,
        apart: Placement | None,
        *,
        ranks: int,
        fresh: bool,
        report: Callable[[str], None],
    ) -> PackedTrainee:
        """Load the model in float32; each device gets a copy."""
        del apart, fresh
        check_request(
            Request(
                config=config,
                specs=self.specs(config),
                placement=placement,
                ranks=ranks,
                outline=outline_target(config.target.model),
            )
        )
        base = find_target(config.target.model).folder
        check_destination(Path(config.run.folder) / self.product, base)
        report(f"loading model {config.target.model}")
        target = Target.load(config.target.model, device="cpu", dtype="float32")
        inputs.dataset.check_target(target.digest)
        return PackedTrainee(config=config, inputs=inputs, target=target)

    def metrics(self, totals: Mapping[str, float], steps: int) -> dict[str, Any]:
        """What a row says of the text: ``loss`` in nats, and how full the rows were."""
        return {
            "loss": ratio(totals["loss"], totals["weight"]),
            "predictions_per_step": totals["weight"] / max(steps, 1),
            "documents_per_step": totals["documents"] / max(steps, 1),
        }

    def export_checkpoint(self, checkpoint: Checkpoint, folder: Path) -> Path:
        """Write a checkpoint's model, with the config and the tokenizer of the one it began as."""
        name = checkpoint.published["model"]
        check_destination(folder, find_target(name).folder)
        weights = checkpoint.learned_weights()
        target = Target.load(name, device="cpu", dtype="float32")
        return save_model(folder, target, weights, checkpoint.run)

    def is_of(self, folder: Path, run: Mapping[str, Any]) -> bool:
        """Whether a whole model of this run and step lies in a folder."""
        return is_of(folder, run)


def _check_outline(request: Request) -> None:
    check_request(replace(request, outline=outline_target(request.config.target.model)))


METHOD = Packed()
