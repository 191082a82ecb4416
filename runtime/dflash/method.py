"""DFlash as a ``Method``: what ``runtime.train`` asks of a drafter's run."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from maskgen.mask_spec import MaskSpec
from runtime.data.dataset import Dataset
from runtime.data.folder import PREPARE
from runtime.data.preparation import Preparation
from runtime.dflash.capabilities import EXPORT, Request, check_request
from runtime.dflash.folder.embedding import fed_scale, serving_note
from runtime.dflash.folder.files import is_of, same_target
from runtime.dflash.folder.saved_drafter import export_checkpoint
from runtime.dflash.loss.teacher import check_teacher
from runtime.dflash.parts import drafter_parts
from runtime.dflash.preparation import preparation
from runtime.dflash.settings import STARTS, DFlashConfig
from runtime.dflash.start.beginning import (
    PRODUCT,
    check_data,
    check_run,
    find_beginning,
    heads_of,
    layers_of,
)
from runtime.dflash.start.initialise import calibration_tokens, initial_drafter
from runtime.dflash.step.buckets import heldout_specs, run_specs, sliding_specs
from runtime.dflash.step.samples import SLIDING
from runtime.dflash.targets import fit_drafter, frozen_targets, remote_targets
from runtime.dflash.trainee import DrafterTrainee
from runtime.errors import DatasetError
from runtime.ranks.devices import Placement
from runtime.target.model import Target
from runtime.training.evaluation import Evaluation
from runtime.training.inputs import Inputs
from runtime.training.method import Method
from runtime.training.metrics import ratio
from runtime.training.parts import Parts
from runtime.training.plots import Plot
from runtime.training.saved_state import Checkpoint

TAU = "tau (tokens per target call)"


class DFlash(Method[DFlashConfig]):
    """See ``runtime.training.method.Method``."""

    name = "dflash"
    product = PRODUCT
    config_type = DFlashConfig
    plots: Sequence[Plot] = (
        Plot(key="loss", axis="loss (weighted mean cross entropy)", short="loss"),
        Plot(
            key="overlap",
            axis="overlap with the target's distributions",
            short="overlap",
            colour="tab:purple",
            always=False,
        ),
        Plot(
            key="tau_forced",
            axis=TAU,
            short="tau~",
            label="drafts checked against the data",
            colour="tab:green",
        ),
        Plot(
            key="heldout_tau",
            axis=TAU,
            label="drafts checked against held-out text, with 95 % intervals",
            colour="tab:orange",
            style=".-",
            ends=("heldout_low", "heldout_high"),
        ),
        Plot(
            key="tau",
            axis=TAU,
            label="draft-and-verify on held-out prompts",
            colour="tab:red",
            style="o",
        ),
    )
    legend = (
        "tau~: tokens that a call of the target would give, drafts checked against the training "
        "data; evaluate measures tau by decoding"
    )

    def specs(self, config: DFlashConfig) -> dict[int, MaskSpec]:
        """The run's entries by context."""
        return run_specs(config)

    def heldout_specs(self, config: DFlashConfig) -> dict[int, MaskSpec]:
        """The parametric entries, which take any anchors."""
        return heldout_specs(config)

    def specs_beside(
        self, config: DFlashConfig, *, heldout: bool = False
    ) -> Mapping[str, Mapping[int, MaskSpec]]:
        """Those of the sliding layers, where there are some."""
        specs = sliding_specs(config, heldout=heldout)
        return {SLIDING: specs} if specs else {}

    def check(
        self, config: DFlashConfig, placement: Placement, ranks: int, dataset: Dataset | None = None
    ) -> None:
        """Ask ``runtime.dflash.capabilities``, and compare the data's features with the run's."""
        request = Request(config=config, specs=run_specs(config), placement=placement, ranks=ranks)
        beginning = find_beginning(config)
        if dataset is None:
            check_request(request)
            if beginning is not None:
                check_run(beginning, config, request.specs)
            return
        asked, found = config.data.features, dataset.meta["features"]
        if asked not in ("auto", found):
            raise DatasetError(
                f"{dataset.folder} was prepared with data.features = {found!r}, and the run asks "
                f"for {asked!r}; {PREPARE}"
            )
        wanted, layers = config.target.num_features, len(dataset.layer_ids)
        if beginning is not None:
            check_data(beginning, dataset)
        elif wanted != layers:
            raise DatasetError(
                f"{dataset.folder} was prepared for {layers} feature layers, and "
                f"target.num_features asks for {wanted}; {PREPARE}"
            )
        if config.train.has_teacher and dataset.has_features and not dataset.has_last_hidden:
            raise DatasetError(
                f"{dataset.folder} was prepared without the target's last hidden state, and "
                f"train.distill = {config.train.distill!r} needs it; {PREPARE}"
            )
        check_request(replace(request, features=found))

    def preparation(self, config: DFlashConfig) -> Preparation:
        """Samples with the features of the target's layers."""
        return preparation(config)

    def evaluate(self, config: DFlashConfig, folder: str | Path | None) -> Evaluation:
        """Draft and verify on held-out prompts."""
        # Loads transformers, which data that are up to date need not wait for.
        from runtime.dflash.decoding.evaluation import evaluate

        return evaluate(config, folder)

    def uses(self, folder: Path) -> tuple[str, ...]:
        """An answer with the drafter."""
        named = shlex.quote(str(folder))
        return (f'python -m runtime.generate --drafter {named} --prompt "..."',)

    def check_export(self, config: DFlashConfig) -> None:
        """Refuse entries that an exported drafter would not be served with."""
        specs = run_specs(config) if config.masks else {}
        check_request(Request(config=config, specs=specs), (EXPORT,))

    def parts(self, config: DFlashConfig, placement: Placement, dataset: Dataset | None) -> Parts:
        """The drafter, and beside it the target or what of it the steps read."""
        return drafter_parts(config, placement, dataset)

    def began_from(self, config: DFlashConfig) -> Mapping[str, Any]:
        """The published drafter that ``drafter.init`` names."""
        beginning = find_beginning(config)
        return {} if beginning is None else beginning.record()

    def load(
        self,
        config: DFlashConfig,
        inputs: Inputs,
        placement: Placement,
        apart: Placement | None,
        *,
        ranks: int,
        fresh: bool,
        report: Callable[[str], None],
    ) -> DrafterTrainee:
        """Load the target and make the drafter that fits it."""
        request = Request(config=config, specs=run_specs(config), placement=placement, ranks=ranks)
        network = fit_drafter(request)
        beginning = find_beginning(config)
        if beginning is not None and fresh:
            beginning.check_there()
        report(f"loading target {config.target.model}")
        target = Target.load(
            config.target.model,
            device=(apart or placement).devices[0],
            dtype=placement.compute_dtype,
        )
        dataset = inputs.dataset
        dataset.check_target(target.digest, network.target_layer_ids)
        if beginning is None:
            network = replace(network, embedding_scale=fed_scale(target, config.drafter.embedding))
        else:
            same_target(beginning.folder, target, report)
            if network.confidence_head and not config.train.has_teacher:
                report("note: the drafter's confidence head learns nothing without train.distill")
        note = serving_note(network, target)
        if note is not None:
            report(note)
        teacher = config.train.has_teacher
        if teacher:
            check_teacher(target, calibration_tokens(dataset)[:1])
        weights = None
        if fresh:
            weights = initial_drafter(target, dataset, config, network).state_dict()
        return DrafterTrainee(
            config=config,
            inputs=inputs,
            network=network,
            targets=frozen_targets(
                target, placement, dataset, remote=apart is not None, teacher=teacher
            ),
            remote_targets=remote_targets(target, apart, dataset, teacher=teacher) if apart else (),
            weights=weights,
        )

    def metrics(self, totals: Mapping[str, float], steps: int) -> dict[str, Any]:
        """What a row says of drafting.

        ``loss`` (mean cross entropy of the supervised slots, in nats: weighted by the decay, or
        with D-PACE all alike, as gamma = 0 does; with distillation, too), ``tau_forced`` (mean
        tokens that a target call would give if drafts were checked against the data: 1 plus the
        drafts right in a row), ``accuracy`` by slot, ``anchors_kept`` (share of the anchors that
        carried weight), ``anchors_per_step``, and with distillation ``overlap`` (mean over the
        supervised slots of the sum of min(p, q), the chance that speculative sampling accepts a
        draft of the drafter's distribution q where the target's is p), and with a confidence
        head ``confidence_loss`` (its mean cross entropy with that overlap, weighted as ``loss``).
        """
        taught = {}
        if "overlap" in totals:
            taught["overlap"] = ratio(totals["overlap"], totals["tokens"])
        if "confidence" in totals:
            taught["confidence_loss"] = ratio(totals["confidence"], totals["weight"])
        slots = [name.removeprefix("count_") for name in totals if name.startswith("count_")]
        return {
            "loss": ratio(totals["loss"], totals["weight"]),
            **taught,
            "tau_forced": ratio(totals["accepted"], totals["blocks"]),
            "accuracy": [ratio(totals[f"correct_{s}"], totals[f"count_{s}"]) for s in slots],
            "anchors_kept": ratio(totals["anchors_kept"], totals["anchors"]),
            "anchors_per_step": totals["anchors_kept"] / max(steps, 1),
        }

    def closing_lines(self, config: DFlashConfig) -> dict[str, str]:
        """Anchors, the drafter that a run began from, what of loss and network is no default."""
        train = config.train
        lines = {"anchors": train.anchors}
        if config.drafter.init not in STARTS:
            lines["began from"] = config.drafter.init
        if train.loss == "dpace":
            lines["slot weights"] = f"D-PACE, alpha {train.dpace_alpha:g}"
        if train.distill != "none":
            lines["distillation"] = f"{train.distill}, share {train.distill_share:g}"
        if train.softmax == "seen":
            lines["softmax"] = "over the tokens of the training data"
        rank, confident = heads_of(config)
        if rank:
            lines["Markov head"] = f"rank {rank}"
        if confident:
            learns = train.has_teacher
            lines["confidence head"] = "learns the overlap" if learns else "learns nothing"
        layers, window = layers_of(config)
        if window is not None:
            lines["layers"] = f"{' '.join(layers)}, window {window}"
        return lines

    def export_checkpoint(self, checkpoint: Checkpoint, folder: Path) -> Path:
        """Write a checkpoint's drafter."""
        return export_checkpoint(checkpoint, folder)

    def is_of(self, folder: Path, run: Mapping[str, Any]) -> bool:
        """Whether a whole drafter of this run and step lies in a folder."""
        return is_of(folder, run)


METHOD = DFlash()
