"""The processes of one job, as torchrun starts them, and what they tell each other.

All of it goes through one key-value store, and no call blocks for ever: whoever waits also hears
of a failure elsewhere, and of a process that is dead. While the others live there is no limit, for
a large target may load and warm up for long. Nothing here knows what the processes compute.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed.rendezvous import rendezvous

from maskgen.progress import say
from runtime.errors import BrokenCollectiveError, ConfigError, WorkerError, first_line
from runtime.ranks.awake import wait_until
from runtime.ranks.meeting import JOIN_S, ask, look, meet
from runtime.ranks.pulse import Pulse

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
LAUNCHERS = (
    "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_SIZE",
    "FLUX_JOB_SIZE",
)
"""How many processes srun, mpirun, jsrun or flux started."""
ALLOCATED = "SLURM_NTASKS"
"""Tasks of a Slurm job; one shell in the job sees it too."""
INSTEAD = (
    "start torchrun once a host instead: torchrun --nproc-per-node N -m runtime.train ... (under "
    "Slurm: srun --ntasks-per-node 1 torchrun --nnodes ...), or one process with --devices"
)
POLL_S = 0.2
"""Between two looks at what other processes say."""
CAUSE_S = 5.0
"""How long a process that is dead may stay unnoticed after it broke a collective."""

LEAVE_S = 10.0
"""How long process 0 stays for others that are through."""


@dataclass(frozen=True)
class Processes:
    """This process among those of the job."""

    rank: int
    size: int
    local_rank: int
    """Among the processes of this host."""
    local_size: int
    store: Any
    """A ``torch.distributed`` store that all share; one thread's client at a time, so what blocks
    takes ``store.clone()``."""
    pulse: Pulse | None = None
    """Watches whether the others live."""

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files and reports."""
        return self.rank == 0

    def publish(self, name: str, value: str) -> None:
        """Let the other processes see a value of this one."""
        ask(self.store.set, f"{name}/{self.rank}", value)

    def published(self, name: str) -> list[str | None]:
        """The values of all processes by rank, None for those that have published none."""
        return [self.peek(f"{name}/{rank}") for rank in range(self.size)]

    def gather(self, name: str, value: str) -> list[str]:
        """Publish a value and wait for those of all others.

        Raises:
            WorkerError: Another process failed, or is dead.
        """
        self.publish(name, value)
        return [self._await(f"{name}/{rank}") for rank in range(self.size)]

    def put_first(self, key: str, value: str) -> str:
        """Set a key unless another process already did; gives what it holds."""
        found: bytes = ask(self.store.compare_set, key, "", value)
        return found.decode()

    def peek(self, key: str) -> str | None:
        """What a key holds, if anything."""
        return look(self.store, key)

    def from_leader(self, key: str, value: str | None = None) -> str:
        """What process 0 says: it gives ``value``, the others wait for it.

        Raises:
            WorkerError: As ``gather``.
        """
        if self.leads:
            assert value is not None
            ask(self.store.set, key, value)
            return value
        return self._await(key)

    def end(self) -> None:
        """Wait until all processes are through; process 0, which may hold the store, leaves last.

        Raises:
            WorkerError: As ``gather``.
        """
        self.gather("ended", "")
        if self.pulse is not None:
            self.pulse.end()
        # All is done: whoever is gone now is not missed.
        with contextlib.suppress(WorkerError):
            self.publish("left", "")
            if self.leads:
                wait_until(lambda: None not in self.published("left"), LEAVE_S)

    def _await(self, key: str) -> str:
        while (found := self.peek(key)) is None:
            failure = self.failure()
            if failure is not None:
                raise failure
            time.sleep(POLL_S / 2)
        return found

    def fail(self, error: BaseException) -> WorkerError | None:
        """Tell the others that this process fails.

        Returns:
            None, or why: another process failed before this one, or is dead.
        """
        cause = None
        if isinstance(error, BrokenCollectiveError) and self.size > 1:
            # What broke it is about to be known.
            wait_until(lambda: self.failure() is not None, CAUSE_S)
            cause = self.failure()
        first = self.put_first("failed", f"{self.rank}:{first_line(cause or error)}")
        return self._failure(first) or cause

    def failure(self) -> WorkerError | None:
        """What made another process fail, or that one is dead."""
        lost = self.pulse.lost if self.pulse is not None else None
        # Looked up after it: a process that fails says so before it is gone.
        found = self.peek("failed")
        return (None if found is None else self._failure(found)) or lost

    def _failure(self, record: str) -> WorkerError | None:
        rank, _, what = record.partition(":")
        return None if int(rank) == self.rank else WorkerError(f"process {rank} failed: {what}")

    @contextlib.contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Let the others know of whatever ends the block, so that none waits in vain.

        Raises:
            WorkerError: What ended it came of the failure of another process, which this names.
        """
        try:
            yield
        except BaseException as error:
            first = None
            with contextlib.suppress(RuntimeError):
                first = self.fail(error)
            if first is not None and isinstance(error, WorkerError) and first.args != error.args:
                raise first from error
            raise


def single_process() -> Processes:
    """This process by itself."""
    return Processes(0, 1, 0, 1, distributed.HashStore())  # type: ignore[attr-defined]


def join_processes(environ: Mapping[str, str] = os.environ) -> Processes:
    """Meet the other processes that torchrun started, or be alone without it.

    Args:
        environ: torchrun sets ``VARIABLES``; without RANK and WORLD_SIZE the process is alone.

    Raises:
        ConfigError: Some variables are missing, one is no number or out of its range, or another
            launcher started several processes, each of which would be alone.
        WorkerError: The others cannot be reached.
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        _check_alone(environ)
        return single_process()
    missing = [name for name in VARIABLES if name not in environ]
    if missing:
        raise ConfigError(
            "environment",
            ", ".join(missing),
            f"must be set where RANK or WORLD_SIZE is; torchrun sets all of {VARIABLES}",
        )
    rank, size, local_rank, local_size = (_number(environ, name) for name in VARIABLES[:4])
    for name, number, count in (("RANK", rank, size), ("LOCAL_RANK", local_rank, local_size)):
        if not 0 <= number < count:
            raise ConfigError(name, number, f"must be 0 to {count - 1}, as torchrun sets it")
    try:
        store, _, _ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=JOIN_S)))
    except RuntimeError as error:
        where = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        raise WorkerError(
            f"process {rank} cannot meet the {size - 1} others at {where}: {first_line(error)}"
        ) from error
    shared = meet(store, rank, size)
    pulse = Pulse(shared, rank, size)
    pulse.start()
    return Processes(rank, size, local_rank, local_size, shared, pulse)


def _check_alone(environ: Mapping[str, str]) -> None:
    """Refuse to be one of several processes that know nothing of each other."""
    for name in LAUNCHERS:
        if _count(environ, name) > 1:
            raise ConfigError(
                name,
                environ[name],
                f"several processes were started without RANK and WORLD_SIZE, and each would "
                f"train the whole run by itself; {INSTEAD}",
            )
    tasks = 1 if LAUNCHERS[0] in environ else _count(environ, ALLOCATED)
    if tasks > 1 and _count(environ, "SLURM_PROCID") > 0:
        rule = f"this is one of several tasks, without RANK and WORLD_SIZE; {INSTEAD}"
        raise ConfigError(ALLOCATED, environ[ALLOCATED], rule)
    if tasks > 1:
        say(f"{ALLOCATED} = {tasks}, and this process trains alone; to train together, {INSTEAD}")


def _count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError as error:
        raise ConfigError(name, environ[name], "must be a number, as torchrun sets it") from error
