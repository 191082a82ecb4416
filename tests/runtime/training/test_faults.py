"""Every fault ends a run within seconds: first error whole, last finished step saved, no thread."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from maskgen.cli import main as maskgen
from runtime.dflash.step.anchors import anchor_candidates
from runtime.errors import NonFiniteError, WorkerError
from runtime.prepare import main as prepare
from runtime.static.graph import CaptureError, GraphPool, StaticStep
from runtime.target.model import Target
from runtime.train import main as train_command
from runtime.training.checkpoint import find_checkpoints, save_checkpoint
from runtime.training.metrics import read_metrics
from runtime.training.threads import Threads
from tests.runtime.static.test_gpu import prepared
from tests.runtime.test_train import RUN_FILE, call
from tests.runtime.tiny_run import (
    build_masks,
    first_drafter,
    losses,
    make_config,
    make_data,
    make_trainer,
    train,
)
from tests.runtime.tiny_text import byte_target

ROOT = Path(__file__).parents[3]
LIMIT_S = 45.0
"""Less than the 60 s after which a collective or a silent process is given up."""
LENGTHS = [14, 16, 11, 30, 27, 9, 32, 20, 12, 15, 31]
DEVICES = pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])


OURS = ("worker", "feeder", "target", "leave", "monitor", "MainThread")


def threads():
    """All threads; on a GPU machine torch's compilers keep some of their own."""
    own = torch.cuda.is_initialized()
    return {t for t in threading.enumerate() if not own or t.name.startswith(OURS)}


@pytest.fixture(autouse=True)
def no_thread_is_left(capsys):
    before = threads()
    yield
    until = time.monotonic() + LIMIT_S
    while threads() - before and time.monotonic() < until:
        time.sleep(0.05)
    assert threads() - before == set()
    capsys.readouterr()


def ready(tmp_path, *, devices="cpu", anchors="layouts", **options):
    config = make_config(
        tmp_path,
        run={"devices": devices},
        train={"anchors": anchors, "steps": 50, "save_every": 1000, **options},
    )
    make_data(tmp_path / "data", LENGTHS)
    build_masks(config)
    return make_trainer(config)


class Fault:
    """Raises in the thread that passes it once too often, and remembers when."""

    def __init__(self, passes, error):
        self.error = error
        self.at = None
        self._passes = passes
        self._lock = threading.Lock()

    def __call__(self):
        with self._lock:
            self._passes -= 1
            if self._passes >= 0:
                return
            self.at = self.at or time.monotonic()
        raise self.error


def before(function, fault):
    def faulty(*args, **kwargs):
        fault()
        return function(*args, **kwargs)

    return faulty


def start(trainer):
    trainer.prepare()
    trainer.start_from(weights=first_drafter().state_dict())


def run_into(trainer, fault, kind, match):
    """Run until the fault ends it; gives the step of the newest checkpoint."""
    with pytest.raises(kind, match=match) as caught:
        trainer.run()
    trainer.teardown()
    assert time.monotonic() - fault.at < LIMIT_S
    assert fault.error in (caught.value, caught.value.__cause__, caught.value.__cause__.__cause__)
    saved = find_checkpoints(trainer.folder / "checkpoints")
    return saved[0].step if saved else 0


def check_that_it_goes_on(trainer, *, rtol):
    """Resumed from what was saved, the run gives the losses of one that nothing disturbed."""
    config = trainer.config
    saved = find_checkpoints(trainer.folder / "checkpoints")[0]
    _, resumed, _ = train(config, first_step=saved.step, state=saved.load())
    _, whole, _ = train(config)
    count = config.train.steps - saved.step
    assert count > 0
    np.testing.assert_allclose(losses(resumed)[-count:], losses(whole)[-count:], rtol=rtol)


