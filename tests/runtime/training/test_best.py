"""The best checkpoint of a scored run: kept, found, exported; and runs that end without better."""

import json

import pytest
import torch
from safetensors.torch import load_file

from maskgen.cli import main as maskgen
from runtime.errors import CheckpointError
from runtime.export import main as export
from runtime.train import main as train
from runtime.training.checkpoint import find_checkpoints, save_checkpoint
from runtime.training.choice import best_checkpoint, choose_checkpoint
from runtime.training.metrics import read_metrics
from tests.runtime.tiny_root import command, make_root, options
from tests.runtime.torchrun_job import torchrun

PARAMETRIC = """
[[masks.entry]]
name = "dflash-data"
family = "dflash"
kind = "parametric"
context = [32, 64]
anchors = 8
draft_block_size = 4
[drafter]
"""
OURS, THEIRS = "a" * 64, "b" * 64


@pytest.fixture(autouse=True)
def quiet(capsys):
    yield
    capsys.readouterr()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = make_root(tmp_path_factory.mktemp("best"))
    path = folder / "run.toml"
    path.write_text(path.read_text().replace("[drafter]\n", PARAMETRIC))
    command(maskgen, "build", path)
    return folder


def save(root, step, merit=None, *, fingerprint=OURS, keep=9, spare=None):
    heldout = {} if merit is None else {"merit": merit}
    save_checkpoint(
        root,
        {"x": torch.tensor(float(step))},
        step=step,
        fingerprint=fingerprint,
        published={},
        keep=keep,
        heldout=heldout,
        spare=spare,
    )


def steps(root):
    return [item.step for item in find_checkpoints(root)]


def test_the_best_is_never_swept(tmp_path):
    for step in range(1, 7):
        save(tmp_path, step, keep=2, spare=min(step, 2))
    assert steps(tmp_path) == [6, 5, 2]
    save(tmp_path, 7, keep=1, spare=7)
    assert steps(tmp_path) == [7]


def test_the_best_is_chosen_where_it_is_asked_for(tmp_path):
    for step, merit in ((1, 1.5), (2, 1.75), (3, None), (4, 1.75), (5, 1.25)):
        save(tmp_path, step, merit)
    save(tmp_path, 6, 9.0, fingerprint=THEIRS)
    save(tmp_path, 7)
    assert best_checkpoint(tmp_path, OURS, print).step == 2
    assert best_checkpoint(tmp_path, THEIRS, print).step == 6
    assert choose_checkpoint(tmp_path, None).step == 7
    assert choose_checkpoint(tmp_path, None, best=True).step == 6
    assert choose_checkpoint(tmp_path, 3, best=True).step == 3


def test_a_damaged_best_gives_way_to_the_next(tmp_path):
    for step, merit in ((1, 1.5), (2, 1.75)):
        save(tmp_path, step, merit)
    path = tmp_path / "step-00000002" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    told = []
    assert best_checkpoint(tmp_path, OURS, told.append).step == 1
    assert "step-00000002" in told[0]


def test_without_a_score_the_newest_is_chosen(tmp_path):
    assert best_checkpoint(tmp_path / "nothing", OURS, print) is None
    with pytest.raises(CheckpointError, match="must hold a checkpoint, found none"):
        choose_checkpoint(tmp_path / "nothing", None, best=True)
    for step in (1, 2):
        save(tmp_path, step)
    assert best_checkpoint(tmp_path, OURS, print) is None
    assert choose_checkpoint(tmp_path, None, best=True).step == 2


def scores(folder):
    rows = read_metrics(folder / "metrics.jsonl")
    return {row["step"]: row["heldout_tau"] for row in rows if "heldout_tau" in row}


def product(folder):
    """Step that a drafter says it is of, and its weights."""
    run = json.loads((folder / "drafter" / "target.json").read_text())["run"]
    return run["step"], load_file(folder / "drafter" / "model.safetensors")


def same(ours, others):
    return ours.keys() == others.keys() and all(torch.equal(ours[k], others[k]) for k in ours)


