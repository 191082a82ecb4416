"""The commands one after another, as ``make train`` runs them, on a tiny target."""

import json
import os
import re
import shlex
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from maskgen.cli import main as maskgen
from runtime.errors import ConfigError
from runtime.evaluate import main as evaluate
from runtime.export import main as export
from runtime.generate import main as generate
from runtime.prepare import main as prepare
from runtime.train import main as train
from runtime.training.checkpoint import find_checkpoints
from runtime.training.metrics import read_metrics
from runtime.training.run_folder import taken
from tests.runtime.tiny_text import byte_target

RUN_FILE = """
[run]
folder = "{root}/run"
devices = "cpu"
threads = 1
[target]
model = "{root}/target"
num_features = 2
[data]
prompts = ["{root}/prompts.jsonl"]
folder = "{root}/data"
answers = "{root}/answers"
heldout = 3
max_new_tokens = 24
min_answer_tokens = 4
min_distinct_4grams = 0.0
[masks]
cache = "{root}/masks.zarr"
BLOCK_SIZE = 16
[[masks.entry]]
name = "dflash"
family = "dflash"
kind = "layouts"
context = [32, 64]
anchors = 8
draft_block_size = 4
draws = 4
[drafter]
num_layers = 2
[train]
steps = 6
global_batch = 2
log_every = 2
save_every = 3
[evaluate]
prompts = 2
max_new_tokens = 8
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    target = byte_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    other = byte_target(seed=1)
    other.model.save_pretrained(folder / "other")
    other.tokenizer.save_pretrained(folder / "other")
    prompts = [{"prompt": f"tell me {'more ' * (i % 4)}{i}"} for i in range(16)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (folder / "run.toml").write_text(RUN_FILE.format(root=folder))
    return folder


def call(command, root, *options, config=True, code=0):
    where = ["--config", str(root / "run.toml")] if config else []
    result = CliRunner().invoke(command, [*where, *options])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def trained(root):
    call(prepare, root)
    call(maskgen, root, "build", str(root / "run.toml"), config=False)
    return call(train, root)


def test_training_ends_with_the_line_and_a_table(root, trained):
    line = "after freeze: 0 compiles, 0 FX traces, 0 host mask builds, 6 steps (eager)"
    assert trained.stdout.splitlines()[0] == line
    assert re.search(r"^steps +6 of 6$", trained.stdout, flags=re.MULTILINE)
    assert re.search(r"^time of these 6 steps +\d+ s$", trained.stdout, flags=re.MULTILINE)
    run = root / "run"
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [2, 4, 6]
    assert (run / "metrics.png").read_bytes()[:4] == b"\x89PNG"
    record = json.loads((run / "run.json").read_text())
    assert record["config"]["train"]["steps"] == 6
    assert len(record["mask_version"]) == 64
    published = json.loads((run / "drafter" / "config.json").read_text())
    assert published["architectures"] == ["DFlashDraftModel"]
    assert published["block_size"] == 4


def test_what_a_run_prints_explains_itself_and_names_the_next_command(root, trained):
    assert trained.stderr.count("tau~: tokens that a call of the target would give") == 1
    assert trained.stderr.index("tau~: ") < trained.stderr.index("tau~ ")
    assert re.search(
        r"^feeder-0.* \d+% of the run ahead of the steps", trained.stdout, re.MULTILINE
    )
    (command,) = re.findall("^next: python -m (.*)$", trained.stdout, re.MULTILINE)
    name, *arguments = shlex.split(command)
    assert (name, arguments) == ("runtime.evaluate", ["--config", str(root / "run.toml")])
    scored = call(evaluate, root, *arguments, config=False)
    assert "tau: tokens that a call of the target gives, 1 without drafts" in scored.stdout
    (command,) = re.findall("^next: python -m (.*)$", scored.stdout, re.MULTILINE)
    name, *arguments = shlex.split(command)
    assert name == "runtime.generate"
    made = CliRunner().invoke(generate, [*arguments, "--max-new-tokens", "4"])
    assert made.exit_code == 0, made.output


def test_the_same_command_again_trains_nothing(root, trained):
    again = call(train, root)
    assert "0 steps (eager)" in again.stdout
    assert "time of" not in again.stdout
    assert len(read_metrics(root / "run" / "metrics.jsonl")) == 3


@pytest.fixture
def copied(root, trained, tmp_path):
    """A copy of the finished run, and the options that name it."""
    shutil.copytree(root / "run", tmp_path / "run")
    return tmp_path / "run", ["--set", f"run.folder={tmp_path}/run"]


def drafter_bytes(run):
    return {path.name: path.read_bytes() for path in (run / "drafter").iterdir()}


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: shutil.rmtree(folder),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "target.json").unlink(),
        lambda folder: (folder / "target.json").write_text("{"),
        lambda folder: os.truncate(folder / "model.safetensors", 1000),
        lambda folder: (folder / "config.json").write_text("{}"),
    ],
)
def test_a_finished_runs_drafter_that_is_not_whole_is_exported_again(root, copied, damage):
    run, options = copied
    whole = drafter_bytes(run)
    again = call(train, root, *options)
    assert "exporting" not in again.stderr
    damage(run / "drafter")
    again = call(train, root, *options)
    assert f"{run}/drafter holds no whole drafter of step 6: exporting it" in again.stderr
    assert drafter_bytes(run) == whole


def test_a_drafter_of_an_earlier_step_is_not_that_of_a_finished_run(root, copied):
    run, options = copied
    whole = drafter_bytes(run)
    call(export, root, *options, "--step", "3")
    assert drafter_bytes(run) != whole
    assert "of step 6: exporting it" in call(train, root, *options).stderr
    assert drafter_bytes(run) == whole


def test_a_finished_run_whose_last_checkpoint_is_damaged_goes_on_from_the_one_before(root, copied):
    run, options = copied
    whole = drafter_bytes(run)
    shutil.rmtree(run / "drafter")
    last = run / "checkpoints" / "step-00000006" / "state.safetensors"
    os.truncate(last, last.stat().st_size - 1)
    again = call(train, root, *options)
    assert f"passing over a checkpoint: {last} is damaged" in again.stderr
    assert "resuming from step 3 of 6" in again.stderr
    assert drafter_bytes(run) == whole
    assert [item.step for item in find_checkpoints(run / "checkpoints")] == [6, 3]
    assert "0 steps (eager)" in call(train, root, *options).stdout


def test_a_run_folder_of_a_later_release_is_not_trained_over(root, copied):
    run, options = copied
    for meta in (run / "checkpoints").glob("*/meta.json"):
        meta.write_text('{"format": 4}')
    before = sorted(path.stat().st_mtime_ns for path in run.rglob("*"))
    refused = call(train, root, *options, code=1)
    assert "meta.json is of format 4, and this release reads formats up to 3" in refused.stderr
    assert sorted(path.stat().st_mtime_ns for path in run.rglob("*")) == before


def test_checkpoints_that_lie_elsewhere_are_forgotten_by_fresh(root, copied, tmp_path):
    run, options = copied
    (run / "checkpoints").rename(tmp_path / "disk")
    (run / "checkpoints").symlink_to(tmp_path / "disk")
    assert "this run is finished" in call(train, root, *options).stderr
    fresh = call(train, root, *options, "--fresh", "--set", "train.save_every=6")
    assert "6 steps (eager)" in fresh.stdout
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["step-00000006"]
    assert (run / "checkpoints").is_symlink()


def test_evaluation_compares_with_the_targets_own_text(root, trained):
    result = json.loads(call(evaluate, root, "--json").stdout)
    assert result["exact"] is True
    assert result["prompts"] == 2
    assert 1.0 <= result["untrained"]["tau"] <= 4.0
    assert (root / "run" / "evaluate.json").exists()


def test_features_made_in_the_step_train_as_stored_ones(root, trained):
    options = ["--set", f"data.folder={root}/online", "--set", "data.features=online"]
    call(prepare, root, *options)
    call(train, root, *options, "--set", f"run.folder={root}/run-online")
    stored = read_metrics(root / "run" / "metrics.jsonl")
    online = read_metrics(root / "run-online" / "metrics.jsonl")
    np.testing.assert_allclose(
        [row["loss"] for row in online], [row["loss"] for row in stored], rtol=2e-2
    )
    # From a target of its own they come in its dtype, not in that of the stored ones.
    call(train, root, *options, "--target-devices", "cpu", "--set", f"run.folder={root}/run-apart")
    apart = read_metrics(root / "run-apart" / "metrics.jsonl")
    for name in ("loss", "grad_norm", "tau_forced"):
        assert [row[name] for row in apart] == [row[name] for row in online]


def test_other_settings_do_not_take_over_a_runs_checkpoints(root, trained):
    result = call(train, root, "--set", "train.lr=5e-4", code=1)
    assert "checkpoints of another run; changed: train.lr 0.001 -> 0.0005;" in result.stderr
    call(train, root, "--set", "train.lr=5e-4", "--fresh")
    assert find_checkpoints(root / "run" / "checkpoints")[0].step == 6
    call(train, root, "--fresh")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--set", "train.stepz=3"], 2, "did you mean 'steps'"),
        (
            ["--set", "data.folder=nowhere"],
            1,
            "nowhere holds no prepared data (no meta.json); "
            "run: python -m runtime.prepare --config {root}/run.toml --set data.folder=nowhere ",
        ),
        (["--set", "train.masks=dflesh"], 2, "must name an entry of"),
        (["--anchors", "data"], 2, "'dflash-data': must name an entry of"),
        (["--anchors", "drawn"], 2, "train.anchors = 'drawn': must be one of layouts, data"),
        (["--set", "masks.cache=nowhere.zarr"], 1, "nowhere.zarr"),
        (["--devices", "cuda:9"], 1, "asks for"),
        (["--set", "masks.cahce=x"], 2, "cahce"),
        (["--set", "train.global_batch=0"], 2, "must be at least 1"),
        (["--set", "train.lr=-1.0"], 2, "must be above 0"),
        (["--set", "train.min_lr_ratio=-0.1"], 2, "must be at least 0"),
        (["--devices", "cpu,cpu,cpu"], 2, "must be a multiple of the number of devices, 3"),
        (["--target-devices", "cpu"], 2, "must be empty where features are stored"),
        (["--devices", ""], 2, "must be a device such as"),
        (["--target-devices", "gpu"], 2, "must be a device such as"),
        (["--set", "data.features=online"], 1, "prepared with data.features = 'stored'"),
        (
            ["--set", "data.chat_template=plain"],
            1,
            'and the run asks for {{"chat_template": "plain',
        ),
        (["--set", "data.template.quick=true"], 1, 'was rendered with {{"chat_template": "target'),
        (["--set", "target.num_features=3"], 1, "prepared for 2 feature layers"),
        (["--set", "target.model={root}/other"], 1, "the run's target is"),
        (["--set", "target.model={root}/none"], 1, "there is no such folder"),
    ],
)
def test_a_mistake_is_told_in_one_line_before_the_target_is_loaded(
    root, trained, monkeypatch, options, code, message
):
    loads = []
    monkeypatch.setattr(
        "runtime.target.model.Target.load", lambda *args, **kwargs: loads.append(args)
    )
    options = [option.format(root=root) for option in options]
    result = call(train, root, *options, "--set", f"run.folder={root}/new/run", code=code)
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert message.format(root=root) in result.stderr
    assert loads == []
    assert not (root / "new").exists()


@pytest.fixture
def refused_late(monkeypatch):
    """Something that shows only once the target is loaded."""

    def refuse(*args):
        raise ConfigError("late", 1, "must show after the load")

    monkeypatch.setattr("runtime.dflash.method.initial_drafter", refuse)


def test_a_run_that_is_refused_after_the_load_leaves_nothing_either(root, trained, refused_late):
    refused = call(train, root, "--set", f"run.folder={root}/new/run", code=2)
    assert "must show after the load" in refused.stderr
    assert not (root / "new").exists()


def test_what_the_target_cannot_start_is_refused_before_its_weights_are_read(
    root, trained, monkeypatch
):
    def never(*args, **options):
        raise AssertionError("weights were read")

    monkeypatch.setattr("runtime.target.model.read_model", never)
    for command in (train, prepare):
        new = ["--set", f"data.folder={root}/none"] if command is prepare else ["--fresh"]
        refused = call(command, root, "--set", "drafter.num_layers=7", *new, code=2)
        assert "drafter.num_layers = 7" in refused.stderr


def test_the_same_target_elsewhere_goes_on_and_another_one_does_not(root, trained):
    shutil.copytree(root / "target", root / "moved")
    moved = call(train, root, "--set", f"target.model={root}/moved")
    assert "this run is finished: 6 steps" in moved.stderr
    again = call(prepare, root, "--target", str(root / "moved"))
    assert "up to date" in again.stdout
    other = call(train, root, "--set", f"target.model={root}/other", code=1)
    assert "was prepared with target" in other.stderr


def test_a_second_process_in_the_run_folder_is_refused(root, trained):
    with taken(str(root / "run")):
        for _ in range(2):
            result = call(train, root, code=1)
            assert "another process trains in" in result.stderr


def test_a_lock_that_its_holder_removed_is_none(root, trained, monkeypatch):
    lock = root / "run" / ".lock"
    monkeypatch.setattr("fcntl.flock", lambda *args: lock.unlink())
    result = call(train, root, code=1)
    assert "another process trains in" in result.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{root}/prompts.jsonl", "must be a writable folder"),
        ("{root}/new/" + "x" * 300, "must be a writable folder"),
        ("{root}/new/../aside", "must be a writable folder"),
        ("", "must name a folder"),
    ],
    ids=["file", "long", "detour", "empty"],
)
def test_a_run_folder_that_is_none_is_refused(root, trained, name, message):
    result = call(train, root, "--set", f"run.folder={name.format(root=root)}", code=2)
    assert message in result.stderr
    assert not (root / "new").exists()
    assert not (root / "aside").exists()


def test_json_is_all_that_json_prints(root, trained):
    rows = json.loads(call(train, root, "--json").stdout)
    assert (rows["steps"], rows["total_steps"], rows["signal"]) == (6, 6, None)
    assert rows["summary"].startswith("after freeze: 0 compiles")


def test_fresh_forgets_nothing_when_the_command_is_refused(root, trained, refused_late):
    before = {path: path.stat().st_mtime_ns for path in (root / "run").rglob("*")}
    assert find_checkpoints(root / "run" / "checkpoints")
    refused = call(train, root, "--fresh", "--devices", "cpu,cpu,cpu", code=2)
    assert "must be a multiple of the number of devices, 3" in refused.stderr
    late = call(train, root, "--fresh", code=2)
    assert "must show after the load" in late.stderr
    assert {path: path.stat().st_mtime_ns for path in (root / "run").rglob("*")} == before


def test_a_stop_by_signal_saves_exports_and_exits_as_one(root, trained):
    options = ["--set", f"run.folder={root}/stopped", "--set", "train.steps=5000"]
    metrics = root / "stopped" / "metrics.jsonl"

    def stop():
        until = time.monotonic() + 60.0
        while time.monotonic() < until and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    stopped = call(train, root, *options, code=128 + signal.SIGTERM)
    stopper.join()
    assert "SIGTERM; the same command goes on from step" in stopped.stdout
    (newest, *_) = find_checkpoints(root / "stopped" / "checkpoints")
    assert 0 < newest.step < 5000
    assert f"{newest.step} of 5000" in stopped.stdout


def test_help_loads_no_torch():
    import subprocess
    import sys

    for module in ("train", "prepare", "evaluate", "generate", "export", "compare"):
        code = (
            f"import sys\nfrom runtime.{module} import main\n"
            "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
            "assert 'torch' not in sys.modules"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=Path.cwd(),
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Usage:" in done.stdout


@pytest.mark.parametrize(
    ("name", "held", "asked"),
    [("max_new_tokens", "24", "9"), ("too_long", "'cut'", "'skip'"), ("heldout", "3", "2")],
)
def test_data_prepared_by_other_settings_are_refused(root, monkeypatch, name, held, asked):
    monkeypatch.setattr("runtime.target.model.Target.load", None)
    for command in (train, evaluate):
        setting = f"data.{name}={asked}"
        result = call(command, root, "--set", setting, code=1)
        assert f"prepared with data.{name} = {held}, and the run asks for {asked}" in result.stderr
        assert "run: python -m runtime.prepare --config" in result.stderr
