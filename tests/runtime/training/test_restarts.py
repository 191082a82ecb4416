"""torchrun starts processes again after one was killed: the run goes on where it was saved last."""

import os
import re
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from torch import distributed

from runtime.ranks.awake import wait_until
from runtime.ranks.meeting import meet
from runtime.train import main as train
from runtime.training.checkpoint import find_checkpoints
from runtime.training.metrics import read_metrics
from tests.runtime.tiny_root import command, make_root, options
from tests.runtime.tiny_run import losses

ROOT = Path(__file__).parents[3]
LIMIT_S = 120.0
STEPS = 100


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run file with all that it needs, and the rows of a run that nothing disturbed."""
    folder = make_root(tmp_path_factory.mktemp("restarts"))
    command(train, *long_run(folder, "whole"), "--devices", "cpu,cpu")
    return folder


def long_run(root, name):
    # Nothing is saved on the way, unless it is asked for.
    settings = {"train.steps": STEPS, "train.log_every": 1, "train.save_every": 1000}
    return options(root, name, **settings)


class Agents:
    """Launchers of one host each, on this machine, and what they and their processes write."""

    def __init__(self, root, name, count):
        self.folder = root / name
        self.errors = [root / f"{name}-errors-{host}.txt" for host in range(count)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--nnodes={count}"]
        share = 2 // count
        launch = ["-m", "torch.distributed.run", *meet, f"--nproc-per-node={share}"]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self.launchers = []
        for errors in self.errors:
            arguments = [sys.executable, *launch, "--max-restarts=1", "-m", "runtime.train"]
            arguments += [*long_run(root, name), "--devices", ",".join(["cpu"] * share)]
            with errors.open("w") as stream:
                self.launchers.append(
                    subprocess.Popen(
                        arguments,
                        stdout=subprocess.DEVNULL,
                        stderr=stream,
                        cwd=ROOT,
                        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                        start_new_session=True,
                    )
                )

    def process(self, rank):
        """The process of a rank."""
        parents = {str(launcher.pid) for launcher in self.launchers}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                if parent in parents and f"\0RANK={rank}\0" in (folder / "environ").read_text():
                    return int(folder.name)
            except OSError:
                continue
        raise AssertionError(f"no process of rank {rank}: {self.said()}")

    def writer(self):
        """The process that holds the run folder, as people find it."""
        return int((self.folder / ".lock").read_text())

    def said(self):
        """All that was written for people."""
        return "".join(path.read_text() for path in self.errors)

    def await_step(self, step):
        def reached():
            assert None in [launcher.poll() for launcher in self.launchers], self.said()
            rows = read_metrics(self.folder / "metrics.jsonl")
            return bool(rows) and rows[-1]["step"] >= step

        assert wait_until(reached, LIMIT_S), self.said()

    def await_line(self, pattern):
        assert wait_until(lambda: re.search(pattern, self.said()) is not None, LIMIT_S), self.said()
        return re.search(pattern, self.said())[1]

    def end(self):
        return [launcher.wait(LIMIT_S) for launcher in self.launchers]

    def kill(self):
        for launcher in self.launchers:
            if launcher.poll() is None:
                launcher.terminate()
                launcher.wait(LIMIT_S)


@pytest.mark.parametrize(("hosts", "killed"), [(1, 1), (2, 0)])
def test_a_killed_process_costs_no_more_than_the_steps_since_the_newest_checkpoint(
    root, hosts, killed
):
    name = f"{hosts}-hosts"
    agents = Agents(root, name, hosts)
    try:
        agents.await_step(5)
        # Asked of the process that writes the files, or of one that does not.
        os.kill(agents.process(1) if killed else agents.writer(), signal.SIGUSR1)
        saved = int(agents.await_line(r"SIGUSR1: step (\d+) is saved; going on"))
        assert [item.step for item in find_checkpoints(root / name / "checkpoints")] == [saved]
        agents.await_step(saved + 5)
        process = agents.process(killed)
        os.kill(process, signal.SIGKILL)
        assert agents.end() == [0] * hosts, agents.said()
    finally:
        agents.kill()
    said = agents.said()
    assert said.count(f"resuming from step {saved} of {STEPS}") == 1
    assert re.search(
        rf"stopped after step \d+: process {killed} \(pid {process}\) was killed", said
    )
    assert "Traceback" not in said
    rows = {name: read_metrics(root / name / "metrics.jsonl") for name in ("whole", name)}
    assert [row["step"] for row in rows[name]] == [row["step"] for row in rows["whole"]]
    np.testing.assert_allclose(losses(rows[name]), losses(rows["whole"]), rtol=1e-3)
    assert (root / name / "drafter" / "config.json").exists()


def test_a_launcher_that_is_gone_ends_a_process_in_one_line(root):
    store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    environ = dict.fromkeys(("RANK", "LOCAL_WORLD_SIZE"), "1") | {"LOCAL_RANK": "0"}
    environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "runtime.train", *long_run(root, "alone"), "--devices", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | environ,
    ) as process:
        shared = meet(store, 0, 2)
        assert wait_until(partial(shared.check, ["beat/1"]), LIMIT_S)
        # The last references: the server goes with them.
        del shared, store
        out, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (1, "")
    (line,) = errors.splitlines()
    assert line.startswith("Error: lost touch with the other processes: ")
