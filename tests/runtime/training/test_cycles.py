"""Runs whose ``train.steps`` is raised: a new cosine after what was planned."""

import json
import math
import shutil

import pytest
import torch

from maskgen.cli import main as maskgen
from runtime.errors import ConfigError
from runtime.files.sealed import read_sealed, write_sealed
from runtime.train import main as train
from runtime.training.checkpoint import find_checkpoints
from runtime.training.cycles import described, planned
from runtime.training.metrics import read_metrics
from tests.runtime.tiny_root import command, make_root, options
from tests.runtime.torchrun_job import torchrun
from tests.runtime.training.test_best import PARAMETRIC, product, scores

BASE = {"train.log_every": 1, "train.warmup_ratio": 0.34, "train.min_lr_ratio": 0.25}


@pytest.fixture(autouse=True)
def quiet(capsys):
    yield
    capsys.readouterr()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = make_root(tmp_path_factory.mktemp("cycles"))
    path = folder / "run.toml"
    path.write_text(path.read_text().replace("[drafter]\n", PARAMETRIC))
    command(maskgen, "build", path)
    return folder


def run(root, name, steps, *, code=0, **settings):
    settings = {**BASE, **{key.replace("__", "."): value for key, value in settings.items()}}
    return command(train, *options(root, name, **settings, **{"train.steps": steps}), code=code)


def checkpoints(folder):
    return find_checkpoints(folder / "checkpoints")


def drop_newest(folder):
    shutil.rmtree(checkpoints(folder)[0].folder)


def rates(folder):
    return [row["lr"] for row in read_metrics(folder / "metrics.jsonl") if "lr" in row]


def state(folder):
    return checkpoints(folder)[0].load()


