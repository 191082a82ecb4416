"""A whole training run: load, warm up, capture, freeze, run, tear down."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from torch import Tensor

from maskgen.entry import MaskEntry
from runtime.anchors import LayoutChooser
from runtime.batches import Step, StepPlan
from runtime.checkpoint import save_checkpoint
from runtime.collectives import Group, make_groups
from runtime.compilation import size_recompile_limits
from runtime.config import Config
from runtime.dataset import Dataset
from runtime.devices import Placement
from runtime.drafter import DrafterConfig
from runtime.errors import ConfigError, FrozenError, NonFiniteError, WorkerError
from runtime.feeder import Feeder
from runtime.freeze import FreezeGuard
from runtime.metrics import METRICS_FILE, MetricsLog, interval_metrics
from runtime.replica import Replica
from runtime.step import FrozenTarget
from runtime.worker import Coordinator, Worker

JOIN_S = 10.0
"""How long a stopped thread may take to end."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended."""

    steps: int
    """Finished steps, those of an earlier part included."""
    summary: str
    """The after-freeze line."""
    seconds: float
    """From freeze to the last step."""
    signal: signal.Signals | None
    """What stopped it early, if anything did."""


class Trainer:
    """Trains a drafter on one or more devices.

    Args:
        config: The run file.
        placement: Devices.
        drafter_config: The network.
        targets: Frozen target parts of each device.
        entries: Context -> mask entry, for every bucket in use.
        dataset: Training samples.
        plan: Which samples every step takes.
        fingerprint: Written into checkpoints.
        report: Takes a line for people about what is going on.
    """

    def __init__(
        self,
        *,
        config: Config,
        placement: Placement,
        drafter_config: DrafterConfig,
        targets: list[FrozenTarget],
        entries: Mapping[int, MaskEntry],
        dataset: Dataset,
        plan: StepPlan,
        fingerprint: str,
        report: Callable[[str], None],
    ) -> None:
        size = len(placement.devices)
        if config.train.global_batch % size:
            raise ConfigError(
                "train.global_batch",
                config.train.global_batch,
                f"must be a multiple of the number of devices, {size}",
            )
        self.config = config
        self.drafter_config = drafter_config
        self.folder = Path(config.run.folder)
        self.dataset = dataset
        self.plan = plan
        self.fingerprint = fingerprint
        self.report = report
        self.groups: list[Group] = make_groups(placement)
        size_recompile_limits(len(entries), size)
        self.replicas = [
            Replica(
                group=group,
                placement=placement,
                drafter_config=drafter_config,
                target=targets[group.rank],
                entries=entries,
                train=config.train,
            )
            for group in self.groups
        ]
        self.choosers = {
            context: LayoutChooser(
                entry.params["anchors"].numpy(),
                entry.params["n_valid"].numpy(),
                int(entry.spec.params["draws"]),
            )
            for context, entry in entries.items()
            if entry.kind == "layouts"
        }
        self._saved = -1
        self._interval_began = 0.0
        self._interval_tokens = 0
        self._interval_first = 0

    def prepare(self) -> None:
        """Warm up and capture all buckets on all devices, one after another on this thread."""
        for replica in self.replicas:
            replica.prepare(self.report)

    def start_from(
        self,
        *,
        weights: Mapping[str, Tensor] | None = None,
        state: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Load first weights, or a checkpoint's state, into rank 0 and broadcast them."""
        first = self.replicas[0]
        if state is not None:
            first.load(state)
        elif weights is not None:
            first.load_weights(weights)
        if len(self.replicas) > 1:
            loaded = first.state()
            for replica in self.replicas[1:]:
                replica.load(loaded)

    def run(self, first_step: int = 0) -> RunResult:
        """Freeze and train up to ``train.steps``.

        Raises:
            FrozenError: Something compiled, traced, recorded or built a mask.
            NonFiniteError: Too many steps in a row were not finite.
            WorkerError: A thread died of another cause, which is chained.
        """
        last = self.config.train.steps
        coordinator = Coordinator(last)
        log = MetricsLog(self.folder / METRICS_FILE, first_step=first_step, total_steps=last)
        feeders, workers = self._make_threads(coordinator, log, first_step)
        guard = FreezeGuard()
        began = self._interval_began = time.monotonic()
        self._interval_first = first_step
        with guard.active(), _stop_on_signals(coordinator):
            for thread in (*feeders, *workers):
                thread.start()
            try:
                _watch(workers, coordinator)
            except KeyboardInterrupt as interrupt:
                coordinator.fail(interrupt)
            for feeder in feeders:
                feeder.stop()
            if coordinator.failed.is_set():
                for group in self.groups:
                    group.shutdown()
            for thread in (*workers, *feeders):
                thread.join(JOIN_S)
        seconds = time.monotonic() - began
        finished = workers[0].finished
        log.close()
        # After a failure the other ranks' collectives were broken off, and what a replay made of
        # half-reduced gradients is no state to resume from.
        whole = coordinator.error is None or len(self.replicas) == 1
        if whole and not workers[0].is_alive() and finished > max(self._saved, first_step):
            self._save_last(finished, coordinator.error)
        if coordinator.error is not None:
            _raise_first(coordinator.error, finished)
        if guard.counts:
            raise FrozenError(f"after freeze, and swallowed by whoever did it: {guard.counts}")
        replays = sum(replica.replays for replica in self.replicas)
        eager = self.replicas[0].device.type == "cpu"
        summary = guard.summary(finished - first_step, replays, eager=eager)
        return RunResult(
            steps=finished, summary=summary, seconds=seconds, signal=coordinator.signal
        )

    def _make_threads(
        self, coordinator: Coordinator, log: MetricsLog, first_step: int
    ) -> tuple[list[Feeder], list[Worker]]:
        feeders, workers = [], []
        for replica in self.replicas:
            feeder = Feeder(
                replica=replica,
                dataset=self.dataset,
                plan=self.plan,
                choosers=self.choosers,
                seed=self.config.run.seed,
                steps=(first_step, self.config.train.steps),
            )
            rank = replica.group.rank
            worker = Worker(
                rank=rank,
                stepper=replica,
                source=feeder,
                coordinator=coordinator,
                first_step=first_step,
                after_step=None if rank else lambda n, step: self._after_step(n, step, log),
            )
            feeders.append(feeder)
            workers.append(worker)
        return feeders, workers

    def _after_step(self, finished: int, step: Step, log: MetricsLog) -> None:
        train = self.config.train
        self._interval_tokens += sum(int(self.plan.lengths[s]) for s in step.samples if s >= 0)
        if finished % train.log_every == 0 or finished == train.steps:
            self._log(finished, log)
        if finished % train.save_every == 0:
            self.save(finished)

    def _log(self, finished: int, log: MetricsLog) -> None:
        replica = self.replicas[0]
        totals = replica.read_totals()
        now = time.monotonic()
        row = interval_metrics(
            totals,
            step=finished,
            lr=replica.lr(),
            tokens=self._interval_tokens,
            seconds=now - self._interval_began,
            steps=finished - self._interval_first,
        )
        log.write(row)
        self._interval_began, self._interval_tokens, self._interval_first = now, 0, finished
        if totals["worst_skips_in_a_row"] >= self.config.train.max_skipped:
            raise NonFiniteError(
                f"{int(totals['worst_skips_in_a_row'])} steps in a row had a loss or gradient that "
                f"was not finite (limit train.max_skipped = {self.config.train.max_skipped}), the "
                f"last about step {finished}; the weights are those of the last finite step. Look "
                "for NaN in the features, or lower train.lr"
            )

    def _save_last(self, finished: int, error: BaseException | None) -> None:
        try:
            self.save(finished)
        except Exception as failure:
            if error is None:
                raise
            self.report(f"could not save the last step: {failure}")

    def save(self, finished: int) -> None:
        """Write rank 0's state as the checkpoint of ``finished`` steps."""
        save_checkpoint(
            self.folder / "checkpoints",
            self.replicas[0].state(),
            step=finished,
            fingerprint=self.fingerprint,
            drafter={
                **self.drafter_config.to_published(),
                "feature_scale": list(self.dataset.feature_scale),
            },
            keep=self.config.train.keep,
        )
        self._saved = finished

    def drafter_weights(self) -> dict[str, Tensor]:
        """The trained fp32 weights by their published names, on the CPU."""
        prefix = "master."
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.replicas[0].state().items()
            if name.startswith(prefix)
        }

    def teardown(self) -> None:
        """Free graphs and groups."""
        for replica in self.replicas:
            replica.teardown()
        with ThreadPoolExecutor(len(self.groups)) as pool:
            list(pool.map(Group.shutdown, self.groups))


def _watch(workers: list[Worker], coordinator: Coordinator) -> None:
    while any(worker.is_alive() for worker in workers):
        if coordinator.failed.wait(0.2):
            return


@contextlib.contextmanager
def _stop_on_signals(coordinator: Coordinator) -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into a stop after the current step; a second Ctrl-C interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        del frame
        coordinator.stop(signal.Signals(signum))
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _raise_first(error: BaseException, finished: int) -> None:
    if isinstance(error, NonFiniteError) or not isinstance(error, Exception):
        raise error
    raise WorkerError(f"training stopped after step {finished}: {error}") from error
