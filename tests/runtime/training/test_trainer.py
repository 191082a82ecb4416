import math
import weakref

import numpy as np
import pytest
import torch

from maskgen.errors import MaskSpecError
from runtime.dflash.trainee import DrafterTrainee
from runtime.errors import (
    BucketMissingError,
    ConfigError,
    DatasetError,
    FrozenError,
    NonFiniteError,
    WorkerError,
)
from runtime.training.checkpoint import find_checkpoints
from runtime.training.metrics import read_metrics
from runtime.training.replica import Replica
from tests.runtime.tiny_run import (
    build_masks,
    drafter_config,
    first_drafter,
    inputs_of,
    losses,
    make_config,
    make_data,
    make_trainer,
    train,
)

LENGTHS = [14, 16, 11, 30, 27, 9, 32, 20, 12, 15, 31]


@pytest.fixture(autouse=True)
def quiet(capsys):
    yield
    capsys.readouterr()


def prepared(tmp_path, name, **sections):
    folder = tmp_path / name
    folder.mkdir()
    config = make_config(folder, **sections)
    make_data(folder / "data", LENGTHS)
    build_masks(config)
    return config


@pytest.mark.parametrize("anchors", ["layouts", "data"])
def test_a_run_learns_and_nothing_is_built_after_freeze(tmp_path, anchors):
    config = prepared(tmp_path, "a", train={"anchors": anchors, "steps": 40})
    result, rows, _ = train(config)
    expected = "after freeze: 0 compiles, 0 FX traces, 0 host mask builds, 40 steps (eager)"
    assert result.summary == expected
    assert result.steps == 40
    assert losses(rows)[-5:].mean() < losses(rows)[:5].mean() - 0.2
    assert all(0 < row["anchors_kept"] <= 1 for row in rows)


