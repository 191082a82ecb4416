"""Runs with distillation from end to end, and data with and without the last hidden state."""

import json
import shutil

import pytest
import torch

from maskgen.cli import main as maskgen
from runtime.data.dataset import Dataset
from runtime.errors import DatasetError
from runtime.evaluate import main as evaluate
from runtime.prepare import main as prepare
from runtime.train import main as train_command
from runtime.training.checkpoint import find_checkpoints
from runtime.training.metrics import read_metrics
from tests.runtime.tiny_root import command, make_root, options
from tests.runtime.tiny_run import build_masks, inputs_of, losses, make_config, make_data, train

LENGTHS = [14, 16, 11, 30, 27, 9, 32, 20, 12, 15, 31]
KINDS = ["l1", "kl", "lk"]


@pytest.fixture(autouse=True)
def quiet(capsys):
    yield
    capsys.readouterr()


def prepared(tmp_path, name, *, last_hidden=True, **sections):
    folder = tmp_path / name
    folder.mkdir()
    config = make_config(folder, **sections)
    make_data(folder / "data", LENGTHS, last_hidden=last_hidden)
    build_masks(config)
    return config


@pytest.mark.parametrize("loss", ["decay", "dpace"])
def test_a_run_comes_nearer_to_its_teacher_and_nothing_is_built_after_freeze(tmp_path, loss):
    """Nothing is to be learned of random labels; the teacher's distributions fit the rows."""
    settings = {"distill": "l1", "distill_share": 1.0, "loss": loss, "steps": 40}
    config = prepared(tmp_path, "a", train=settings, evaluate={"every": 10})
    result, rows, _ = train(config)
    expected = "after freeze: 0 compiles, 0 FX traces, 0 host mask builds, 40 steps (eager)"
    assert result.summary == expected
    overlaps = [row["overlap"] for row in rows if "overlap" in row]
    assert len(overlaps) == 40
    assert all(0 < overlap < 1 for overlap in overlaps)
    assert sum(overlaps[-5:]) / 5 > sum(overlaps[:5]) / 5 + 0.02
    assert len([row for row in rows if "heldout_tau" in row]) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, kind):
    config = prepared(tmp_path, "whole", train={"distill": kind})
    _, rows, weights = train(config)
    _, resumed_from = find_checkpoints(tmp_path / "whole" / "run" / "checkpoints")
    assert resumed_from.step == 3
    _, again, resumed = train(config, first_step=3, state=resumed_from.load())
    assert losses(again).tolist() == losses(rows).tolist()
    assert [row["overlap"] for row in again] == [row["overlap"] for row in rows]
    for name, weight in weights.items():
        assert torch.equal(weight, resumed[name]), name


def test_the_loss_shown_is_the_cross_entropy(tmp_path):
    """The first drafter is the same, and so is what is shown of it; its gradients differ."""
    plain = prepared(tmp_path, "plain", train={"steps": 2})
    taught = prepared(tmp_path, "taught", train={"distill": "kl", "steps": 2})
    (_, shown, _), (_, expected, _) = train(taught), train(plain)
    for name in ("loss", "tau_forced", "accuracy", "anchors_kept"):
        assert shown[0][name] == pytest.approx(expected[0][name], rel=1e-6), name
    assert "overlap" not in expected[0]
    assert shown[0]["grad_norm"] != pytest.approx(expected[0]["grad_norm"], rel=0.01)


def test_data_without_the_last_hidden_state_are_refused(tmp_path):
    config = prepared(tmp_path, "a", last_hidden=False, train={"distill": "lk"})
    message = (
        r"was prepared without the target's last hidden state, and train\.distill = 'lk' needs it; "
        r"run: python -m runtime\.prepare --config FILE"
    )
    with pytest.raises(DatasetError, match=message):
        inputs_of(config)
    make_data(tmp_path / "a" / "data", LENGTHS, stored=False)
    assert not inputs_of(config).dataset.has_last_hidden


