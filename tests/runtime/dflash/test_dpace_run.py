"""Runs with D-PACE from end to end: they learn, resume, export, and draft the target's own text."""

import json

import pytest
import torch

from runtime.evaluate import main as evaluate
from runtime.generate import main as generate
from runtime.train import main as train_command
from runtime.training.checkpoint import find_checkpoints
from runtime.training.metrics import read_metrics
from tests.runtime.tiny_root import command, make_root, options
from tests.runtime.tiny_run import losses, train
from tests.runtime.training.test_trainer import prepared

DPACE = {"loss": "dpace"}


@pytest.fixture(autouse=True)
def quiet(capsys):
    yield
    capsys.readouterr()


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_a_run_learns_and_nothing_is_built_after_freeze(tmp_path, alpha):
    config = prepared(tmp_path, "a", train={**DPACE, "dpace_alpha": alpha, "steps": 40})
    result, rows, _ = train(config)
    expected = "after freeze: 0 compiles, 0 FX traces, 0 host mask builds, 40 steps (eager)"
    assert result.summary == expected
    assert losses(rows)[-5:].mean() < losses(rows)[:5].mean() - 0.2


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    config = prepared(tmp_path, "whole", train=DPACE)
    _, rows, weights = train(config)
    _, resumed_from = find_checkpoints(tmp_path / "whole" / "run" / "checkpoints")
    assert resumed_from.step == 3
    _, again, resumed = train(config, first_step=3, state=resumed_from.load())
    assert losses(again).tolist() == losses(rows).tolist()
    for name, weight in weights.items():
        assert torch.equal(weight, resumed[name]), name


def test_the_loss_shown_is_the_mean_cross_entropy_without_decay(tmp_path):
    """The first drafter is the same, and so is what is shown of it; its gradients differ."""
    plain = prepared(tmp_path, "plain", train={"gamma": 0.0, "steps": 2})
    dpace = prepared(tmp_path, "dpace", train={**DPACE, "steps": 2})
    (_, shown, _), (_, expected, _) = train(dpace), train(plain)
    for name in ("loss", "tau_forced", "accuracy", "anchors_kept"):
        assert shown[0][name] == pytest.approx(expected[0][name], rel=1e-6), name
    assert shown[0]["grad_norm"] != pytest.approx(expected[0]["grad_norm"], rel=0.01)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_root(tmp_path_factory.mktemp("dpace"))


def test_a_drafter_is_trained_resumed_exported_and_drafts_the_targets_text(root):
    dpace = {"train.loss": "dpace", "train.dpace_alpha": 0.3}
    shown = command(train_command, *options(root, "run", **dpace)).output
    assert "slot weights" in shown
    assert "D-PACE, alpha 0.3" in shown
    folder = root / "run"
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [2, 4, 6]
    record = json.loads((folder / "run.json").read_text())["config"]["train"]
    assert (record["loss"], record["dpace_alpha"]) == ("dpace", 0.3)
    again = command(train_command, *options(root, "run", **dpace)).output
    assert "this run is finished: 6 steps" in again
    scored = command(evaluate, *options(root, "run", **dpace), "--json").stdout
    result = json.loads(scored)
    assert (result["dtype"], result["exact"]) == ("float32", True)
    command(generate, "--drafter", folder / "drafter", "--prompt", "tell", "--max-new-tokens", 4)


def test_a_run_of_the_other_loss_is_not_gone_on_with(root):
    command(train_command, *options(root, "decayed"))
    other = options(root, "decayed", **{"train.loss": "dpace"})
    assert "train.loss" in command(train_command, *other, code=1).output
    # A default that is spelled out is the same run.
    same = options(root, "decayed", **{"train.loss": "decay", "train.dpace_alpha": 0.5})
    assert "this run is finished" in command(train_command, *same).output