def test_a_run_exports_its_best(root):
    """At such a rate nothing changes what is drafted: the first score is the best."""
    asked = {"train.export": "best", "train.keep": 1, "evaluate.every": 2, "train.lr": 1e-12}
    done = command(train, *options(root, "best", **asked))
    folder = root / "best"
    found = scores(folder)
    assert [*found] == [2, 4, 6]
    assert len(set(found.values())) == 1
    assert steps(folder / "checkpoints") == [6, 2]
    assert "exported  " in done.output
    assert "the best, that of step 2" in done.output
    step, weights = product(folder)
    assert step == 2
    command(export, *options(root, "best"), "--step", 2, "--out", folder / "again")
    assert same(weights, load_file(folder / "again" / "model.safetensors"))
    done = command(export, *options(root, "best", **asked))
    assert "drafter of step 2, the best on held-out data of those that are kept" in done.output
    done = command(export, *options(root, "best"))
    assert done.output.strip().endswith("drafter of step 6")
    # The run is finished, and its product is another than it asks for: it is made again.
    command(train, *options(root, "best", **asked))
    assert product(folder)[0] == 2
    assert same(weights, product(folder)[1])


def test_a_better_one_takes_the_place_of_the_best(root):
    """What is exported is what the log says is best, whichever it is."""
    asked = {"train.export": "best", "train.keep": 1, "evaluate.every": 1, "train.lr": 0.03}
    command(train, *options(root, "moving", **{**asked, "train.steps": 12}))
    found = scores(root / "moving")
    best = max(found, key=lambda step: (found[step], -step))
    assert product(root / "moving")[0] == best
    assert steps(root / "moving" / "checkpoints") == [*dict.fromkeys((12, best))]


def test_without_it_the_newest_is_exported(root):
    asked = {"train.keep": 1, "evaluate.every": 2, "train.lr": 1e-12}
    command(train, *options(root, "newest", **asked))
    assert steps(root / "newest" / "checkpoints") == [6]
    assert product(root / "newest")[0] == 6


def test_a_run_ends_after_so_many_scores_without_a_better_one(root):
    asked = {"evaluate.every": 2, "evaluate.patience": 2, "train.lr": 1e-12, "train.steps": 40}
    done = command(train, *options(root, "patient", **asked))
    folder = root / "patient"
    assert [*scores(folder)] == [2, 4, 6]
    assert "steps 6 of 40" in " ".join(done.output.split())
    assert "no better held-out tau in 2 scores" in done.output
    assert product(folder)[0] == 6
    # The same command does nothing more; with more patience it goes on.
    done = command(train, *options(root, "patient", **asked))
    assert (
        "this run is finished: 6 steps; a larger train.steps or evaluate.patience goes on"
        in done.stderr
    )
    assert [*scores(folder)] == [2, 4, 6]
    command(train, *options(root, "patient", **{**asked, "evaluate.patience": 4}))
    assert [*scores(folder)] == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("processes", [1, 2])
def test_several_ranks_end_at_one_step_and_keep_the_best(root, processes):
    name = f"ranks-{processes}"
    asked = {"evaluate.every": 2, "evaluate.patience": 2, "train.lr": 1e-12, "train.steps": 400}
    asked |= {"train.export": "best", "train.keep": 1, "run.devices": "cpu,cpu"}
    settings = options(root, name, **asked)
    if processes == 1:
        command(train, *settings)
    else:
        code, _, errors = torchrun("-m", "runtime.train", *settings)
        assert code == 0, errors
    newest, best = steps(root / name / "checkpoints")
    # The other ranks may have begun steps that all then finish.
    assert best == 2
    assert 6 <= newest < 400
    assert product(root / name)[0] == 2


def test_patience_goes_on_over_a_resume(root):
    """The best and the wait are those of the whole run, not of the part since."""
    asked = {"evaluate.every": 2, "train.lr": 1e-12, "train.steps": 40, "train.export": "best"}
    first = {**asked, "evaluate.patience": 1}
    command(train, *options(root, "parts", **first))
    command(train, *options(root, "parts", **{**asked, "evaluate.patience": 3}))
    assert [*scores(root / "parts")] == [2, 4, 6, 8]
    assert product(root / "parts")[0] == 2


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"train.export": "best"}, "train.export = 'best': needs evaluate.every above 0"),
        ({"evaluate.patience": 3}, "evaluate.patience = 3: needs evaluate.every above 0"),
    ],
)
def test_what_needs_scores_is_refused_without_them(root, asked, message):
    done = command(train, *options(root, "refused", **asked), code=2)
    assert message in done.stderr
