"""A step of several micro-batches does what the same step does at once.

The sums, weights and metrics of such steps are held against plain fp64 training in
``tests/runtime/dflash/test_reference_step.py``.
"""

import numpy as np
import pytest
import torch

from runtime.errors import ConfigError
from runtime.training.checkpoint import find_checkpoints
from runtime.training.replica import Replica
from tests.runtime.tiny_run import (
    build_masks,
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


def same_weights(found, wanted):
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("anchors", ["layouts", "data"])
@pytest.mark.parametrize(("devices", "count"), [("cpu", 2), ("cpu", 4), ("cpu,cpu", 2)])
def test_micro_batches_give_the_run_of_the_whole_batch(tmp_path, anchors, devices, count):
    options = {"anchors": anchors, "steps": 10}
    whole, rows, weights = train(prepared(tmp_path, "whole", train=options))
    config = prepared(
        tmp_path, "parts", train={**options, "accumulate": count}, run={"devices": devices}
    )
    parts, again, added = train(config)
    assert parts.summary == whole.summary
    assert parts.counts == whole.counts
    np.testing.assert_allclose(losses(again), losses(rows), rtol=1e-5)
    for key in ("step", "lr", "skipped", "anchors_kept", "anchors_per_step"):
        assert [row[key] for row in again] == [row[key] for row in rows], key
    np.testing.assert_allclose(
        [row["grad_norm"] for row in again], [row["grad_norm"] for row in rows], rtol=1e-4
    )
    same_weights(added, weights)


def test_each_micro_batch_has_its_share_of_the_rows(tmp_path):
    config = prepared(tmp_path, "a", run={"devices": "cpu,cpu"}, train={"accumulate": 2})
    trainer = make_trainer(config)
    for replica in trainer.replicas:
        for length in (16, 32):
            assert replica.fields(length)["input_ids"].shape == (1, length)
    trainer.teardown()


@pytest.mark.parametrize("reduce_dtype", ["float32", "compute"])
def test_ranks_sum_once_a_step(tmp_path, monkeypatch, reduce_dtype):
    def reduced(name, count):
        config = prepared(
            tmp_path,
            name,
            run={"devices": "cpu,cpu"},
            train={"accumulate": count, "reduce_dtype": reduce_dtype, "save_every": 100},
        )
        trainer, numbers = make_trainer(config), []
        group = trainer.groups[0]
        start = group.start_all_reduces

        def watched(tensors):
            numbers.append(sum(tensor.numel() for tensor in tensors))
            return start(tensors)

        monkeypatch.setattr(group, "start_all_reduces", watched)
        trainer.prepare()
        trainer.start_from(weights=first_drafter().state_dict())
        trainer.run()
        weights = trainer.weights()
        trainer.teardown()
        return numbers, weights

    one, weights = reduced("one", 1)
    two, added = reduced("two", 2)
    assert one == two
    # Two layers, the fusion, and the vectors with the sums.
    assert len(one) == 6 * 4
    same_weights(added, weights)


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_a_micro_batch_that_is_not_finite_costs_the_whole_step_and_no_other(tmp_path, devices):
    """Of the 3 steps an epoch one has the sample whose features are NaN."""
    config = prepared(
        tmp_path, "a", contexts=(32,), run={"devices": devices}, train={"accumulate": 2, "steps": 6}
    )
    trainer = make_trainer(config)
    plan, broken = trainer.inputs.plan, 3
    hit = [number for number in range(6) if broken in plan[number].rows]
    assert len(hit) == 2
    trainer.inputs.dataset.sample(broken).features.fill_(float("nan"))
    seen = []
    after = Replica.run

    def noted(replica, step, slot):
        after(replica, step, slot)
        if step.last and replica.group.rank == 0:
            flat = replica.optimizer
            seen.append((step.number, flat.master.clone(), flat.reduced.abs().max().item()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "run", noted)
        trainer.prepare()
        trainer.start_from(weights=first_drafter().state_dict())
        first = trainer.replicas[0].optimizer.master.clone()
        result = trainer.run()
    trainer.teardown()
    assert (result.counts.learned, result.counts.skipped) == (4, 2)
    before = first
    for number, master, left in seen:
        assert torch.equal(master, before) == (number in hit), number
        assert left == 0
        before = master
    assert before.isfinite().all()


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, devices):
    config = prepared(tmp_path, "a", run={"devices": devices}, train={"accumulate": 2})
    _, rows, weights = train(config)
    middle = find_checkpoints(tmp_path / "a" / "run" / "checkpoints")[1]
    assert middle.step == 3
    _, again, resumed = train(config, first_step=3, state=middle.load())
    assert losses(again).tolist() == losses(rows).tolist()
    for name, weight in weights.items():
        assert torch.equal(weight, resumed[name]), name


def test_scores_of_held_out_text_are_those_of_the_whole_batch(tmp_path):
    taus = []
    for count in (1, 4):
        config = prepared(
            tmp_path, f"by {count}", train={"accumulate": count}, evaluate={"every": 3}
        )
        _, rows, _ = train(config)
        taus.append([row["heldout_tau"] for row in rows if "heldout_tau" in row])
    assert len(taus[0]) == 2
    assert taus[0] == pytest.approx(taus[1])


def test_a_batch_that_does_not_divide_is_refused(tmp_path):
    config = prepared(tmp_path, "odd", train={"accumulate": 2})
    assert inputs_of(config, ranks=2).plan.global_batch == 4
    for ranks, wanted in ((3, "devices, 3$"), (4, r"train\.accumulate, 4 x 2$")):
        with pytest.raises(ConfigError, match=wanted):
            inputs_of(config, ranks=ranks)


def test_their_number_may_change_at_a_resume_as_that_of_devices_may(tmp_path):
    one = inputs_of(prepared(tmp_path, "one"))
    two = inputs_of(prepared(tmp_path, "two", train={"accumulate": 2}))
    assert one.shaping["train"] == two.shaping["train"]
