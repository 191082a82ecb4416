"""What a run leaves behind while it goes on: a row of metrics an interval, and checkpoints."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from maskgen.faults import told
from runtime.config import TrainConfig
from runtime.data.plan import NO_ROW, Step, StepPlan
from runtime.training.checkpoint import save_checkpoint
from runtime.training.cycles import Cycles
from runtime.training.method import Method
from runtime.training.metrics import METRICS_FILE, MetricsLog, interval_metrics
from runtime.training.outcome import check_skips
from runtime.training.replica import Replica
from runtime.training.watch import Watch


class Recorder:
    """Writes for rank 0, in its thread.

    Args:
        folder: The run folder.
        train: How often, and how many steps in all.
        plan: Which samples every step takes.
        method: Makes the rows of the sums.
        published: What an export needs beside the weights.
        fingerprint: What shaped the run.
        report: Takes a line for people.
        first_step: Where this run begins.
        cycles: Of the learning rate, kept in every checkpoint.
        skips_in_a_row: Steps that were skipped one after another up to there.
        watch: Scores the held-out data, if anything does.
    """

    def __init__(
        self,
        *,
        folder: Path,
        train: TrainConfig,
        plan: StepPlan,
        method: Method[Any],
        published: Mapping[str, Any],
        fingerprint: str,
        report: Callable[[str], None],
        first_step: int,
        cycles: Cycles = (),
        skips_in_a_row: int = 0,
        watch: Watch | None = None,
    ) -> None:
        self.folder = folder
        self.train = train
        self.plan = plan
        self.method = method
        self.published = published
        self.fingerprint = fingerprint
        self.report = report
        self.cycles = cycles
        self.watch = watch
        self._log = MetricsLog(
            folder / METRICS_FILE,
            first_step=first_step,
            total_steps=train.steps,
            shown={plot.short: plot.key for plot in method.plots if plot.short},
            legend=method.legend,
        )
        # Where the row that a resume goes on with can first reach the limit.
        self._first_look = first_step
        if skips_in_a_row:
            self._first_look += max(1, train.max_skipped - skips_in_a_row)
        self._saved = first_step
        self._interval_first = first_step
        self._interval_tokens = 0
        self._interval_began = self._stepped = time.monotonic()

    def start(self) -> None:
        """Begin the first interval."""
        self._interval_began = time.monotonic()

    def after_step(self, replica: Replica, finished: int, step: Step) -> None:
        """Log at the end of an interval.

        Raises:
            NonFiniteError: Too many steps in a row were not finite.
        """
        self._stepped = time.monotonic()
        self._interval_tokens += sum(
            int(self.plan.lengths[row]) for row in step.rows if row != NO_ROW
        )
        looks = (self.train.steps, self._first_look)
        if finished % self.train.log_every == 0 or finished in looks:
            self.log(replica, finished)
        if self.watch is not None and self.watch.is_due(finished):
            self._score(self.watch, replica, finished)

    def has_best(self, finished: int) -> bool:
        """Whether the best held-out score so far is that of so many steps."""
        return self.watch is not None and self.watch.is_best(finished)

    @property
    def gave_up(self) -> bool:
        """Whether the run is to end since its held-out scores became no better."""
        return self.watch is not None and self.watch.gave_up

    def _score(self, watch: Watch, replica: Replica, finished: int) -> None:
        # What is left of the steps themselves is theirs.
        replica.pool.synchronize()
        began = self._stepped = time.monotonic()
        score = watch.score(replica, finished)
        self._log.write_score(watch.row(score), watch.line(score))
        self._leave_out(time.monotonic() - began)

    def _leave_out(self, seconds: float) -> None:
        """The interval's speed is that of the steps."""
        self._interval_began += seconds
        self._stepped += seconds

    def log(self, replica: Replica, finished: int, *, ended: bool = False) -> None:
        """Write the interval's row and begin the next.

        Args:
            replica: Rank 0's.
            finished: Steps.
            ended: Whether the run has, so that the interval lasted up to the last step only.

        Raises:
            NonFiniteError: As ``after_step``.
        """
        totals = replica.read_totals()
        now = self._stepped if ended else time.monotonic()
        steps = finished - self._interval_first
        row = interval_metrics(
            totals,
            self.method.metrics(totals, steps),
            step=finished,
            lr=replica.lr(),
            tokens=self._interval_tokens,
            seconds=now - self._interval_began,
            steps=steps,
        )
        self._log.write(row)
        self._interval_began, self._interval_tokens, self._interval_first = now, 0, finished
        check_skips(int(totals["worst_skips_in_a_row"]), self.train.max_skipped, finished)

    def save(self, replica: Replica, finished: int) -> None:
        """Write a replica's state as the checkpoint of ``finished`` steps.

        Raises:
            CheckpointError: The disk refuses.
        """
        began = time.monotonic()
        save_checkpoint(
            self.folder / "checkpoints",
            replica.state(),
            step=finished,
            fingerprint=self.fingerprint,
            published=self.published,
            keep=self.train.keep,
            heldout=self.watch.record(finished) if self.watch is not None else {},
            spare=self.watch.spare if self.watch is not None else None,
            cycles=self.cycles,
        )
        self._saved = finished
        self._leave_out(time.monotonic() - began)

    def end(self, replica: Replica | None, finished: int, error: BaseException | None) -> None:
        """Log the interval that was broken off, save the last step, and close the log.

        Args:
            replica: Which has the state of ``finished`` steps, if any surely does.
            finished: Steps.
            error: What ended the run; a failure to save is then only reported.

        Raises:
            CheckpointError: The disk refuses.
        """
        try:
            try:
                broken_off = finished > self._interval_first
                if replica is not None and replica.group.rank == 0 and broken_off:
                    self.log(replica, finished, ended=True)
            finally:
                if replica is not None and finished > self._saved:
                    self.save(replica, finished)
        except Exception as failure:
            if error is None:
                raise
            self.report(f"could not save the last step: {told(failure)}")
        finally:
            self._log.close()