@pytest.mark.parametrize(("devices", "rank"), [("cpu", 0), ("cpu,cpu", 0), ("cpu,cpu", 1)])
def test_a_worker_that_raises_between_steps(tmp_path, devices, rank):
    trainer = ready(tmp_path, devices=devices, steps=12)
    start(trainer)
    fault = Fault(7, ValueError("bit flipped"))
    trainer.replicas[rank].run = before(trainer.replicas[rank].run, fault)
    match = "training stopped after step 7: ValueError: bit flipped"
    assert run_into(trainer, fault, WorkerError, match) == 7
    check_that_it_goes_on(trainer, rtol=0 if devices == "cpu" else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", range(2 if torch.cuda.device_count() > 1 else 0))
def test_a_worker_that_raises_between_steps_of_two_gpus(tmp_path, rank):
    config = prepared(tmp_path, "gpus", "cuda:0,cuda:1", global_batch=4, save_every=1000)
    trainer = make_trainer(config)
    start(trainer)
    fault = Fault(7, ValueError("bit flipped"))
    trainer.replicas[rank].run = before(trainer.replicas[rank].run, fault)
    match = "training stopped after step 7: ValueError: bit flipped"
    assert run_into(trainer, fault, WorkerError, match) == 7
    check_that_it_goes_on(trainer, rtol=1e-3)


@DEVICES
def test_a_worker_that_raises_within_a_step(tmp_path, devices):
    trainer = ready(tmp_path, devices=devices, steps=12)
    start(trainer)
    fault = Fault(5, ValueError("bit flipped"))
    for step in trainer.replicas[-1].train_steps.values():
        step.objective = before(step.objective, fault)
    match = "training stopped after step 5: ValueError: bit flipped"
    assert run_into(trainer, fault, WorkerError, match) == 5
    check_that_it_goes_on(trainer, rtol=0 if devices == "cpu" else 1e-5)


@DEVICES
def test_a_feeder_that_raises(tmp_path, devices):
    trainer = ready(tmp_path, devices=devices, steps=12)
    start(trainer)
    fault = Fault(20, OSError("disk is gone"))
    trainer.inputs.dataset.sample = before(trainer.inputs.dataset.sample, fault)
    step = run_into(trainer, fault, WorkerError, r"stopped after step \d+: disk is gone")
    counts = [sum(row >= 0 for row in trainer.inputs.plan[number].rows) for number in range(12)]
    filled = int((np.cumsum(counts) <= 20).sum())
    # With two feeders the one that is behind may be the one that meets the fault.
    assert filled - 2 * (devices != "cpu") <= step <= filled
    check_that_it_goes_on(trainer, rtol=0 if devices == "cpu" else 1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_of_replicas_that_differ_none_is_saved(tmp_path, rank):
    trainer = ready(tmp_path, devices="cpu,cpu", steps=12, save_every=4)
    start(trainer)
    replica = trainer.replicas[rank]
    run = replica.run

    def drifting(step, slot):
        run(step, slot)
        if step.number == 5:
            replica.optimizer.master[0] += 1e-3

    replica.run = drifting
    with pytest.raises(WorkerError, match=r"after step 8 the weights .* nothing was saved"):
        trainer.run()
    trainer.teardown()
    assert [found.step for found in find_checkpoints(trainer.folder / "checkpoints")] == [4]


def test_a_rank_that_is_slow_changes_nothing(tmp_path):
    trainer = ready(tmp_path, devices="cpu,cpu", steps=6)
    start(trainer)
    run = trainer.replicas[1].run

    def slowly(step, slot):
        time.sleep(0.3)
        run(step, slot)

    trainer.replicas[1].run = slowly
    assert trainer.run().steps == 6
    trainer.teardown()
    rows = read_metrics(trainer.folder / "metrics.jsonl")
    _, usual, _ = train(trainer.config)
    assert losses(rows).tolist() == losses(usual).tolist()


TOO_LITTLE = "CUDA out of memory. Tried to allocate 2.00 GiB"


def test_out_of_memory_in_the_warm_up(tmp_path):
    trainer = ready(tmp_path)
    fault = Fault(0, torch.OutOfMemoryError(TOO_LITTLE))
    trainer.replicas[0].steps[32].fn = fault
    hint = r"raise train\.accumulate, or lower train\.global_batch, .*anchors"
    wanted = rf"cannot warm up dflash/ctx32 on cpu: {TOO_LITTLE}; {hint}"
    with pytest.raises(CaptureError, match=wanted):
        trainer.prepare()
    trainer.teardown()


@pytest.mark.gpu
def test_out_of_memory_on_a_gpu_says_how_much_there_was():
    def fn():
        torch.empty(1 << 50, device="cuda")

    step = StaticStep(fn, GraphPool(torch.device("cuda:0")), "ctx4096 on cuda:0")
    wanted = (
        r"cannot warm up ctx4096 on cuda:0: CUDA out of memory.*"
        r"cuda:0 has [\d,]+ bytes, of which this process has reserved [\d,]+ and [\d,]+ are free; "
        "use smaller buckets"
    )
    with pytest.raises(CaptureError, match=re.compile(wanted, re.DOTALL)):
        step.warm_up()


def test_out_of_memory_in_the_run(tmp_path):
    trainer = ready(tmp_path, steps=12)
    start(trainer)
    fault = Fault(4, torch.OutOfMemoryError(TOO_LITTLE))
    for step in trainer.replicas[0].steps.values():
        step.fn = before(step.fn, fault)
    wanted = (
        rf"after step 4: cannot run dflash/ctx\d+ on cpu: {TOO_LITTLE}; raise train\.accumulate"
    )
    assert run_into(trainer, fault, WorkerError, wanted) == 4


@DEVICES
def test_features_that_are_nan_stop_the_run_and_the_last_good_weights_are_saved(tmp_path, devices):
    trainer = ready(tmp_path, devices=devices, max_skipped=3)
    start(trainer)
    sample, taken = trainer.inputs.dataset.sample, []

    def poisoned(index):
        found = sample(index)
        taken.append(index)
        if len(taken) > 16:
            found.features.fill_(float("nan"))
        return found

    trainer.inputs.dataset.sample = poisoned
    began = time.monotonic()
    with pytest.raises(NonFiniteError, match=r"3 steps in a row.*Look for NaN in the features"):
        trainer.run()
    trainer.teardown()
    assert time.monotonic() - began < LIMIT_S
    (newest, *_) = find_checkpoints(trainer.folder / "checkpoints")
    assert newest.step >= 5
    state = newest.load()
    assert all(tensor.isfinite().all() for name, tensor in state.items() if name != "counters")


def test_more_anchors_than_a_bucket_holds_are_drawn_from(tmp_path):
    trainer = ready(tmp_path, anchors="data", steps=2)
    start(trainer)
    trainer.run()
    trainer.teardown()
    candidates = anchor_candidates(trainer.inputs.dataset.sample(6).loss_mask.numpy())
    masks = trainer.replicas[0].train_steps[32].objective.bucket.masks
    assert len(candidates) > masks.params["anchors"].shape[1] == 6
    assert masks.params["n_valid"].max().item() == 6


def test_a_sample_longer_than_its_bucket(tmp_path):
    trainer = ready(tmp_path, steps=12)
    start(trainer)
    dataset = trainer.inputs.dataset
    sample, longest = dataset.sample, LENGTHS.index(32)
    began = time.monotonic()
    dataset.sample = lambda index: sample(longest)
    with pytest.raises(WorkerError, match=r"has 32 tokens, and its bucket holds 16.*prepare"):
        trainer.run()
    trainer.teardown()
    assert time.monotonic() - began < LIMIT_S


def test_what_a_killed_process_left_of_a_checkpoint_goes_at_the_next_save(tmp_path):
    left = tmp_path / ".step-00000003.tmp-abcdef"
    (left / "step-00000003").mkdir(parents=True)
    other = tmp_path / ".step-notes"
    other.mkdir()
    state = {"master.fc.weight": torch.zeros(2)}
    for step in (4, 5):
        save_checkpoint(tmp_path, state, step=step, fingerprint="f", published={}, keep=9)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".step-notes", "step-00000004", "step-00000005"
    ]  # fmt: skip


def test_a_stop_logs_the_interval_that_it_breaks_off(tmp_path):
    trainer = ready(tmp_path, steps=5000, log_every=1000)
    start(trainer)
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    result = trainer.run()
    trainer.teardown()
    timer.join()
    (*_, row) = read_metrics(trainer.folder / "metrics.jsonl")
    assert result.signal is signal.SIGINT
    assert row["step"] == result.steps
    assert row["loss"] > 0


def test_a_second_ctrl_c_does_not_wait_for_the_step_under_way(tmp_path, monkeypatch):
    trainer = ready(tmp_path)
    start(trainer)
    run, under_way, let_go = trainer.replicas[0].run, threading.Event(), threading.Event()

    def hanging(step, slot):
        run(step, slot)
        if step.number == 3:
            under_way.set()
            assert let_go.wait(60)

    def interrupt():
        assert under_way.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    def report(line):
        if "stopping after the steps under way" in line:
            os.kill(os.getpid(), signal.SIGINT)

    def stop(threads):
        threads_stop(threads)
        let_go.set()

    threads_stop = Threads.stop
    monkeypatch.setattr(Threads, "stop", stop)
    monkeypatch.setattr(trainer.replicas[0], "run", hanging)
    trainer.report = report
    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    trainer.teardown()
    sender.join()
    (saved, *_) = find_checkpoints(trainer.folder / "checkpoints")
    assert saved.step == 4


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run file with its target, data and masks, as the commands make them."""
    folder = tmp_path_factory.mktemp("faults")
    target = byte_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    prompts = [{"prompt": f"tell me {'more ' * (i % 4)}{i}"} for i in range(8)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (folder / "run.toml").write_text(RUN_FILE.format(root=folder))
    call(prepare, folder)
    call(maskgen, folder, "build", str(folder / "run.toml"), config=False)
    return folder


@pytest.fixture(scope="module")
def server(root):
    with subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.train_server", str(root / "target")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        yield process
        process.stdin.close()


class Command:
    """A training command in a process of its own."""

    def __init__(self, server, root, name, phase="none", **settings):
        self.server = server
        self.folder = root / name
        self.out = root / f"{name}-{time.monotonic_ns()}.txt"
        given = {"run.folder": self.folder, **settings}
        args = ["--config", str(root / "run.toml")]
        for key, value in given.items():
            args += ["--set", f"{key}={value}"]
        request = {"args": args, "phase": phase, "out": str(self.out)}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        self.pid = int(server.stdout.readline())
        self.lines = []

    def send_at(self, marker, number):
        """Send a signal when the output shows the marker."""
        until = time.monotonic() + 60
        while not (self.out.exists() and marker in self.out.read_text()):
            assert time.monotonic() < until, self.out.read_text()
            time.sleep(0.05)
        os.kill(self.pid, number)

    def signal_at(self, marker, number):
        """Send a signal that ends the command when the output shows the marker; its exit code."""
        self.send_at(marker, number)
        sent = time.monotonic()
        code = self.end()
        assert time.monotonic() - sent < LIMIT_S
        return code

    def end(self):
        code = int(self.server.stdout.readline())
        *lines, threads = self.out.read_text().splitlines()
        self.lines = lines
        assert threads == "threads left: []"
        return code

    @property
    def saved(self):
        return [item.step for item in find_checkpoints(self.folder / "checkpoints")]


SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)


@SIGNALS
@pytest.mark.parametrize("phase", ["loading", "warm-up"])
def test_a_signal_before_the_first_step(server, root, phase, number):
    command = Command(server, root, f"{phase}-{number.name}", phase)
    assert command.signal_at("halted", number) == 128 + number
    assert command.lines[-1] == f"stopped by {number.name}"
    assert "Traceback" not in command.out.read_text()
    assert command.saved == []


@SIGNALS
def test_a_signal_while_steps_run(server, root, number):
    command = Command(server, root, f"run-{number.name}", **{"train.steps": 5000})
    assert command.signal_at("step 4/5000", number) == 128 + number
    step = command.saved[0]
    assert step >= 4
    rows = read_metrics(command.folder / "metrics.jsonl")
    assert rows[-1]["step"] == step
    assert f"{number.name}; the same command goes on from step {step}" in command.out.read_text()


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_usr1_is_noted_before_the_steps_and_then_saves_each_time_and_goes_on(server, root, devices):
    settings = {"train.steps": 5000, "run.devices": devices}
    command = Command(server, root, f"usr1-{devices}", "pause", **settings)
    command.send_at("halted", signal.SIGUSR1)
    command.send_at("step 4/5000", signal.SIGUSR1)
    command.send_at("is saved; going on", signal.SIGUSR1)
    command.send_at("step 40/5000", signal.SIGUSR1)
    assert command.signal_at("step 60/5000", signal.SIGTERM) == 128 + signal.SIGTERM
    said = command.out.read_text()
    assert said.count("SIGUSR1: no steps run now, so there is nothing to save; going on") == 1
    steps = [int(step) for step in re.findall(r"SIGUSR1: step (\d+) is saved; going on", said)]
    first, second, third = steps
    assert 4 < first < second
    assert third > 40
    assert command.saved[0] >= 60


@SIGNALS
@pytest.mark.parametrize("every", [2, 1000])
def test_a_signal_during_a_save(server, root, every, number):
    """Of a checkpoint on the way, in the worker, and of the last one, in the main thread."""
    settings = {"train.steps": 6, "train.save_every": every}
    command = Command(server, root, f"save-{every}-{number.name}", "save", **settings)
    assert command.signal_at("halted", number) == 128 + number
    assert command.saved[0] >= min(every, 6)
    assert list((command.folder / "checkpoints").glob(".*")) == []


@SIGNALS
def test_a_signal_during_the_export_and_the_same_command_again(server, root, number):
    name = f"export-{number.name}"
    command = Command(server, root, name, "export")
    assert command.signal_at("halted", number) == 128 + number
    assert command.saved[0] == 6
    assert not (command.folder / "drafter").exists()
    again = Command(server, root, name)
    assert again.end() == 0
    assert again.lines[0] == (
        "this run is finished: 6 steps; a larger train.steps goes on, --fresh starts over"
    )
    assert again.lines[1].startswith("after freeze: 0 compiles")
    exported = command.folder / "drafter" / "config.json"
    assert (command.folder / "metrics.png").exists()
    first = exported.stat().st_mtime_ns
    assert Command(server, root, name).end() == 0
    assert exported.stat().st_mtime_ns == first


def test_the_command_itself_ends_at_ctrl_c(root):
    with subprocess.Popen(
        [sys.executable, "-m", "runtime.train", "--config", str(root / "run.toml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        line = process.stderr.readline()
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        code = process.wait()
    assert line.startswith("loading target ")
    assert code == 130, rest
    assert rest.endswith("stopped by SIGINT\n")
    assert time.monotonic() - sent < LIMIT_S


def test_artifacts_that_are_not_there_are_refused_before_the_target_is_loaded(root):
    result = call(train_command, root, "--trust-artifacts", code=1)
    assert "there are no warm-up artifacts for torch" in result.stderr
    assert "loading target" not in result.stderr


def test_a_cpu_run_has_no_artifacts_to_save(root):
    result = call(train_command, root, "--save-artifacts", "--set", f"run.folder={root}/artifacts")
    assert "saved no warm-up artifacts: nothing was compiled" in result.stderr


def test_out_of_memory_while_loading_is_one_line(root, monkeypatch):
    def too_large(*args, **kwargs):
        raise torch.OutOfMemoryError(TOO_LITTLE)

    monkeypatch.setattr(Target, "load", too_large)
    result = call(train_command, root, "--set", f"run.folder={root}/memory", code=1)
    assert f"\nError: out of memory: {TOO_LITTLE} (runtime/dflash/method.py:" in result.stderr
    assert result.stderr.endswith("fewer anchors, shorter contexts, a smaller batch or target\n")
