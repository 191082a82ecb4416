"""What a run says of steps that changed nothing, and which runs do not count as trained."""

import json
import re
from dataclasses import replace

import pytest

from runtime.data.dataset import Dataset
from runtime.export import main as export
from runtime.train import main as train
from runtime.training.checkpoint import find_checkpoints
from runtime.training.metrics import read_metrics
from runtime.training.replica import Replica
from tests.runtime.tiny_root import command, make_root, options


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_root(tmp_path_factory.mktemp("outcome"), prompts=8)


class Run:
    """The same training command, again and again."""

    def __init__(self, root, name, *flags, **train_settings):
        settings = {f"train.{key}": value for key, value in train_settings.items()}
        self.folder = root / name
        self.options = [*options(root, name, **settings), *flags]

    def __call__(self, *more, code=0):
        done = command(train, *self.options, *more, code=code)
        return done.stdout if code == 0 else done.stderr

    @property
    def step(self):
        return find_checkpoints(self.folder / "checkpoints")[0].step

    @property
    def exported(self):
        return (self.folder / "drafter").exists()


@pytest.fixture
def bad(monkeypatch):
    """Numbers of the steps whose features are not finite."""
    numbers = set()
    real = Replica.run

    def run(replica, step, slot):
        if step.number in numbers:
            slot.staged["features"].fill_(float("nan"))
        real(replica, step, slot)

    monkeypatch.setattr(Replica, "run", run)
    return numbers


def unsupervised(monkeypatch, indices):
    """Leave the samples of these indices without a supervised token."""
    real = Dataset.sample

    def sample(dataset, index):
        found = real(dataset, index)
        if index in indices:
            found = replace(found, loss_mask=found.loss_mask * 0)
        return found

    monkeypatch.setattr(Dataset, "sample", sample)


@pytest.mark.parametrize(
    ("devices", "log_every", "ends"),
    [("cpu", 1, [4, 5, 6, 6, 6]), ("cpu,cpu", 2, [4, 5, 6, 6, 6]), ("cpu", 20, [6, 6, 6])],
)
def test_bad_steps_are_counted_over_resumes_and_the_run_never_counts_as_finished(
    root, bad, devices, log_every, ends
):
    bad.update(range(100))
    name = f"bad-{devices}-{log_every}"
    run = Run(
        root, name, "--devices", devices, steps=6, max_skipped=4, log_every=log_every, save_every=50
    )
    for end in ends:
        said = run(code=1)
        assert run.step == end
        assert f"{end} steps in a row had a loss or gradient that was not finite (limit" in said
        assert "finished" not in said
        assert not run.exported


def test_a_long_interval_of_the_log_does_not_hide_the_row_that_a_resume_goes_on_with(root, bad):
    bad.update(range(100))
    run = Run(root, "interval", steps=60, max_skipped=4, log_every=20, save_every=50)
    for end in (20, 21, 22):
        run(code=1)
        assert run.step == end


def test_a_row_that_another_failure_broke_ends_at_the_limit_and_not_after_as_many_again(
    root, bad, monkeypatch
):
    bad.update(range(3, 100))
    run = Run(root, "row", steps=40, max_skipped=6, log_every=40, save_every=50)
    with monkeypatch.context() as once:
        real = Replica.run

        def fail(replica, step, slot):
            if step.number == 5:
                raise OSError("disk is gone")
            real(replica, step, slot)

        once.setattr(Replica, "run", fail)
        assert "training stopped after step 5: disk is gone" in run(code=1)
    assert run.step == 5
    assert "6 steps in a row had a loss or gradient that was not finite" in run(code=1)
    assert run.step == 9


def test_once_the_cause_is_gone_the_same_command_goes_on_and_tells_of_the_skipped_steps(root, bad):
    bad.update(range(100))
    run = Run(root, "mended", steps=12, max_skipped=4, log_every=1)
    run(code=1)
    bad.clear()
    said = run()
    assert re.search(r"^skipped +4 of the steps, which had a loss or gradient that was", said, re.M)
    assert run.exported
    # And so does a finished run that is asked again.
    assert "4 of the steps, which had a loss" in run()
    assert json.loads(run("--json"))["skipped_steps"] == 4


def test_a_higher_limit_lets_a_run_go_on(root, bad):
    bad.update(range(1, 9))
    run = Run(root, "limit", steps=12, max_skipped=3, log_every=1)
    run(code=1)
    assert run.step == 4
    record = json.loads(run("--set", "train.max_skipped=9", "--json"))
    assert (record["steps"], record["skipped_steps"], record["empty_steps"]) == (12, 8, 0)


@pytest.mark.parametrize("log_every", [1, 4, 8])
def test_bad_steps_in_a_row_before_good_ones_at_the_end_fail_each_time(root, bad, log_every):
    bad.update({3, 4, 5, 6})
    run = Run(root, f"tail-{log_every}", steps=8, max_skipped=4, log_every=8, save_every=100)
    for _ in range(2):
        assert "4 steps in a row had a loss or gradient that was not finite" in run(code=1)
        assert run.step == 8
        assert not run.exported


def test_single_bad_steps_are_in_the_closing_table(root, bad):
    bad.update({1, 4, 6})
    run = Run(root, "single", steps=8, max_skipped=2)
    assert re.search(r"^skipped +3 of the steps, which had", run(), re.M)
    assert "empty" not in run()
    assert sum(row["skipped"] for row in read_metrics(run.folder / "metrics.jsonl")[-1:]) == 3


def test_of_a_run_without_such_steps_the_closing_table_says_nothing(root):
    run = Run(root, "good", steps=4)
    for said in (run(), run()):
        assert not re.search(r"^(skipped|empty)", said, re.M)


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_data_without_a_supervised_token_teach_nothing_and_say_so(root, monkeypatch, devices):
    unsupervised(monkeypatch, set(range(100)))
    run = Run(root, f"empty-{devices}", "--devices", devices, steps=5)
    for _ in range(2):
        said = run(code=1)
        assert "nothing was learned in 5 steps, and nothing is exported: 5 had no super" in said
        assert not run.exported
    said = command(export, *options(root, f"empty-{devices}"), code=1).stderr
    assert "nothing was learned up to step 5" in said
    assert not run.exported


def test_steps_without_a_supervised_token_are_in_the_closing_table(root, monkeypatch):
    unsupervised(monkeypatch, {0})
    run = Run(root, "some", steps=10, global_batch=1)
    said = run()
    assert re.search(r"^empty +[1-9]\d* of the steps, which had no supervised token", said, re.M)
    assert run.exported
