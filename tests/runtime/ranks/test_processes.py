"""Several processes: in threads over one store, and for real under torchrun, with Gloo."""

import json
import re
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import distributed

from maskgen.cli import main as maskgen
from runtime.errors import ConfigError, TrainingError, WorkerError
from runtime.prepare import main as prepare
from runtime.ranks.collectives import make_groups
from runtime.ranks.devices import Placement
from runtime.ranks.processes import VARIABLES, Processes, join_processes
from runtime.training.checkpoint import find_checkpoints
from runtime.training.metrics import read_metrics
from runtime.training.start import agree
from tests.runtime.test_train import RUN_FILE
from tests.runtime.tiny_run import build_masks, losses, make_config, make_data, train
from tests.runtime.tiny_text import byte_target
from tests.runtime.torchrun_job import QUIET_S, STEPS, torchrun, torchrun_job

LIMIT_S = 45.0
"""Less than the 60 s after which a collective or a silent process is given up."""
LENGTHS = [14, 16, 11, 30, 27, 9, 32, 20, 12, 15, 31]


def both(size=2):
    store = distributed.HashStore()
    return [Processes(rank, size, rank, size, store) for rank in range(size)]


def test_without_torchrun_a_process_is_alone():
    alone = join_processes({})
    assert (alone.rank, alone.size, alone.leads) == (0, 1, True)
    assert alone.gather("x", "7") == ["7"]
    assert alone.from_leader("y", "8") == "8"


@pytest.mark.parametrize("missing", VARIABLES)
def test_half_of_torchruns_variables_are_refused(missing):
    environ = {name: "1" for name in VARIABLES if name != missing}
    with pytest.raises(ConfigError, match=rf"'{missing}': must be set where RANK or WORLD_SIZE"):
        join_processes(environ)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_SIZE": "4", "PMI_RANK": "3"},
        {"MV2_COMM_WORLD_SIZE": "2"},
        {"FLUX_JOB_SIZE": "3", "MASTER_ADDR": "host", "MASTER_PORT": "1"},
    ],
)
def test_one_of_several_without_torchrun_is_refused(environ):
    name = next(iter(environ))
    with pytest.raises(ConfigError, match=f"{name} = '{environ[name]}': .*start torchrun once a"):
        join_processes(environ)


@pytest.mark.parametrize(
    ("environ", "warned"),
    [
        ({"SLURM_NTASKS": "8"}, True),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, True),
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": ""}, False),
    ],
)
def test_one_process_of_a_larger_job_is_warned(environ, warned, capsys):
    assert join_processes(environ).size == 1
    assert ("this process trains alone" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(("name", "number"), [("RANK", "2"), ("RANK", "-1"), ("LOCAL_RANK", "2")])
def test_a_rank_beyond_the_size_is_refused(name, number):
    environ = dict.fromkeys(VARIABLES, "0") | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(ConfigError, match=f"{name} = {number}: must be 0 to 1"):
        join_processes(environ | {name: number})


def test_a_rank_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match="RANK = 'first': must be a number"):
        join_processes(dict.fromkeys(VARIABLES, "0") | {"RANK": "first"})


def test_the_first_failure_is_the_one_that_all_hear_of():
    first, second, third = both(3)
    with pytest.raises(ZeroDivisionError), second.reporting_failures():
        raise ZeroDivisionError("by zero")
    assert second.failure() is None
    told = third.fail(ValueError("another"))
    for failure in (told, first.failure()):
        assert isinstance(failure, WorkerError)
        assert str(failure) == "process 1 failed: by zero"
    with pytest.raises(WorkerError, match="process 1 failed: by zero"):
        first.gather("x", "1")


