"""A method that is no part of the project goes through every command: examples/next_token.py."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from maskgen.cli import main as maskgen
from runtime.compare import main as compare
from runtime.data.dataset import Dataset
from runtime.data.plan import NO_ROW
from runtime.evaluate import main as evaluate
from runtime.export import main as export
from runtime.methods import read_run
from runtime.prepare import main as prepare
from runtime.ranks.devices import place
from runtime.train import main as train
from runtime.training.checkpoint import find_checkpoints
from runtime.training.job import open_inputs
from runtime.training.metrics import read_metrics
from tests.runtime.tiny_root import command, options
from tests.runtime.tiny_text import byte_target

EXAMPLES = Path(__file__).parents[3] / "examples"
WINDOW = 4
RUN_FILE = """
[run]
method = "next_token:METHOD"
devices = "cpu"
threads = 1
[target]
model = "{root}/target"
[data]
prompts = ["{root}/prompts.jsonl"]
folder = "{root}/data"
heldout = 3
min_answer_tokens = 4
[masks]
cache = "{root}/masks.zarr"
BLOCK_SIZE = 16
[[masks.entry]]
name = "window"
family = "sliding_window"
kind = "static"
Q_LEN = [32, 64]
window = 4
[train]
masks = "window"
steps = 8
global_batch = 2
log_every = 1
save_every = 4
lr = 3e-2
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A run file of the example with its data and masks; the example is imported by its name."""
    folder = tmp_path_factory.mktemp("third")
    target = byte_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    lines = [{"prompt": f"say {i}", "completion": "abcd" * (3 + 4 * (i % 3))} for i in range(20)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "run.toml").write_text(RUN_FILE.format(root=folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        command(prepare, "--config", folder / "run.toml")
        command(maskgen, "build", folder / "run.toml")
        yield folder
        sys.modules.pop("next_token", None)


@pytest.fixture(scope="module")
def trained(root):
    return command(train, *options(root, "run"))


def losses(folder):
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def test_it_trains_and_leaves_what_every_run_leaves(root, trained):
    line = "after freeze: 0 compiles, 0 FX traces, 0 host mask builds, 8 steps (eager)"
    assert trained.stdout.splitlines()[0] == line
    rows = read_metrics(root / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert rows[-1]["tokens_per_s"] > 0
    assert (root / "run" / "metrics.png").read_bytes()[:4] == b"\x89PNG"
    newest, *_ = find_checkpoints(root / "run" / "checkpoints")
    assert newest.step == 8
    state = newest.load()
    for name, weight in load_file(root / "run" / "predictor" / "weights.safetensors").items():
        assert torch.equal(weight, state[f"master.{name}"]), name
    assert re.search(r"^predictor +.*/run/predictor$", trained.stdout, re.MULTILINE)


def test_its_first_loss_is_that_of_a_mask_drawn_by_hand(root, trained):
    """Batch and weights are the run's; attention is a dense softmax in float64."""
    method, config = read_run(root / "run.toml")
    placement = place("cpu", threads=1)
    inputs = open_inputs(method, config, "run.toml", placement, 1)
    step = inputs.plan[0]
    dataset = Dataset.open(config.data.folder, "train")
    trainee = method.load(
        config, inputs, placement, None, ranks=1, fresh=True, report=lambda line: None
    )
    first = {name: weight.double() for name, weight in trainee.first_weights().items()}

    total, weight = 0.0, 0.0
    for number in set(step.rows) - {NO_ROW}:
        sample = dataset.sample(number)
        ids, learned = sample.input_ids.long(), sample.loss_mask
        x = first["embed.weight"][ids]
        distance = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
        seen = (distance >= 0) & (distance < WINDOW)
        scores = (x @ x.T / 32**0.5).masked_fill(~seen, -torch.inf)
        hidden = x + scores.softmax(-1) @ x
        logits = (hidden @ first["head.weight"].T + first["head.bias"]).log_softmax(-1)
        for at in range(1, len(ids)):
            if learned[at]:
                total -= float(logits[at - 1, ids[at]])
                weight += 1
    np.testing.assert_allclose(losses(root / "run")[0], total / weight, rtol=1e-5)


def test_what_is_looked_at_before_and_after_knows_it_too(root, trained):
    planned = command(train, *options(root, "planned"), "--dry-run").stdout
    assert re.search(r"^ *64 +\d+ +[\d.]+% +\d+$", planned, re.MULTILINE)
    assert "- parameters and their memory: the method next_token:METHOD does not say" in planned
    shown = command(train, *options(root, "planned"), "--print-config").stdout
    assert re.search(r"^window/q64-kv64 +sliding_window +static +64 +64$", shown, re.MULTILINE)
    assert not (root / "planned").exists()
    both = json.loads(command(compare, root / "run", root / "run", "--json").stdout)
    assert both["curves"]["loss"] == [losses(root / "run")] * 2


def test_a_resumed_run_equals_an_uninterrupted_one(root, trained):
    given = options(root, "halves")
    command(train, *given)
    newest, *_ = find_checkpoints(root / "halves" / "checkpoints")
    for path in newest.folder.iterdir():
        path.unlink()
    newest.folder.rmdir()
    resumed = command(train, *given)
    assert "resuming from step 4 of 8" in resumed.stderr
    assert losses(root / "halves") == losses(root / "run")
    weights = [root / name / "predictor" / "weights.safetensors" for name in ("run", "halves")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_two_ranks_compute_what_one_does(root, trained):
    command(train, *options(root, "two"), "--devices", "cpu,cpu")
    np.testing.assert_allclose(losses(root / "two"), losses(root / "run"), rtol=1e-5)


def test_a_finished_run_owes_nothing_but_what_is_gone(root, trained):
    record = root / "run" / "predictor" / "run.json"
    was = record.read_text()
    record.unlink()
    again = command(train, *options(root, "run"))
    assert "this run is finished: 8 steps" in again.stderr
    assert record.read_text() == was


def test_a_checkpoint_is_exported(root, trained):
    out = root / "exported"
    done = command(export, *options(root, "run"), "--step", 4, "--out", out)
    assert done.stdout == f"{out}: predictor of step 4\n"
    assert json.loads((out / "run.json").read_text())["step"] == 4
    *_, oldest = find_checkpoints(root / "run" / "checkpoints")
    assert oldest.step == 4
    state = oldest.load()
    for name, weight in load_file(out / "weights.safetensors").items():
        assert torch.equal(weight, state[f"master.{name}"]), name


def test_it_is_evaluated(root, trained):
    done = command(evaluate, *options(root, "run"))
    found = json.loads((root / "run" / "evaluate.json").read_text())
    assert found["loss"] < found["uniform"]
    assert done.stdout == f"loss {found['loss']}\nuniform {found['uniform']}\n"


def test_an_option_of_another_method_is_refused(root):
    refused = command(train, *options(root, "none"), "--anchors", "data", code=2)
    assert refused.stderr.startswith("Error: train.anchors = 'data': unknown key in [train]; ")
    assert refused.stderr.count("\n") == 1
    assert not (root / "none").exists()


def test_a_run_does_not_go_on_with_another_method(root, trained, tmp_path, monkeypatch):
    (tmp_path / "negated.py").write_text("from next_token import METHOD\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    refused = command(train, *options(root, "run"), "--set", "run.method=negated:METHOD", code=1)
    assert 'run.method "next_token:METHOD" -> "negated:METHOD"' in refused.stderr