def same(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def cosine(steps):
    """One cycle by hand: 1e-3 after the warm-up, down to a quarter of it."""
    warm = round(0.34 * steps)
    return [
        1e-3
        * min(
            (step + 1) / warm,
            0.25 + 0.375 * (1 + math.cos(math.pi * max(0, step - warm) / (steps - warm))),
        )
        for step in range(steps)
    ]


@pytest.fixture(scope="module")
def finished(root):
    """Of 6 steps."""
    run(root, "six", 6)
    return root / "six"


@pytest.fixture(scope="module")
def raised(root, finished):
    """The same, raised to 15."""
    shutil.copytree(finished, root / "raised")
    done = run(root, "raised", 15, train__save_every=4)
    assert (
        done.stderr.splitlines().count("raising train.steps 6 -> 15: a new cosine from step 7") == 1
    )
    return root / "raised"


def test_a_finished_run_goes_on_with_a_new_cosine(finished, raised):
    assert rates(raised)[:6] == rates(finished)
    assert rates(raised) == pytest.approx(cosine(6) + cosine(9), rel=1e-5)
    rows = read_metrics(raised / "metrics.jsonl")
    assert [row["step"] for row in rows] == [*range(1, 16)]
    assert rows[:6] == read_metrics(finished / "metrics.jsonl")
    assert [item.cycles for item in checkpoints(raised)] == [(6, 15), (6, 15)]
    assert product(raised)[0] == 15


def test_a_run_that_was_raised_resumes_to_the_bit(root, raised):
    shutil.copytree(raised, root / "killed")
    folder = root / "killed"
    drop_newest(folder)
    (at,) = [item.step for item in checkpoints(folder)]
    assert at == 12
    done = run(root, "killed", 15)
    assert "raising" not in done.stderr
    assert "resuming from step 12 of 15" in done.stderr
    same(state(folder), state(raised))
    again = run(root, "killed", 15)
    assert "this run is finished: 15 steps; a larger train.steps goes on" in again.stderr


def test_a_run_that_is_raised_before_its_end_is_the_run_that_is_raised_after_it(
    root, finished, raised
):
    shutil.copytree(finished, root / "early")
    drop_newest(root / "early")
    done = run(root, "early", 15)
    assert "resuming from step 3 of 15" in done.stderr
    assert "raising train.steps 6 -> 15: a new cosine from step 7" in done.stderr
    same(state(root / "early"), state(raised))


def test_a_run_is_raised_as_often_as_one_likes(root, raised):
    shutil.copytree(raised, root / "often")
    run(root, "often", 18)
    assert rates(root / "often") == pytest.approx(cosine(6) + cosine(9) + cosine(3), rel=1e-5)
    assert checkpoints(root / "often")[0].cycles == (6, 15, 18)
    record = json.loads((root / "often" / "run.json").read_text())
    assert record["cycles"] == [6, 15, 18]


@pytest.mark.parametrize("processes", [1, 2])
def test_two_ranks_take_the_new_cosine_too(root, finished, processes):
    name = f"ranks-{processes}"
    shutil.copytree(finished, root / name)
    more = {"train.steps": 9, "run.devices": "cpu,cpu"}
    settings = options(root, name, **BASE, **more)
    if processes == 1:
        command(train, *settings)
    else:
        code, _, errors = torchrun("-m", "runtime.train", *settings)
        assert code == 0, errors
        assert "raising train.steps 6 -> 9: a new cosine from step 7" in errors
    assert rates(root / name) == pytest.approx(cosine(6) + cosine(3), rel=1e-5)
    assert checkpoints(root / name)[0].cycles == (6, 9)


def test_fewer_steps_than_were_planned_are_refused(root, raised):
    before = {path: path.stat().st_mtime_ns for path in raised.rglob("*")}
    refused = run(root, "raised", 14, code=2)
    assert (
        "train.steps = 14: must be at least 15, where the learning rate of this run, which is at "
        "step 15, comes to its end; use --fresh" in refused.output
    )
    assert {path: path.stat().st_mtime_ns for path in raised.rglob("*")} == before


def test_any_other_change_is_still_another_run(root, raised):
    refused = run(root, "raised", 20, code=1, train__lr=2e-3)
    assert "checkpoints of another run; changed: train.lr 0.001 -> 0.002; use" in refused.output


def test_fresh_begins_with_one_cosine(root, finished):
    shutil.copytree(finished, root / "anew")
    command(train, *options(root, "anew", **BASE, **{"train.steps": 8}), "--fresh")
    assert rates(root / "anew") == pytest.approx(cosine(8), rel=1e-5)
    assert checkpoints(root / "anew")[0].cycles == (8,)


@pytest.mark.parametrize("has_record", [True, False])
def test_a_run_of_before_is_raised_where_its_record_says_how_long_it_was(
    root, finished, has_record
):
    name = f"before-{has_record}"
    shutil.copytree(finished, root / name)
    for path in (root / name).glob("checkpoints/*/meta.json"):
        unmarked(path)
    unmarked(root / name / "run.json")
    if not has_record:
        (root / name / "run.json").unlink()
        refused = run(root, name, 15, code=1)
        assert "another run; changed: settings, data or masks" in refused.output
        return
    run(root, name, 15)
    assert rates(root / name) == pytest.approx(cosine(6) + cosine(9), rel=1e-5)


def unmarked(path):
    """As it was written before there were cycles."""
    document = dict(read_sealed(path, 3, "again"))
    del document["cycles"]
    write_sealed(path, document)


def test_a_run_that_gave_up_waits_anew(root):
    asked = {"evaluate__every": 2, "evaluate__patience": 2, "train__lr": 1e-12}
    asked["train__export"] = "best"
    run(root, "patient", 40, **asked)
    assert [*scores(root / "patient")] == [2, 4, 6]
    done = run(root, "patient", 50, **asked)
    assert "raising train.steps 40 -> 50: a new cosine from step 41" in done.stderr
    # The best is still that of step 2, and two more scores without a better one end it again.
    assert [*scores(root / "patient")] == [2, 4, 6, 8, 10]
    assert product(root / "patient")[0] == 2
    assert [item.step for item in checkpoints(root / "patient")][-1] == 2
    done = run(root, "patient", 50, **asked)
    assert (
        "this run is finished: 10 steps; a larger train.steps or evaluate.patience" in done.stderr
    )


@pytest.mark.parametrize(
    ("cycles", "finished", "steps", "wanted"),
    [
        ((10,), 10, 10, (10,)),
        ((10,), 10, 11, (10, 11)),
        ((10,), 0, 30, (10, 30)),
        ((10, 20), 11, 20, (10, 20)),
        ((10, 20), 11, 30, (10, 20, 30)),
        # What has not begun is planned anew.
        ((10, 20), 10, 30, (10, 30)),
        ((10, 20), 7, 15, (10, 15)),
        ((10, 20), 7, 10, (10,)),
    ],
)
def test_what_is_planned(cycles, finished, steps, wanted):
    assert planned(cycles, finished, steps) == wanted


@pytest.mark.parametrize(
    ("cycles", "finished", "steps", "least"), [((10,), 3, 9, 10), ((10, 20), 11, 19, 20)]
)
def test_what_has_begun_is_not_cut_short(cycles, finished, steps, least):
    with pytest.raises(ConfigError, match=rf"train\.steps = {steps}: must be at least {least}, "):
        planned(cycles, finished, steps)


def test_what_is_said_of_it():
    assert described((10,), (10,)) is None
    assert described((10,), (10, 20)) == "raising train.steps 10 -> 20: a new cosine from step 11"
    assert described((10, 20), (10, 15)) == (
        "lowering train.steps 20 -> 15: a new cosine from step 11"
    )
    assert described((10, 20), (10,)) == "lowering train.steps 20 -> 10: no further cosine"