def test_who_waits_for_a_process_that_is_dead_hears_of_it():
    first, second = both()
    second.publish("here", "1")
    assert first.gather("here", "0") == ["0", "1"]
    lost = WorkerError("process 1 has given no sign of life for 60 s")
    alone = replace(first, pulse=SimpleNamespace(lost=lost))
    for wait in (
        lambda: alone.gather("there", "0"),
        lambda: replace(alone, rank=1).from_leader("x"),
    ):
        with pytest.raises(WorkerError, match="process 1 has given no sign of life for 60 s"):
            wait()


def test_a_process_that_failed_before_it_was_gone_is_named_with_its_failure():
    first, second = both()
    second.fail(OSError("disk is gone"))
    alone = replace(first, pulse=SimpleNamespace(lost=WorkerError("process 1 was killed")))
    with pytest.raises(WorkerError, match="process 1 failed: disk is gone"):
        alone.gather("there", "0")


def test_the_leader_leaves_last():
    first, second = both()
    second.publish("ended", "")
    leaving = threading.Thread(target=first.end, daemon=True)
    leaving.start()
    leaving.join(0.3)
    assert leaving.is_alive()
    second.end()
    leaving.join(5.0)
    assert not leaving.is_alive()


def test_every_process_must_have_as_many_devices():
    first, second = both()
    second.publish("devices", "2 cpu")
    one = Placement((torch.device("cpu"),), torch.float32, 1)
    with pytest.raises(ConfigError, match=r"as many.* they have \['1 cpu', '2 cpu'\]"):
        make_groups(one, first)


def prepared(folder, **sections):
    config = make_config(folder, train={"save_every": 5, "steps": STEPS}, **sections)
    make_data(folder / "data", LENGTHS)
    build_masks(config)
    return config


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """What the runs of torchrun_job.py left: the folder, and each process's outcomes by run."""
    folder = tmp_path_factory.mktemp("job")
    runs = ("two", "four", "stopped", "resumed", "paused", "flipped", "raised_in_four", "killed")
    code, errors, outcomes = torchrun_job(folder, prepared(folder), "cpu,cpu", runs)
    # Process 1 killed itself in the last run, and nothing waited for it for long.
    assert code != 0
    assert "exitcode  : -9" in errors
    assert time.time() - (folder / "killed-now").stat().st_mtime < LIMIT_S
    assert set(runs[:-1]) <= set(outcomes[1]), errors
    return folder, outcomes


@pytest.mark.parametrize(("name", "threads"), [("two", 1), ("four", 2)])
def test_processes_give_the_run_of_one(job, tmp_path, name, threads):
    folder, outcomes = job
    _, rows, _ = train(prepared(tmp_path))
    assert outcomes[0][name]["steps"] == outcomes[1][name]["steps"] == STEPS
    np.testing.assert_allclose(
        losses(read_metrics(folder / name / "metrics.jsonl")), losses(rows), rtol=1e-4
    )
    ranks = [weights for outcome in outcomes for weights in outcome[name]["weights"]]
    assert len(ranks) == 2 * threads
    assert all(weights == ranks[0] for weights in ranks)


def test_a_stop_asked_of_one_process_ends_all_after_the_same_step(job):
    folder, outcomes = job
    stopped = [outcome["stopped"] for outcome in outcomes]
    assert [outcome["signal"] for outcome in stopped] == [signal.SIGTERM] * 2
    assert 3 <= stopped[0]["steps"] == stopped[1]["steps"] < STEPS
    (newest, *_) = find_checkpoints(folder / "stopped" / "checkpoints")
    assert newest.step == stopped[0]["steps"]


def test_a_resumed_run_equals_an_uninterrupted_one(job):
    _, outcomes = job
    whole, resumed, stopped = (
        [outcome[name] for outcome in outcomes] for name in ("two", "resumed", "stopped")
    )
    assert [len(outcome["weights"]) for outcome in resumed] == [1, 1]
    assert [outcome["weights"] for outcome in resumed] == [outcome["weights"] for outcome in whole]
    assert [outcome["steps"] for outcome in resumed] == [STEPS] * 2
    # It had something left to do.
    assert stopped[0]["weights"] != whole[0]["weights"]


