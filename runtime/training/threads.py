"""The threads of one process's run: feeders, targets and workers, and the lanes between them."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial

from runtime.data.plan import Step, StepPlan
from runtime.errors import ReplicaMismatchError
from runtime.ranks.awake import wait_until
from runtime.static.buffers import InputSlot
from runtime.static.channels import Channel, Lane
from runtime.training.feeder import Feeder
from runtime.training.method import Trainee
from runtime.training.replica import Replica
from runtime.training.target_worker import TargetReplica, TargetWorker
from runtime.training.worker import Coordinator, Worker

InputLane = Lane[tuple[Step, InputSlot]]

CATCH_UP_S = 3.0
"""How long ranks behind one that failed may take up to its step."""


class Threads:
    """All threads of a run in this process.

    Args:
        replicas: One worker and one feeder each.
        targets: One target thread each; without any, feeders hand straight to workers.
        trainee: Fills the rows.
        plan: All steps.
        steps: First and last step, the last not included.
        parts: Micro-batches of each.
        coordinator: Keeps the workers in step.
        after_step: Called by each worker with (replica, finished steps, step).
        at_end: Called by each worker with (replica, finished steps), unless the run failed.
    """

    def __init__(
        self,
        *,
        replicas: Sequence[Replica],
        targets: Sequence[TargetReplica],
        trainee: Trainee,
        plan: StepPlan,
        steps: tuple[int, int],
        parts: int,
        coordinator: Coordinator,
        after_step: Callable[[Replica, int, Step], None],
        at_end: Callable[[Replica, int], None],
    ) -> None:
        self.replicas = replicas
        self.coordinator = coordinator
        inlets = _lanes(len(replicas), len(targets))
        outlets = _lanes(len(replicas), len(targets)) if targets else inlets
        self.feeders = [
            Feeder(
                replica=replica,
                lane=lane,
                trainee=trainee,
                plan=plan,
                steps=steps,
                parts=parts,
            )
            for replica, lane in zip(replicas, inlets, strict=True)
        ]
        self.targets = [
            TargetWorker(
                index=index,
                targets=len(targets),
                replica=target,
                inlets=inlets,
                outlets=outlets,
                items=parts * (steps[1] - steps[0]),
            )
            for index, target in enumerate(targets)
        ]
        self.workers = [
            Worker(
                rank=replica.group.rank,
                stepper=replica,
                source=lane,
                coordinator=coordinator,
                first_step=steps[0],
                after_step=partial(after_step, replica),
                at_end=partial(at_end, replica),
            )
            for replica, lane in zip(replicas, outlets, strict=True)
        ]

    def start(self) -> None:
        """Start all threads."""
        for thread in (*self.feeders, *self.targets, *self.workers):
            thread.start()

    def watch(self, report: Callable[[str], None]) -> None:
        """Wait until all workers have ended or something failed; reports a stop once."""
        reported = False
        while any(worker.is_alive() for worker in self.workers):
            if self.coordinator.failed.wait(0.2):
                return
            if self.coordinator.signal is not None and not reported:
                reported = True
                name = self.coordinator.signal.name
                report(f"{name}: stopping after the steps under way, which are saved")

    def worker_to_save(self) -> Worker | None:
        """Whose replica will have the state of the last finished step, if one surely does.

        After a failure it is that of the rank which failed. The others, ahead of it, are in
        collectives that will be broken off, and what a replay makes of half-reduced gradients is
        no state to resume from; those behind it are waited for.
        """
        workers, size = self.workers, self.replicas[0].group.size
        error = self.coordinator.error
        if error is None or size == 1:
            return workers[0]
        failed = next((worker for worker in workers if worker.error is error), None)
        if failed is None or size > len(workers) or isinstance(error, ReplicaMismatchError):
            return None

        def behind() -> list[Worker]:
            return [worker for worker in workers if worker.finished < failed.finished]

        wait_until(lambda: not any(worker.is_alive() for worker in behind()), CATCH_UP_S)
        return None if behind() else failed

    def stop(self) -> None:
        """Wake whoever waits for another thread, and end it."""
        for feeder in self.feeders:
            feeder.stop()
        for worker in self.workers:
            worker.source.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for all threads, for no longer than the time given; False if one still runs."""
        threads = (*self.workers, *self.targets, *self.feeders)
        return wait_until(lambda: not any(thread.is_alive() for thread in threads), timeout_s)

    def rates(self, seconds: float) -> dict[str, str]:
        """For people: thread -> how fast it was, and what it waited for in these seconds."""
        rates = {}
        for worker, feeder in zip(self.workers, self.feeders, strict=True):
            host_ms = 1e3 * statistics.median(worker.host_s or [0.0])
            rates[worker.name] = f"{host_ms:.2f} ms host time a step"
            ready = _share(feeder.waited_s, seconds)
            rates[feeder.name] = f"{ready} of the run ahead of the steps, with samples ready"
        for target in self.targets:
            rates[target.name] = (
                f"{target.served / max(target.seconds, 1e-9):,.0f} samples/s, waited "
                f"{_share(target.starved_s, seconds)} of the run for samples and "
                f"{_share(target.blocked_s, seconds)} for the steps"
            )
        return rates


def _share(waited_s: float, seconds: float) -> str:
    return f"{min(1.0, waited_s / max(seconds, 1e-9)):.0%}"


def _lanes(ranks: int, targets: int) -> list[InputLane]:
    return [Lane([Channel() for _ in range(max(1, targets))], rank, ranks) for rank in range(ranks)]