PARAMETRIC = """
[[masks.entry]]
name = "dflash-data"
family = "dflash"
kind = "parametric"
context = [32, 64]
anchors = 8
draft_block_size = 4
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """With a folder of data without the last hidden state, and one with it."""
    root = make_root(tmp_path_factory.mktemp("distill"))
    with (root / "run.toml").open("a") as file:
        file.write(PARAMETRIC)
    command(maskgen, "build", root / "run.toml")
    told = command(prepare, *distilling(root, "unused")).output
    assert "answering 0 prompts (12 answers are there)" in told
    return root


def distilling(root, name, kind="l1", **settings):
    """Options of a run that distils, on data prepared for one."""
    given = {"data.folder": root / "taught", "train.distill": kind, "train.lr": 0.01, **settings}
    return options(root, name, **given)


def metrics(root, name):
    """Rows of a run without what was timed."""
    rows = read_metrics(root / name / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k not in ("step_ms", "tokens_per_s")} for r in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_is_trained_scored_resumed_and_drafts_the_targets_text(root, kind):
    asked = {"train.distill_share": 0.7, "train.log_every": 1, "evaluate.every": 3}
    again = distilling(root, kind, kind, **asked)
    shown = command(train_command, *again).output
    assert "after freeze: 0 compiles, 0 FX traces, 0 host mask builds, 6 steps" in shown
    assert f"{kind}, share 0.7" in shown
    assert "held-out tau" in shown
    assert "overlap 0." in shown
    rows = metrics(root, kind)
    assert [row["step"] for row in rows if "overlap" in row] == [1, 2, 3, 4, 5, 6]
    newest, before = find_checkpoints(root / kind / "checkpoints")
    assert (newest.step, before.step) == (6, 3)
    shutil.rmtree(newest.folder)
    command(train_command, *again)
    assert metrics(root, kind) == rows
    result = json.loads(command(evaluate, *again, "--json").stdout)
    assert (result["dtype"], result["exact"]) == ("float32", True)


def test_features_from_the_step_and_from_another_device_are_the_same(root):
    """Bit for bit; stored ones were rounded to bfloat16."""
    found = {}
    online = {"data.folder": root / "online", "data.features": "online"}
    command(prepare, *options(root, "unused", **online))
    for name, given in (
        ("stored", {}),
        ("online", online),
        ("remote", {**online, "run.target_devices": "cpu"}),
    ):
        command(train_command, *distilling(root, name, "lk", **given))
        found[name] = metrics(root, name)
    assert found["online"] == found["remote"]
    assert found["online"] != found["stored"]
    for key in ("loss", "overlap"):
        values = [[row[key] for row in found[name]] for name in ("online", "stored")]
        assert values[0] == pytest.approx(values[1], rel=0.02), key


def test_data_with_the_last_hidden_state_serve_every_run(root):
    plain, taught = root / "data", root / "taught"
    opened = [Dataset.open(folder, "train") for folder in (plain, taught)]
    assert [data.has_last_hidden for data in opened] == [False, True]
    assert opened[0].layer_ids == opened[1].layer_ids
    assert opened[0].feature_scale == opened[1].feature_scale
    stamp = (taught / "meta.json").stat().st_mtime_ns
    told = command(prepare, *options(root, "unused", **{"data.folder": taught})).output
    assert "(up to date)" in told
    assert (taught / "meta.json").stat().st_mtime_ns == stamp
    for folder in (plain, taught):
        given = {"data.folder": folder, "evaluate.every": 3}
        command(train_command, *options(root, f"by-{folder.name}", **given))
    assert metrics(root, "by-data") == metrics(root, "by-taught")


def test_data_without_it_are_refused_and_prepared_again(root):
    folder = root / "other"
    shutil.copytree(root / "data", folder)
    asked = distilling(root, "refused", **{"data.folder": folder})
    told = command(train_command, *asked, code=1).output
    assert f"{folder} was prepared without the target's last hidden state" in told
    assert not (root / "refused").exists()
    told = command(prepare, *asked).output
    assert "up to date" not in told
    assert Dataset.open(folder, "train").has_last_hidden
    command(train_command, *asked)


def test_a_run_of_another_distillation_is_not_gone_on_with(root):
    command(train_command, *distilling(root, "first"))
    told = command(train_command, *distilling(root, "first", "kl"), code=1).output
    assert "train.distill" in told
