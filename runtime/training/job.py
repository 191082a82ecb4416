"""The whole of a training run: from a run file to what it exports."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cache
from maskgen.border import after_result
from maskgen.progress import say
from runtime.config import Config
from runtime.ranks.devices import Placement, enter_thread, place
from runtime.ranks.processes import Processes, single_process
from runtime.static.artifacts import WarmUp
from runtime.training.checkpoint import remove_checkpoints
from runtime.training.choice import best_checkpoint
from runtime.training.contract import checked_trainee
from runtime.training.inputs import Inputs, gather_inputs, open_data
from runtime.training.method import Method, Trainee
from runtime.training.outcome import check_learned
from runtime.training.picture import PICTURE_FILE, draw_run
from runtime.training.result import RunResult, nothing_run
from runtime.training.run_folder import write_run_file
from runtime.training.saved_state import Checkpoint
from runtime.training.start import Start, find_start, finish
from runtime.training.targets import check_target, place_targets
from runtime.training.trainer import Trainer
from runtime.training.wanted_masks import wanted_masks

Show = Callable[[RunResult, Mapping[str, Any]], None]
"""Takes how a run ended and the lines of its closing table, before the export."""


class Job:
    """One run of a method.

    Args:
        method: What kind of training.
        config: The run file.
        config_path: Its path, named in errors.
        processes: All that train together; this one alone if left out.
    """

    def __init__(
        self,
        method: Method[Any],
        config: Config,
        config_path: str,
        *,
        processes: Processes | None = None,
    ) -> None:
        self.method = method
        self.config = config
        self.folder = Path(config.run.folder)
        self.product = self.folder / method.product
        self.processes = processes or single_process()
        self.report = say if self.processes.leads else _say_nothing
        share = (self.processes.local_rank, self.processes.local_size)
        self.placement = place(
            config.run.devices, dtype=config.target.dtype, threads=config.run.threads, share=share
        )
        self.apart = place_targets(config, self.placement, share)
        self.ranks = len(self.placement.devices) * self.processes.size
        self.inputs = open_inputs(method, config, config_path, self.placement, self.ranks)
        # Known by its digest alone: a finished run of another target is not this one.
        check_target(config, self.inputs.dataset)

    def run(
        self,
        *,
        fresh: bool = False,
        save_artifacts: bool = False,
        trust_artifacts: bool = False,
        show: Show = lambda result, lines: None,
    ) -> RunResult:
        """Train from where the run folder stands to ``train.steps``, and export.

        Args:
            fresh: Delete the run folder's checkpoints first.
            save_artifacts: Save what the warm-up compiled, see ``runtime.static.artifacts``.
            trust_artifacts: Load it; it is code.
            show: See ``Show``.
        """
        start = find_start(
            self.config, self.inputs, self.processes, fresh=fresh, report=self.report
        )
        if start.checkpoint is not None:
            self.inputs = replace(self.inputs, fingerprint=start.checkpoint.fingerprint)
        show_from = partial(self._showing, show, start)
        if start.step >= self.config.train.steps or start.gave_up:
            return self._finish(start, show_from)
        enter_thread(self.placement.devices[0], self.placement.threads)
        warm_up = WarmUp(
            cache.open_store(self.config.cache),
            self.inputs.mask_version,
            (*self.placement.devices, *(self.apart.devices if self.apart else ())),
            save=save_artifacts and self.processes.leads,
            trust=trust_artifacts,
            report=self.report,
        )
        loaded = self.method.load(
            self.config,
            self.inputs,
            self.placement,
            self.apart,
            ranks=self.ranks,
            fresh=self.processes.leads and start.state is None,
            report=self.report,
        )
        trainee = checked_trainee(self.config.run.method, loaded)
        trainer = Trainer(
            config=self.config,
            placement=self.placement,
            method=self.method,
            trainee=trainee,
            inputs=self.inputs,
            report=self.report,
            processes=self.processes,
            cycles=start.cycles,
        )
        try:
            # Reported before the groups are left, so that others hear the cause, not that it broke
            # them.
            with self.processes.reporting_failures():
                trainer.prepare()
                warm_up.finish()
                self._begin(trainer, trainee, start, fresh=fresh)
                result = trainer.run(start.step, start.heldout)
                if self.processes.leads:
                    self._leave_product(trainer, trainee, result, show_from)
                # A launcher ends all processes once one has left with an exit code other than 0.
                self.processes.end()
        finally:
            trainer.teardown()
        if result.signal is None:
            check_learned(result.counts, self.config.train.max_skipped)
        return result

    def _begin(self, trainer: Trainer, trainee: Trainee, start: Start, *, fresh: bool) -> None:
        first = self.processes.leads and start.state is None
        weights = trainee.first_weights() if first else None
        trainer.start_from(weights=weights, state=start.state)
        if self.processes.leads:
            # Not before: until here the command may still be refused.
            write_run_file(self.folder, self.config, self.inputs, start.cycles)
            if fresh:
                remove_checkpoints(self.folder / "checkpoints")
        if start.state is not None:
            self.report(f"resuming from step {start.step} of {self.config.train.steps}")
        if start.change is not None:
            self.report(start.change)

    def _leave_product(
        self,
        trainer: Trainer,
        trainee: Trainee,
        result: RunResult,
        show_from: Callable[[RunResult], AbstractContextManager[None]],
    ) -> None:
        with show_from(result):
            best = self._best()
            if result.counts.learned and best is not None and best.step < result.steps:
                self.report(f"exporting the best {self.method.product}, that of step {best.step}")
                self.method.export_checkpoint(best, self.product)
            elif result.counts.learned:
                run = {"fingerprint": self.inputs.fingerprint, "step": result.steps}
                trainee.export(self.product, trainer.weights(), run)
        draw_run(self.folder, self.method.plots)

    def _best(self) -> Checkpoint | None:
        """Whose weights are exported instead of the newest, if any are."""
        if self.config.train.export != "best":
            return None
        return best_checkpoint(self.folder / "checkpoints", self.inputs.fingerprint, self.report)

    def _finish(
        self, start: Start, show_from: Callable[[RunResult], AbstractContextManager[None]]
    ) -> RunResult:
        counts = start.counts(self.processes)
        check_learned(counts, self.config.train.max_skipped)
        larger = "train.steps or evaluate.patience" if start.gave_up else "train.steps"
        self.report(
            f"this run is finished: {start.step} steps; a larger {larger} goes on, --fresh starts "
            "over"
        )
        result = nothing_run(counts, self.placement)
        with show_from(result):
            if start.checkpoint is not None:
                finish(self.method, self._best() or start.checkpoint, self.folder, self.report)
        self.processes.end()
        return result

    def _showing(self, show: Show, start: Start, result: RunResult) -> AbstractContextManager[None]:
        lines = self._closing_lines(result, start.step)
        return after_result(partial(show, result, lines))

    def record(self, result: RunResult) -> dict[str, Any]:
        """How a run ended, as JSON."""
        learned = bool(result.counts.learned)
        return {
            "run_folder": str(self.folder),
            self.method.product: str(self.product) if learned else None,
            "steps": result.steps,
            "total_steps": self.config.train.steps,
            "skipped_steps": result.counts.skipped,
            "empty_steps": result.counts.empty,
            "seconds": result.seconds,
            "signal": result.signal.name if result.signal is not None else None,
            **self.method.closing_lines(self.config),
            **({"scores": dict(result.scores)} if result.scores else {}),
            "threads": dict(result.rates),
            "summary": result.summary,
        }

    def _closing_lines(self, result: RunResult, first_step: int) -> dict[str, Any]:
        steps, count = self.config.train.steps, result.steps - first_step
        learned = bool(result.counts.learned)
        lines: dict[str, Any] = {
            "run folder": str(self.folder),
            "steps": f"{result.steps} of {steps}",
            **result.counts.unlearned_lines(),
            **({f"time of these {count} steps": f"{result.seconds:.0f} s"} if count else {}),
            **result.scores,
            **result.rates,
            "mask version": self.inputs.mask_version[:16],
            **self.method.closing_lines(self.config),
            self.method.product: str(self.product) if learned else "none, nothing was learned",
            "picture": str(self.folder / PICTURE_FILE),
        }
        if result.signal is not None:
            name = result.signal.name
            goes_on = f"the same command goes on from step {result.steps}"
            done = result.steps >= steps
            lines["stopped by"] = f"{name}; {'all steps were done' if done else goes_on}"
        return lines


def open_inputs(
    method: Method[Any], config: Config, config_path: str, placement: Placement, ranks: int
) -> Inputs:
    """Open the data and the masks of a run, refusing what the method cannot do with them.

    Args:
        method: What kind of training.
        config: The run file.
        config_path: Its path, named in errors.
        placement: The devices that train.
        ranks: Those of all processes.

    Raises:
        ConfigError: ``[masks]`` has no entry for the run, or the method cannot do what is asked.
        DatasetError: The data folder is missing, damaged or of other settings.
        BucketMissingError: The cache lacks an entry.
        StoreNotFoundError: There is no cache.
    """
    masks = wanted_masks(method, config)
    method.check(config, placement, ranks)
    dataset = open_data(config, max(masks.specs))
    method.check(config, placement, ranks, dataset)
    rows = method.rows(config, dataset, tuple(masks.specs))
    return gather_inputs(
        config,
        config_path,
        specs=masks.specs,
        dataset=dataset,
        rows=rows,
        heldout_specs=masks.heldout,
        beside=masks.beside,
        heldout_beside=masks.heldout_beside,
        began_from=method.began_from(config),
    )


def _say_nothing(line: str) -> None:
    del line