def test_a_process_that_was_stopped_for_longer_than_the_time_out_goes_on(job):
    _, outcomes = job
    for outcome in outcomes:
        assert outcome["paused"]["seconds"] > 1.5 * QUIET_S
        assert outcome["paused"]["weights"] == outcome["two"]["weights"]


def test_a_flipped_bit_is_found_before_it_is_saved(job):
    folder, outcomes = job
    for outcome in outcomes:
        assert (
            "after step 5 the weights of the 2 replicas are not equal"
            in (outcome["flipped"]["message"])
        )
    assert not find_checkpoints(folder / "flipped" / "checkpoints")


def test_an_error_in_one_process_ends_all_with_its_message(job):
    _, outcomes = job
    first, second = (outcome["raised_in_four"] for outcome in outcomes)
    assert re.search(r"stopped after step \d+: process 1 failed: disk is gone", first["message"])
    assert re.search(r"stopped after step \d+: disk is gone", second["message"])
    assert max(first["seconds"], second["seconds"]) < LIMIT_S


def test_torchrun_asked_to_stop_saves_and_one_process_reports(tmp_path):
    target = byte_target()
    target.model.save_pretrained(tmp_path / "target")
    target.tokenizer.save_pretrained(tmp_path / "target")
    prompts = [{"prompt": f"tell me {'more ' * (i % 4)}{i}"} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE.format(root=tmp_path))
    for command in ([prepare, "--config", str(run_file)], [maskgen, "build", str(run_file)]):
        done = CliRunner().invoke(command[0], command[1:])
        assert done.exit_code == 0, done.output
    run = tmp_path / "run"

    def stop_in_the_run(launcher):
        until = time.monotonic() + 90
        while not read_metrics(run / "metrics.jsonl") and time.monotonic() < until:
            time.sleep(0.1)
        launcher.send_signal(signal.SIGTERM)

    options = ["--config", run_file, "--devices=cpu,cpu", "--set", "train.steps=50000"]
    code, out, errors = torchrun("-m", "runtime.train", *options, act=stop_in_the_run)
    assert code != 0
    (step,) = re.findall(r"stopped by +SIGTERM; the same command goes on from step (\d+)", out)
    assert out.count("after freeze: 0 compiles") == 1, errors
    assert errors.count("loading target") == 1
    assert find_checkpoints(run / "checkpoints")[0].step == int(step) < 50000
    assert {"run.json", "metrics.png", "drafter"} <= {path.name for path in run.iterdir()}


SHAPING = {
    "run": {"seed": 1},
    "target": {"model": "a", "features": [1, 2]},
    "train": {"lr": 0.002, "save_every": 100},
    "masks": {"128": "aa", "256": "bb"},
    "data": {"samples": 10, "sha256": {"tokens": "cc"}},
}


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        ("train", {"lr": 0.001}, "train.lr: 0.001 here, 0.002 on process 0"),
        ("train", {"save_every": 50}, "train.save_every: 50 here, 100 on process 0"),
        ("target", {"features": [1, 3]}, "target.features: [1, 3] here, [1, 2] on process 0"),
        ("run", {"extra": "x"}, 'run.extra: "x" here, null on process 0'),
        ("masks", {"256": "other"}, "the masks of context 256"),
        ("masks", {"512": "more", "128": "other"}, "the masks of context 128, 512"),
        ("data", {"sha256": {"tokens": "other"}}, "the prepared data"),
    ],
)
def test_what_a_process_sees_otherwise_is_told(section, values, told):
    first, second = both()
    assert agree(first, 7, SHAPING) == 7
    assert agree(second, 0, SHAPING) == 7
    other = {**SHAPING, section: {**SHAPING[section], **values}}
    with pytest.raises(
        TrainingError, match=r"process 1 has other settings, data or masks"
    ) as error:
        agree(second, 0, other)
    assert f"than process 0 ({told}); give every host" in str(error.value)
