"""Several runs one after another in two processes under torchrun, each broken in its own way.

    torchrun --nproc-per-node 2 torchrun_job.py FOLDER DEVICES RUN...

FOLDER holds config.json; outcome-RANK.json is written there after each run. The names of the runs
are the methods of ``Job``; the last may be the one that kills process 1.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo
from torch import distributed

from runtime.config import parse_config
from runtime.dflash.settings import DFlashConfig
from runtime.errors import TrainingError
from runtime.ranks import pulse
from runtime.ranks.processes import join_processes
from runtime.training.checkpoint import find_checkpoints
from tests.runtime.tiny_run import first_drafter, make_trainer

STEPS = 24
QUIET_S = 4.0
ROOT = Path(__file__).parents[2]


def torchrun(*command, limit_s=150.0, act=None):
    """Run two processes; ``act`` is called with the launcher while they run.

    Returns:
        The launcher's exit code and what all wrote to the two streams.
    """
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    launcher = subprocess.Popen(
        [*launch, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    try:
        if act is not None:
            act(launcher)
        out, errors = launcher.communicate(timeout=limit_s)
    finally:
        launcher.kill()
    return launcher.returncode, out, errors


def torchrun_job(folder, config, devices, runs):
    """Do the runs; gives the exit code, the error stream, and each process's outcomes by run."""
    (folder / "config.json").write_text(json.dumps(config.as_dict()))
    code, _, errors = torchrun(Path(__file__), folder, devices, *runs)
    files = [folder / f"outcome-{rank}.json" for rank in (0, 1)]
    assert all(file.exists() for file in files), errors
    return code, errors, [json.loads(file.read_text()) for file in files]


class Job:
    def __init__(self, folder, devices):
        self.folder = folder
        self.devices = devices
        self.config = parse_config(json.loads((folder / "config.json").read_text()), DFlashConfig)
        self.processes = join_processes()
        self.outcomes = {}

    def two(self):
        self.train("two")

    def four(self):
        self.train("four", workers=2)

    def stopped(self):
        self.train("stopped", break_it=self.at_sample(6, stop, pause_s=0.04))

    def resumed(self):
        self.train("resumed", resume="stopped")

    def flipped(self):
        def flip_a_bit(trainer):
            if self.processes.rank == 1:
                trainer.replicas[0].optimizer.master.view(torch.int32)[7] ^= 1 << 20

        self.train("flipped", break_it=flip_a_bit)

    def raised(self):
        self.train("raised", steps=500, break_it=self.at_sample(20, lose_disk))

    def raised_in_four(self):
        self.train("raised_in_four", workers=2, steps=500, break_it=self.at_sample(20, lose_disk))

    def paused(self):
        """Process 1 is stopped, as by Ctrl-Z, for longer than a process may be silent."""

        def pause():
            again = f"sleep {2 * QUIET_S}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", again])
            os.kill(os.getpid(), signal.SIGSTOP)

        usual = pulse.SILENCE_S
        pulse.SILENCE_S = QUIET_S
        try:
            self.train("paused", break_it=self.at_sample(20, pause))
        finally:
            pulse.SILENCE_S = usual

    def killed(self):
        def die():
            (self.folder / "killed-now").touch()
            os.kill(os.getpid(), signal.SIGKILL)

        self.train("killed", steps=500, break_it=self.at_sample(20, die), last=True)

    def train(self, name, *, workers=1, break_it=None, resume=None, steps=STEPS, last=False):
        """One whole run; ``break_it`` is called with each process's trainer before its steps."""
        store = distributed.PrefixStore(name, self.processes.store)
        processes = replace(self.processes, store=store)
        devices = ",".join([self.devices] * workers)
        run = replace(self.config.run, folder=str(self.folder / name), devices=devices)
        config = replace(self.config, run=run, train=replace(self.config.train, steps=steps))
        Path(run.folder).mkdir(exist_ok=True)
        first_step, state = 0, None
        if resume:
            (newest, *_) = find_checkpoints(self.folder / resume / "checkpoints")
            first_step, state = newest.step, newest.load()
        trainer = make_trainer(config, processes=processes)
        began = time.monotonic()
        try:
            trainer.prepare()
            trainer.start_from(weights=first_drafter().state_dict(), state=state)
            if break_it is not None:
                break_it(trainer)
            began = time.monotonic()
            result = trainer.run(first_step)
            weights = [replica.optimizer.master.tolist() for replica in trainer.replicas]
            outcome = {"steps": result.steps, "signal": result.signal, "weights": weights}
            processes.end()
        except TrainingError as error:
            outcome = {"error": type(error).__name__, "message": str(error)}
        finally:
            trainer.teardown()
            # Each run compiles for itself, and Dynamo would count its forms with the others'.
            torch._dynamo.reset()
        self.outcomes[name] = outcome | {"seconds": time.monotonic() - began}
        path = self.folder / f"outcome-{self.processes.rank}.json"
        path.write_text(json.dumps(self.outcomes))
        if not last:
            self.processes.gather(f"after {name}", "")

    def at_sample(self, count, act, *, pause_s=0.0):
        """In process 1, act when sample ``count`` is read; a pause makes the steps slow."""

        def break_it(trainer):
            read, taken = trainer.inputs.dataset.sample, []

            def sample(index):
                time.sleep(pause_s)
                taken.append(index)
                if len(taken) == count and self.processes.rank == 1:
                    act()
                return read(index)

            trainer.inputs.dataset.sample = sample

        return break_it


def lose_disk():
    raise OSError("disk is gone")


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


def main(folder, devices, *runs):
    job = Job(Path(folder), devices)
    for run in runs:
        getattr(job, run)()


if __name__ == "__main__":
    main(*sys.argv[1:])
