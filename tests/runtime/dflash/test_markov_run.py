"""Runs with DSpark's heads from end to end: they learn, resume, export, and draft greedy text."""

import json

import pytest
import torch

from runtime.evaluate import main as evaluate
from runtime.generate import main as generate
from runtime.prepare import main as prepare
from runtime.train import main as train_command
from runtime.training.checkpoint import find_checkpoints
from runtime.training.metrics import read_metrics
from tests.runtime.dflash.test_distill_run import prepared as prepared_for_a_teacher
from tests.runtime.dflash.test_heldout import scores
from tests.runtime.tiny_root import command, make_root, options
from tests.runtime.tiny_run import losses, train
from tests.runtime.training.test_trainer import prepared

RANK = 6
HEAD = {"markov_rank": RANK}


@pytest.fixture(autouse=True)
def quiet(capsys):
    yield
    capsys.readouterr()


def test_a_run_learns_and_nothing_is_built_after_freeze(tmp_path):
    config = prepared(tmp_path, "a", train={"steps": 40}, evaluate={"every": 15}, drafter=HEAD)
    result, rows, weights = train(config)
    expected = "after freeze: 0 compiles, 0 FX traces, 0 host mask builds, 40 steps (eager)"
    assert result.summary == expected
    assert [row["step"] for row in scores(rows)] == [15, 30, 40]
    rows = [row for row in rows if "loss" in row]
    assert losses(rows)[-5:].mean() < losses(rows)[:5].mean() - 0.2
    assert weights["markov_head.markov_w2.weight"].abs().max() > 0.01


def test_the_first_step_is_dflashs(tmp_path):
    """As long as one part of the head is 0: the same loss and drafts, and the next ones differ."""
    shown = []
    for rank in (0, RANK):
        drafter = {"markov_rank": rank}
        shown.append(train(prepared(tmp_path, str(rank), train={"steps": 12}, drafter=drafter))[1])
    for name in ("loss", "tau_forced", "accuracy"):
        assert shown[0][0][name] == shown[1][0][name], name
    assert shown[0][0]["grad_norm"] < shown[1][0]["grad_norm"]
    assert shown[0][-1]["loss"] != pytest.approx(shown[1][-1]["loss"], rel=1e-4)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    config = prepared(tmp_path, "whole", train={"weight_decay": 0.1, "loss": "dpace"}, drafter=HEAD)
    _, rows, weights = train(config)
    _, resumed_from = find_checkpoints(tmp_path / "whole" / "run" / "checkpoints")
    assert resumed_from.step == 3
    _, again, resumed = train(config, first_step=3, state=resumed_from.load())
    assert losses(again).tolist() == losses(rows).tolist()
    assert resumed.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, resumed[name]), name


CONFIDENT = {"drafter": {**HEAD, "confidence": True}}


def test_confidence_is_learned_and_nothing_is_built_after_freeze(tmp_path):
    train_ = {"distill": "l1", "steps": 60}
    config = prepared_for_a_teacher(
        tmp_path, "a", train=train_, evaluate={"every": 25}, **CONFIDENT
    )
    result, rows, weights = train(config)
    expected = "after freeze: 0 compiles, 0 FX traces, 0 host mask builds, 60 steps (eager)"
    assert result.summary == expected
    assert [row["step"] for row in scores(rows)] == [25, 50, 60]
    found = [row["confidence_loss"] for row in rows if "confidence_loss" in row]
    assert len(found) == 60
    # Of a head that is 0 and says one half of everything.
    assert found[0] == pytest.approx(0.693147, abs=1e-5)
    assert sum(found[-5:]) / 5 < 0.67
    assert all(weight.any() for name, weight in weights.items() if name.startswith("confidence"))