def test_two_workers_give_the_losses_of_one(tmp_path):
    one = prepared(tmp_path, "one", train={"steps": 12})
    two = prepared(tmp_path, "two", train={"steps": 12}, run={"devices": "cpu,cpu"})
    _, rows_one, weights_one = train(one)
    _, rows_two, weights_two = train(two)
    np.testing.assert_allclose(losses(rows_one), losses(rows_two), rtol=1e-5)
    for name, weight in weights_one.items():
        torch.testing.assert_close(weight, weights_two[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_the_same_seed_gives_the_same_bits(tmp_path, devices):
    runs = []
    for name in ("first", "second"):
        config = prepared(tmp_path, name, run={"devices": devices})
        runs.append(train(config))
    assert losses(runs[0][1]).tolist() == losses(runs[1][1]).tolist()
    for name, weight in runs[0][2].items():
        assert torch.equal(weight, runs[1][2][name]), name


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    config = prepared(tmp_path, "whole")
    _, rows, weights = train(config)
    # The checkpoint of step 3 stands beside that of step 6, as a killed run would leave it.
    root = tmp_path / "whole" / "run" / "checkpoints"
    newest, resumed_from = find_checkpoints(root)
    assert (newest.step, resumed_from.step) == (6, 3)
    assert newest.fingerprint == inputs_of(config, "run.toml").fingerprint
    _, again, resumed = train(config, first_step=3, state=resumed_from.load())
    assert len(rows) == 6
    for name in ("step", "loss", "lr", "grad_norm", "tau_forced", "accuracy", "anchors_kept"):
        assert [row[name] for row in again] == [row[name] for row in rows], name
    assert resumed.keys() == weights.keys() == first_drafter().state_dict().keys()
    for name, weight in weights.items():
        assert not torch.equal(weight, first_drafter().state_dict()[name]), name
        assert torch.equal(weight, resumed[name]), name


def test_a_bucket_gives_the_loss_of_the_exact_length(tmp_path):
    exact = prepared(tmp_path, "exact", contexts=(32,), train={"anchors": "data", "steps": 1})
    padded = prepared(tmp_path, "padded", contexts=(64,), train={"anchors": "data", "steps": 1})
    for name in ("exact", "padded"):
        make_data(tmp_path / name / "data", [32, 32, 32, 32])
    _, rows_exact, _ = train(exact)
    _, rows_padded, _ = train(padded)
    np.testing.assert_allclose(losses(rows_exact), losses(rows_padded), atol=1e-5, rtol=0)


def test_a_sample_without_a_supervised_token_carries_no_weight(tmp_path):
    config = prepared(tmp_path, "empty", train={"anchors": "data"})
    make_data(tmp_path / "empty" / "data", [16] * 4, prompt=16)
    _, rows, weights = train(config)
    assert [row["loss"] for row in rows] == [None] * 6
    assert rows[-1]["skipped"] == 0
    assert [row["grad_norm"] for row in rows] == [0.0] * 6
    for name, weight in first_drafter().state_dict().items():
        assert torch.equal(weight, weights[name]), name


def test_features_that_are_not_finite_stop_the_run_and_change_nothing(tmp_path):
    config = prepared(tmp_path, "nan", train={"steps": 20, "max_skipped": 3})
    trainer = make_trainer(config)
    trainer.prepare()
    trainer.start_from(weights=first_drafter().state_dict())
    for step in trainer.replicas[0].train_steps.values():
        step.objective.bucket.target.feature_scale.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"3 steps in a row.*max_skipped = 3.*NaN in the fea"):
        trainer.run()
    for name, weight in first_drafter().state_dict().items():
        assert torch.equal(weight, trainer.weights()[name]), name
    state = trainer.replicas[0].state()
    trainer.teardown()
    # Once the cause is gone the same run goes on, and faults of before do not end it.
    result, _, _ = train(config, first_step=3, state=state)
    assert result.steps == 20


def test_a_step_that_is_not_finite_does_not_lower_the_logged_loss(tmp_path):
    config = prepared(tmp_path, "some", train={"steps": 12, "lr": 1e-9, "log_every": 12})
    _, clean, _ = train(config)
    trainer = make_trainer(
        prepared(tmp_path, "nans", train={"steps": 12, "lr": 1e-9, "log_every": 12})
    )
    trainer.prepare()
    trainer.start_from(weights=first_drafter().state_dict())
    sample, taken = trainer.inputs.dataset.sample, []

    def poisoned(index):
        found = sample(index)
        taken.append(index)
        if len(taken) % 12 == 0:
            found.features.fill_(float("nan"))
        return found

    trainer.inputs.dataset.sample = poisoned
    trainer.run()
    (row,) = read_metrics(trainer.folder / "metrics.jsonl")
    trainer.teardown()
    assert row["skipped"] >= 1
    assert abs(row["loss"] - losses(clean)[0]) < 1.0


def run_with_bad_steps(tmp_path, monkeypatch, bad, **train):
    """A run whose steps of the given numbers read features that are not finite."""
    config = prepared(tmp_path, "bad", train={"steps": 8, "max_skipped": 2, **train})
    real = Replica.run

    def run(replica, step, slot):
        if step.number in bad:
            slot.staged["features"].fill_(float("nan"))
        real(replica, step, slot)

    monkeypatch.setattr(Replica, "run", run)
    trainer = make_trainer(config)
    try:
        trainer.prepare()
        trainer.start_from(weights=first_drafter().state_dict())
        return trainer.run().steps, read_metrics(trainer.folder / "metrics.jsonl")
    finally:
        trainer.teardown()


@pytest.mark.parametrize("log_every", [1, 3, 8])
def test_bad_steps_with_good_ones_between_are_not_in_a_row(tmp_path, monkeypatch, log_every):
    steps, rows = run_with_bad_steps(tmp_path, monkeypatch, {0, 2, 4, 7}, log_every=log_every)
    assert steps == 8
    assert rows[-1]["skipped"] == 4
    # The schedule goes on with the steps, those left out too.
    cosine = [0.5e-2 * (1 + math.cos(math.pi * (row["step"] - 1) / 8)) for row in rows]
    assert [row["lr"] for row in rows] == pytest.approx(cosine, rel=1e-5)


@pytest.mark.parametrize("log_every", [1, 4, 8])
def test_bad_steps_in_a_row_end_the_run_also_where_a_good_one_follows_before_the_log(
    tmp_path, monkeypatch, log_every
):
    # With a row every 4 or 8 steps the last step before it is a good one.
    with pytest.raises(NonFiniteError, match=r"^2 steps in a row .*max_skipped = 2"):
        run_with_bad_steps(tmp_path, monkeypatch, {1, 2}, log_every=log_every)


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_a_feeder_that_fails_ends_the_run_with_its_error(tmp_path, monkeypatch, devices):
    config = prepared(tmp_path, "feeder", run={"devices": devices}, train={"steps": 50})
    trainer = make_trainer(config)
    trainer.prepare()
    trainer.start_from(weights=first_drafter().state_dict())
    sample = trainer.inputs.dataset.sample
    taken = []

    def broken(index):
        taken.append(index)
        if len(taken) > 20:
            raise OSError("disk is gone")
        return sample(index)

    monkeypatch.setattr(trainer.inputs.dataset, "sample", broken)
    with pytest.raises(WorkerError, match=r"training stopped after step .*disk is gone") as caught:
        trainer.run()
    assert isinstance(caught.value.__cause__, OSError)
    trainer.teardown()


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_a_compile_within_the_steps_ends_the_run_as_frozen(tmp_path, monkeypatch, devices):
    config = prepared(tmp_path, "a", run={"devices": devices})
    real = Replica.run

    def run(replica, step, slot):
        if replica.group.rank == 0 and step.number == 2:
            torch.compile(lambda x: x - 1, backend="eager")(torch.ones(5))
        real(replica, step, slot)

    monkeypatch.setattr(Replica, "run", run)
    with pytest.raises(FrozenError, match=r"compile after freeze in thread 'worker-0 \(cpu\)'"):
        train(config)


def test_a_missing_bucket_says_what_builds_it(tmp_path):
    prepared(tmp_path, "small", contexts=(16, 32))
    wider = make_config(tmp_path / "small", contexts=(16, 48))
    with pytest.raises(BucketMissingError, match=r"dflash/ctx48.*run: python -m maskgen build"):
        inputs_of(wider, "run.toml")


def test_masks_of_other_parameters_are_refused(tmp_path):
    prepared(tmp_path, "old", anchors=6)
    other = make_config(tmp_path / "old", anchors=4)
    with pytest.raises(
        BucketMissingError, match=r"another one than run\.toml asks for.*run: python -m maskgen"
    ):
        inputs_of(other, "run.toml")


def test_masks_of_another_maskgen_are_refused(tmp_path, monkeypatch):
    config = prepared(tmp_path, "other")

    def unreadable(store, name, version):
        raise MaskSpecError("answer_ends", None, "must be an integer")

    monkeypatch.setattr("runtime.training.entries.load_entry", unreadable)
    with pytest.raises(BucketMissingError, match=r"cannot be read.*run: python -m maskgen build"):
        inputs_of(config, "run.toml")


def test_data_of_longer_samples_than_the_largest_bucket_is_refused(tmp_path):
    prepared(tmp_path, "long", contexts=(16, 32))
    shorter = make_config(tmp_path / "long", contexts=(16,))
    with pytest.raises(DatasetError, match="up to 32, the run's largest is 16"):
        inputs_of(shorter, "run.toml")


def test_the_seed_of_the_run_orders_its_steps(tmp_path):
    prepared(tmp_path, "seeds")

    def order(seed):
        config = make_config(tmp_path / "seeds", run={"seed": seed})
        plan = inputs_of(config, "run.toml").plan
        return [plan[number] for number in range(2 * plan.steps_per_epoch)]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_the_global_batch_must_divide(tmp_path):
    config = prepared(tmp_path, "odd")
    assert inputs_of(config, "run.toml", ranks=2).plan.global_batch == 4
    with pytest.raises(ConfigError, match="must be a multiple of the number of devices, 3"):
        inputs_of(config, "run.toml", ranks=3)


@pytest.mark.parametrize(("held", "other"), [("stored", "online"), ("online", "stored")])
def test_features_elsewhere_than_the_run_file_says_are_refused(tmp_path, held, other):
    config = prepared(tmp_path, "a", data={"features": held})
    make_data(tmp_path / "a" / "data", LENGTHS, stored=held == "stored")
    assert inputs_of(config, "run.toml").dataset.has_features == (held == "stored")
    asking = make_config(tmp_path / "a", data={"folder": config.data.folder, "features": other})
    with pytest.raises(DatasetError, match=f"features = '{held}'.*asks for '{other}'.*prepare"):
        inputs_of(asking, "run.toml")


def test_stored_features_leave_a_target_nothing_to_do(tmp_path):
    config = prepared(tmp_path, "a", run={"target_devices": "cpu"})
    with pytest.raises(ConfigError, match=r"run\.target_devices = 'cpu'.*data\.features"):
        inputs_of(config, "run.toml")
    make_data(tmp_path / "a" / "data", LENGTHS, stored=False)
    assert not inputs_of(config, "run.toml").dataset.has_features


def test_first_weights_are_freed_once_they_were_taken(tmp_path):
    """They lie on the target's device, as large as the drafter in float32."""
    config = prepared(tmp_path, "a")
    weight = torch.ones(3)
    kept = weakref.ref(weight)
    trainee = DrafterTrainee(
        config=config,
        inputs=inputs_of(config),
        network=drafter_config(),
        targets=[],
        weights={"fc.weight": weight},
    )
    del weight
    assert trainee.first_weights().keys() == {"fc.weight"}
    assert kept() is None
