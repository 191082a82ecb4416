"""Captured steps with full and sliding layers: against the CPU, and how often they compile."""

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from tests.runtime.tiny_run import (
    build_masks,
    losses,
    make_config,
    make_data,
    make_trainer,
    train,
)

pytestmark = pytest.mark.gpu

LENGTHS = [100, 128, 90, 250, 200, 60, 256, 129, 70, 128]
MIXED = {"num_layers": 2, "layers": ["sliding", "full"], "sliding_window": 40}


def prepared(tmp_path, name, devices, *, drafter=MIXED, **changes):
    folder = tmp_path / name
    folder.mkdir()
    config = make_config(
        folder,
        contexts=(128, 256),
        anchors=32,
        run={"devices": devices},
        masks={"BLOCK_SIZE": 128},
        target={"dtype": "float32"},
        drafter=drafter,
        train={"steps": 12, "lr": 1e-3, **changes},
        evaluate={"every": 6},
    )
    make_data(folder / "data", LENGTHS)
    build_masks(config)
    return config


@pytest.mark.parametrize("anchors", ["layouts", "data"])
@pytest.mark.parametrize("layers", [["sliding", "full"], ["full", "sliding"]])
def test_a_captured_run_equals_the_cpu_run(tmp_path, anchors, layers):
    """The CPU attends with a dense mask."""
    drafter = {**MIXED, "layers": layers}
    options = {"anchors": anchors, "drafter": drafter}
    _, cpu, cpu_weights = train(prepared(tmp_path, "cpu", "cpu", **options))
    result, gpu, gpu_weights = train(prepared(tmp_path, "gpu", "cuda:0", **options))
    expected = "0 compiles, 0 FX traces, 0 host mask builds, 12 steps (12 graph replays)"
    assert result.summary == f"after freeze: {expected}"
    steps = [[row for row in rows if "loss" in row] for rows in (gpu, cpu)]
    np.testing.assert_allclose(*map(losses, steps), rtol=2e-3)
    for name, weight in cpu_weights.items():
        torch.testing.assert_close(gpu_weights[name], weight, rtol=2e-2, atol=2e-3, msg=name)
    scores = [[row["heldout_tau"] for row in rows if "heldout_tau" in row] for rows in (gpu, cpu)]
    assert len(scores[0]) == 2
    # One draft may be another where two logits are nearly the same.
    assert scores[0] == pytest.approx(scores[1], abs=0.035)


def compiled_graphs(config):
    """Graphs that the warm-up compiled."""
    torch._dynamo.reset()
    counters.clear()
    trainer = make_trainer(config)
    try:
        trainer.prepare()
        return counters["stats"]["unique_graphs"]
    finally:
        trainer.teardown()


@pytest.mark.parametrize("anchors", ["layouts", "data"])
def test_mixed_layers_compile_no_more_than_full_ones(tmp_path, anchors):
    full = compiled_graphs(prepared(tmp_path, "full", "cuda:0", drafter={}, anchors=anchors))
    mixed = compiled_graphs(prepared(tmp_path, "mixed", "cuda:0", anchors=anchors))
    assert mixed == full > 0