@pytest.mark.parametrize("loss", ["decay", "dpace"])
def test_a_resumed_run_with_confidence_equals_an_uninterrupted_one(tmp_path, loss):
    config = prepared_for_a_teacher(
        tmp_path, "whole", train={"distill": "lk", "loss": loss}, **CONFIDENT
    )
    _, rows, weights = train(config)
    _, resumed_from = find_checkpoints(tmp_path / "whole" / "run" / "checkpoints")
    assert resumed_from.step == 3
    _, again, resumed = train(config, first_step=3, state=resumed_from.load())
    for name in ("loss", "confidence_loss", "overlap"):
        assert [row[name] for row in again] == [row[name] for row in rows]
    for name, weight in weights.items():
        assert torch.equal(weight, resumed[name]), name


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_root(tmp_path_factory.mktemp("markov"))


MARKOV = {"drafter.markov_rank": RANK}


def test_a_drafter_is_trained_exported_and_drafts_the_targets_text(root):
    command(train_command, *options(root, "run", **MARKOV))
    folder = root / "run" / "drafter"
    published = json.loads((folder / "config.json").read_text())
    assert published["architectures"] == ["Qwen3DSparkModel"]
    assert (published["markov_rank"], published["enable_confidence_head"]) == (RANK, False)
    again = command(train_command, *options(root, "run", **MARKOV)).output
    assert "this run is finished: 6 steps" in again
    result = json.loads(command(evaluate, *options(root, "run", **MARKOV), "--json").stdout)
    assert (result["dtype"], result["exact"]) == ("float32", True)
    ask = ("--drafter", folder, "--prompt", "tell", "--max-new-tokens", 4)
    command(generate, *ask, "--confidence", 0)
    for value, rule in ((0.5, "must be 0 for a drafter without a "), ("nan", "must be in [0, 1]")):
        refused = command(generate, *ask, "--confidence", value, code=2).output
        assert f"--confidence = {value}: {rule}" in refused
        assert "loading target" not in refused
    cut = {**MARKOV, "evaluate.confidence": 0.25}
    refused = command(evaluate, *options(root, "run", **cut), code=2).output
    assert "evaluate.confidence = 0.25: must be 0 for a drafter without a confidence" in refused
    assert "loading target" not in refused


def test_a_run_of_another_rank_is_not_gone_on_with(root):
    command(train_command, *options(root, "other"))
    refused = command(train_command, *options(root, "other", **MARKOV), code=1).output
    assert "drafter.markov_rank" in refused
    same = options(root, "other", **{"drafter.markov_rank": 0})
    assert "this run is finished" in command(train_command, *same).output


def test_a_drafter_with_confidence_cuts_its_blocks_and_the_text_stays(root):
    """Whatever the threshold, and however little the head has learned."""
    said = {**MARKOV, "drafter.confidence": "true", "train.distill": "kl"}
    said["data.folder"] = root / "taught"
    command(prepare, *options(root, "confident", **said))
    command(train_command, *options(root, "confident", **said))
    rows = read_metrics(root / "confident" / "metrics.jsonl")
    assert all(0 < row["confidence_loss"] < 1 for row in rows)
    folder = root / "confident" / "drafter"
    published = json.loads((folder / "config.json").read_text())
    assert published["enable_confidence_head"] is published["confidence_head_with_markov"] is True
    calls = []
    for confidence in (0, 0.4, 0.5, 1):
        cut = options(root, "confident", **said, **{"evaluate.confidence": confidence})
        result = json.loads(command(evaluate, *cut, "--json").stdout)
        assert result["exact"], confidence
        calls.append((result["trained"]["target_calls"], result["trained"]["new_tokens"]))
    assert sorted(calls) == calls
    assert calls[-1][0] == calls[-1][1]
    texts = set()
    for confidence in (0, 0.5, 1):
        ask = ("--drafter", folder, "--prompt", "tell", "--max-new-tokens", 8, "--json")
        texts.add(json.loads(command(generate, *ask, "--confidence", confidence).stdout)["text"])
    assert len(texts) == 1
    assert "--confidence" in command(generate, *ask, "--confidence", 1.5, code=2).output
