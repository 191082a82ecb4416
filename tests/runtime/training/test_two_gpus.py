"""What only two GPUs can show: captures beside NCCL's own threads, delays, faults, torchrun."""

import random
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from runtime.errors import WorkerError
from runtime.ranks.collectives import leave_groups, make_groups, on_every_rank
from runtime.ranks.devices import enter_thread, place
from runtime.static.graph import GraphPool, StaticStep
from runtime.training.metrics import read_metrics
from tests.runtime.static.test_gpu import prepared
from tests.runtime.tiny_run import first_drafter, losses, make_trainer, train
from tests.runtime.torchrun_job import STEPS, torchrun_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("devices", ["cuda:0,cuda:1"][: torch.cuda.device_count() // 2]),
]


def test_captures_right_after_collectives(devices):
    placement = place(devices)
    groups = make_groups(placement)
    pools = [GraphPool(device) for device in placement.devices]
    tensors = [torch.empty(1 << 16, device=device) for device in placement.devices]

    def eager(rank):
        enter_thread(placement.devices[rank], 1)
        with pools[rank].activated():
            tensors[rank].fill_(rank + 1)
            groups[rank].all_reduce(tensors[rank])

    def replay(step):
        with step.pool.activated():
            step.run()
        step.pool.synchronize()

    for _ in range(50):
        on_every_rank(eager, range(2))
        steps = [
            StaticStep(partial(group.all_reduce, tensor), pool, f"rank {group.rank}")
            for group, tensor, pool in zip(groups, tensors, pools, strict=True)
        ]
        for step in steps:
            step.capture()
        on_every_rank(replay, steps)
        assert [tensor.unique().tolist() for tensor in tensors] == [[6.0], [6.0]]
        for step in steps:
            step.teardown()
    assert leave_groups(groups, 30.0)


def test_one_rank_scores_and_the_other_waits(tmp_path, devices):
    config = prepared(tmp_path, "scored", devices, steps=40, save_every=10)
    config = replace(config, evaluate=replace(config.evaluate, every=1))
    result, rows, _ = train(config)
    assert result.summary.endswith("0 host mask builds, 40 steps (80 graph replays)")
    assert [row["step"] for row in rows if "heldout_tau" in row] == [*range(1, 41)]


def test_random_delays_and_many_checkpoints_do_not_hang(tmp_path, devices):
    config = prepared(
        tmp_path, "delays", devices, steps=300, save_every=10, log_every=7, dtype="bfloat16"
    )
    trainer = make_trainer(config)
    draw, read = random.Random(1), trainer.inputs.dataset.sample

    def sample(index):
        time.sleep(draw.random() * 0.01)
        return read(index)

    trainer.inputs.dataset.sample = sample
    trainer.prepare()
    trainer.start_from(weights=first_drafter().state_dict())
    assert trainer.run().steps == 300
    first, second = (replica.optimizer.master.cpu() for replica in trainer.replicas)
    assert torch.equal(first, second)
    trainer.teardown()


def test_a_failure_ends_collectives_within_graphs(tmp_path, devices):
    config = prepared(tmp_path, "fails", devices, steps=300)
    trainer = make_trainer(config)
    trainer.prepare()
    trainer.start_from(weights=first_drafter().state_dict())
    read, taken = trainer.inputs.dataset.sample, []

    def sample(index):
        taken.append(index)
        if len(taken) > 60:
            raise OSError("disk is gone")
        return read(index)

    trainer.inputs.dataset.sample = sample
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"disk is gone"):
        trainer.run()
    trainer.teardown()
    assert time.monotonic() - began < 20.0
    assert leave_groups(trainer.groups, 1.0)


def test_processes_under_torchrun_give_the_run_of_one_gpu(tmp_path, devices):
    config = prepared(tmp_path, "job", devices, steps=STEPS, save_every=5)
    code, errors, outcomes = torchrun_job(
        tmp_path / "job", config, devices, ("two", "raised", "killed")
    )
    ended = time.time()
    _, rows, _ = train(prepared(tmp_path, "one", "cuda:0", steps=STEPS, save_every=5))
    two = read_metrics(tmp_path / "job" / "two" / "metrics.jsonl")
    np.testing.assert_allclose(losses(two), losses(rows), rtol=1e-3, err_msg=errors)
    assert outcomes[0]["two"]["weights"] == outcomes[1]["two"]["weights"]
    assert "process 1 failed: disk is gone" in outcomes[0]["raised"]["message"]
    assert "disk is gone" in outcomes[1]["raised"]["message"]
    assert max(outcome["raised"]["seconds"] for outcome in outcomes) < 20.0
    assert code != 0
    assert ended - (tmp_path / "job" / "killed-now").stat().st_mtime < 30.0
