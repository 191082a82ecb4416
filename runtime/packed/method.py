"""Packed fine-tuning as a ``Method``: what ``runtime.train`` asks of such a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from maskgen.mask_spec import MaskSpec
from runtime.data.dataset import Dataset
from runtime.data.preparation import Preparation
from runtime.errors import NothingLearnedError
from runtime.packed.evaluation import evaluate
from runtime.packed.limits import check_request
from runtime.packed.packing import PackedRows, pack
from runtime.packed.published import is_of, save_model
from runtime.packed.settings import PackedConfig
from runtime.packed.trainee import PackedTrainee
from runtime.ranks.devices import Placement, place
from runtime.target.model import Target, outline_target
from runtime.training.entries import named_specs
from runtime.training.evaluation import Evaluation
from runtime.training.inputs import Inputs
from runtime.training.limits import Request
from runtime.training.metrics import ratio
from runtime.training.plots import Plot
from runtime.training.saved_state import Checkpoint, master_weights


class Packed:
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

    def specs(self, config: PackedConfig) -> dict[int, MaskSpec]:
        """The run's entries by row length."""
        return named_specs(config, config.train.masks, lambda spec: spec.Q_LEN)

    def preparation(self, config: PackedConfig) -> Preparation:
        """Tokens alone: the model that is trained also wrote the missing answers."""
        devices = config.run.devices.split(",")
        placement = place(devices[0], dtype=config.target.dtype, threads=config.run.threads)
        specs = self.specs(config)
        request = Request(config=config, specs=specs, placement=placement, ranks=len(devices))
        check_request(request)
        return Preparation(
            config=config,
            placement=placement,
            context=max(specs),
            num_features=0,
            stores=False,
            fit=lambda: check_request(
                replace(request, outline=outline_target(config.target.model))
            ),
            check=lambda target: None,
        )

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

    def uses(self, folder: Path) -> tuple[str, ...]:
        """Nothing of this project: transformers and every server of it take the folder."""
        del folder
        return ()

    def check_export(self, config: PackedConfig) -> None:
        """Nothing: a model is served as it was."""
        del config

    def rows(self, config: PackedConfig, dataset: Dataset, lengths: tuple[int, ...]) -> PackedRows:
        """Pack all samples, the same way on every process and at every resume."""
        return pack(dataset.lengths, lengths, config.packed.max_documents)

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

    def closing_rows(self, config: PackedConfig) -> dict[str, str]:
        """Nothing beside the rest."""
        del config
        return {}

    def export_checkpoint(self, checkpoint: Checkpoint, folder: Path) -> Path:
        """Write a checkpoint's model, with the config and the tokenizer of the one it began as."""
        state = checkpoint.load()
        if "step" in state and state["step"] == 0:
            raise NothingLearnedError(
                f"nothing was learned up to step {checkpoint.step} of {checkpoint.folder}: its "
                "weights are those that the run began with"
            )
        target = Target.load(checkpoint.published["model"], device="cpu", dtype="float32")
        return save_model(folder, target, master_weights(state), checkpoint.run)

    def is_of(self, folder: Path, run: Mapping[str, Any]) -> bool:
        """Whether a whole model of this run and step lies in a folder."""
        return is_of(folder, run)


METHOD = Packed()
