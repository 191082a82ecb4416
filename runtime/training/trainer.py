"""A whole training run: load, warm up, capture, freeze, run, tear down."""

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from maskgen.faults import told
from runtime.config import Config
from runtime.data.plan import Step
from runtime.errors import FrozenError, NonFiniteError, WorkerError
from runtime.ranks.agreement import check_agreement
from runtime.ranks.collectives import Group, leave_groups, make_groups, on_every_rank
from runtime.ranks.devices import Placement, enter_thread
from runtime.ranks.processes import Processes, single_process
from runtime.signals import Stopped, stop_on_signals
from runtime.static.compilation import size_recompile_limits
from runtime.static.freeze import FreezeGuard
from runtime.training.cycles import Cycles
from runtime.training.inputs import Inputs
from runtime.training.method import Method, Trainee
from runtime.training.monitor import Monitor
from runtime.training.recorder import Recorder
from runtime.training.replica import Replica, rows_of_rank
from runtime.training.result import RunResult
from runtime.training.saved_state import master_weights
from runtime.training.target_worker import TargetReplica
from runtime.training.threads import Threads
from runtime.training.watch import Watch, saves_best
from runtime.training.worker import Coordinator

JOIN_S = 10.0
"""How long stopped threads may take to end."""


class Trainer:
    """Trains on one or more devices, in one process or several.

    Args:
        config: The run file; all devices of all processes share its batch evenly.
        placement: Devices of this process.
        method: Makes the metrics of the sums.
        trainee: What is trained.
        inputs: Masks, the plan of the steps, and the fingerprint that goes into checkpoints.
        report: Takes a line for people about what is going on.
        processes: All processes; this one alone if left out. The first writes all files.
        cycles: Of the learning rate; one up to ``train.steps`` if left out.
    """

    def __init__(
        self,
        *,
        config: Config,
        placement: Placement,
        method: Method[Any],
        trainee: Trainee,
        inputs: Inputs,
        report: Callable[[str], None],
        processes: Processes | None = None,
        cycles: Cycles = (),
    ) -> None:
        self.processes = processes or single_process()
        self.config = config
        self.folder = Path(config.run.folder)
        self.method = method
        self.trainee = trainee
        self.inputs = inputs
        self.report = report
        self.cycles = cycles or (config.train.steps,)
        self.groups: list[Group] = make_groups(placement, self.processes)
        entries, remote_targets = inputs.entries, trainee.remote_targets
        scored = len(inputs.heldout.entries) if inputs.heldout is not None else 0
        size_recompile_limits(len(entries) + scored, len(self.groups))
        self.replicas = [
            Replica(
                group=group,
                placement=placement,
                trainee=trainee,
                entries=entries,
                train=config.train,
                num_slots=2 + -(-len(remote_targets) // len(self.groups)),
                # One rank is enough: the others wait in their next collective meanwhile.
                heldout=trainee.heldout if group.rank == 0 else None,
                cycles=self.cycles,
            )
            for group in self.groups
        ]
        rows = rows_of_rank(config.train, self.groups[0].size)
        shapes = {length: (rows, length) for length in entries}
        self.target_replicas = [
            TargetReplica(target, shapes, placement.threads) for target in remote_targets
        ]
        self._stuck = False

    def prepare(self) -> None:
        """Warm up and capture all buckets on all devices, one after another on this thread."""
        for target in self.target_replicas:
            target.prepare(self.report)
        for replica in self.replicas:
            replica.prepare(self.report)

    def start_from(
        self,
        *,
        weights: Mapping[str, Tensor] | None = None,
        state: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Load first weights, or a checkpoint's state, into rank 0 and broadcast them.

        Every process must call it, after its warm-up; those without rank 0 may leave both out.
        """
        if self.processes.leads and state is not None:
            self.replicas[0].load(state)
        elif self.processes.leads and weights is not None:
            self.replicas[0].load_weights(weights)
        try:
            on_every_rank(_share_state, self.replicas, self.processes.failure)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                self.processes.fail(error)
            # Of what was begun, nothing may be left that waits for a rank which is gone.
            for group in self.groups:
                group.leave()
            raise

    def run(self, first_step: int = 0, past: Mapping[str, Any] = MappingProxyType({})) -> RunResult:
        """Freeze and train up to ``train.steps``.

        Args:
            first_step: Where to begin.
            past: How the run stood there on held-out data, see ``Watch.record``.

        Raises:
            FrozenError: Something compiled, traced, recorded or built a mask.
            NonFiniteError: Too many steps in a row were not finite.
            WorkerError: A thread died of another cause, which is chained.
        """
        coordinator = Coordinator(self.config.train.steps, first_step)
        several = self.processes.size > 1
        monitor = Monitor(self.processes, coordinator) if several else None
        recorder = self._make_recorder(first_step, past) if self.processes.leads else None
        asked = monitor or coordinator
        threads = self._make_threads(coordinator, recorder, first_step, asked.finish)
        guard = FreezeGuard()
        began = time.monotonic()
        if recorder is not None:
            recorder.start()
        with stop_on_signals(asked.stop, asked.save, interruptible=not several):
            with guard.active():
                threads.start()
                if monitor is not None:
                    monitor.start()
                try:
                    threads.watch(self.report)
                except KeyboardInterrupt as interrupt:
                    coordinator.fail(interrupt)
                saved = threads.worker_to_save()
                threads.stop()
                if coordinator.failed.is_set():
                    self._break_off(coordinator)
                self._stuck = not threads.join(JOIN_S)
                if monitor is not None:
                    monitor.end()
            seconds = time.monotonic() - began
            finished = (saved or threads.workers[0]).finished
            if recorder is not None:
                replica = None
                if saved is not None and not saved.is_alive():
                    replica = self.replicas[threads.workers.index(saved)]
                recorder.end(replica, finished, coordinator.error)
                if replica is None:
                    self.report("the last steps were not saved; the newest checkpoint stands")
        if coordinator.error is not None:
            _raise_first(coordinator.error, finished)
        if guard.counts:
            raise FrozenError(f"after freeze, and swallowed by whoever did it: {guard.counts}")
        replays = sum(replica.replays for replica in self.replicas)
        eager = self.replicas[0].device.type == "cpu"
        watch = recorder.watch if recorder is not None else None
        summary = guard.summary(finished - first_step, replays, eager=eager)
        return RunResult(
            steps=finished,
            summary=summary,
            seconds=seconds,
            rates=threads.rates(seconds),
            signal=coordinator.signal,
            counts=self.replicas[0].counts(),
            scores=watch.closing_lines(seconds) if watch is not None else {},
        )

    def _break_off(self, coordinator: Coordinator) -> None:
        """Tell the other processes of a failure, or learn which came first, and free all ranks."""
        assert coordinator.error is not None
        # The others must know the cause before they see collectives break; without the store they
        # see just that.
        with contextlib.suppress(RuntimeError):
            coordinator.error = self.processes.fail(coordinator.error) or coordinator.error
        for group in self.groups:
            group.leave()

    def _make_recorder(self, first_step: int, past: Mapping[str, Any]) -> Recorder:
        return Recorder(
            folder=self.folder,
            train=self.config.train,
            plan=self.inputs.plan,
            method=self.method,
            published=self.trainee.published,
            fingerprint=self.inputs.fingerprint,
            report=self.report,
            first_step=first_step,
            cycles=self.cycles,
            watch=self._make_watch(past),
            skips_in_a_row=self.replicas[0].counts().skips_in_a_row,
        )

    def _make_watch(self, past: Mapping[str, Any]) -> Watch | None:
        if self.trainee.heldout is None:
            return None
        watch = Watch(self.trainee.heldout, self.config, past)
        self.report(watch.announcement())
        return watch

    def _make_threads(
        self,
        coordinator: Coordinator,
        recorder: Recorder | None,
        first_step: int,
        finish: Callable[[], None],
    ) -> Threads:
        every = self.config.train.save_every

        def after_step(replica: Replica, finished: int, step: Step) -> None:
            writer = recorder if replica.group.rank == 0 else None
            if writer is not None:
                writer.after_step(replica, finished, step)
            asked = coordinator.saves(finished)
            regular = asked or finished % every == 0
            if regular or saves_best(self.config, finished):
                check_agreement(replica.optimizer.master, replica.group, finished)
                if writer is not None and (regular or writer.has_best(finished)):
                    writer.save(replica, finished)
                    if asked:
                        self.report(f"SIGUSR1: step {finished} is saved; going on")
            if writer is not None and writer.gave_up:
                finish()

        def at_end(replica: Replica, finished: int) -> None:
            if finished > first_step and finished % every:
                check_agreement(replica.optimizer.master, replica.group, finished)

        return Threads(
            replicas=self.replicas,
            targets=self.target_replicas,
            trainee=self.trainee,
            plan=self.inputs.plan,
            steps=(first_step, self.config.train.steps),
            parts=self.config.train.accumulate,
            coordinator=coordinator,
            after_step=after_step,
            at_end=at_end,
        )

    def weights(self) -> dict[str, Tensor]:
        """The trained fp32 weights by parameter name, on the CPU."""
        return master_weights(self.replicas[0].state())

    def teardown(self) -> None:
        """Free graphs and groups, unless a thread that did not end still uses them."""
        if self._stuck:
            return
        for target in self.target_replicas:
            target.teardown()
        for replica in self.replicas:
            replica.teardown()
        leave_groups(self.groups, JOIN_S)


def _share_state(replica: Replica) -> None:
    """Take rank 0's state, each rank in a thread of its own, since all must take part."""
    enter_thread(replica.device, replica.threads)
    with replica.pool.activated():
        for tensor in (*replica.optimizer.flat_state(), replica.totals):
            replica.group.broadcast(tensor)
        replica.optimizer.refresh()
        # Also takes the memory that later checks need. Taken while another device waits in a
        # collective, it might wait for that device, and neither would go on.
        check_agreement(replica.optimizer.master, replica.group, 0)
    replica.pool.synchronize()


def _raise_first(error: BaseException, finished: int) -> None:
    if isinstance(error, (FrozenError, NonFiniteError, KeyboardInterrupt, Stopped)):
        raise error
    raise WorkerError(f"training stopped after step {finished}: {told(error)}") from error
