"""A long run over many buckets in random order: what was captured serves it to the end."""

import gc

import numpy as np
import pytest
import torch

from runtime.dflash.step.draft_loss import draft_loss
from runtime.static.attention import DENSE
from runtime.static.graph import StaticStep
from runtime.training.metrics import read_metrics
from runtime.training.recorder import Recorder
from tests.runtime.tiny_run import (
    build_masks,
    first_drafter,
    losses,
    make_config,
    make_data,
    make_trainer,
)

pytestmark = pytest.mark.gpu

CONTEXTS = tuple(range(128, 128 * 13, 128))
SAMPLES_OF_A_BUCKET = 250
EPOCHS = 3


def prepared(tmp_path, name, devices, steps):
    folder = tmp_path / name
    folder.mkdir()
    size = len(devices.split(","))
    config = make_config(
        folder,
        contexts=CONTEXTS,
        anchors=32,
        run={"devices": devices},
        masks={"BLOCK_SIZE": 128},
        target={"dtype": "float32"},
        train={
            "steps": steps,
            "global_batch": 4 * size,
            # So that a shorter run takes the same steps.
            "lr": 1e-4,
            "min_lr_ratio": 1.0,
            "warmup_ratio": 0.0,
            "log_every": steps_of_an_epoch(size),
            "save_every": 100_000,
        },
    )
    generator = np.random.default_rng(0)
    lengths = [
        int(generator.integers(context - 100, context + 1))
        for context in CONTEXTS
        for _ in range(SAMPLES_OF_A_BUCKET)
    ]
    make_data(folder / "data", lengths)
    build_masks(config)
    return config


def steps_of_an_epoch(size):
    return len(CONTEXTS) * -(-SAMPLES_OF_A_BUCKET // (4 * size))


def run(config, monkeypatch, *, eager=False):
    """Train; gives the losses by epoch, reserved memory at the end of each, and the trainer."""
    reserved = []
    log_interval = Recorder.log

    def noted(recorder, replica, finished):
        log_interval(recorder, replica, finished)
        reserved.append(torch.cuda.memory_reserved(0))

    monkeypatch.setattr(Recorder, "log", noted)
    trainer = make_trainer(config)
    if eager:
        monkeypatch.setattr(StaticStep, "capture", lambda step: None)
        for replica in trainer.replicas:
            for step in replica.train_steps.values():
                step.objective.bucket.masks.backend = DENSE
                step.objective.loss_of = draft_loss
    trainer.prepare()
    trainer.start_from(weights=first_drafter().state_dict())
    result = trainer.run()
    rows = read_metrics(trainer.folder / "metrics.jsonl")
    return losses(rows), reserved, result, trainer


@pytest.mark.parametrize("size", range(1, torch.cuda.device_count() + 1))
def test_twelve_buckets_in_random_order_for_three_epochs(tmp_path, monkeypatch, size):
    devices = ",".join(f"cuda:{index}" for index in range(size))
    epoch = steps_of_an_epoch(size)
    steps = EPOCHS * epoch
    found, reserved, result, trainer = run(
        prepared(tmp_path, "graphs", devices, steps), monkeypatch
    )
    for replica in trainer.replicas:
        assert sum(step.captured for step in replica.steps.values()) == len(CONTEXTS) == 12
    replays = steps * size
    assert result.summary == (
        f"after freeze: 0 compiles, 0 FX traces, 0 host mask builds, {steps:,} steps "
        f"({replays:,} graph replays)"
    )
    assert len(reserved) == EPOCHS
    assert reserved[-1] == reserved[0]
    assert found[-1] < found[0]
    trainer.teardown()
    del trainer
    gc.collect()
    if size == 1:
        eager, _, result, trainer = run(
            prepared(tmp_path, "eager", devices, epoch), monkeypatch, eager=True
        )
        assert result.summary.endswith("(0 graph replays)")
        np.testing.assert_allclose(found[:1], eager, rtol=2e-3)
        trainer.teardown()
