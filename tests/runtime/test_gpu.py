"""The captured step on GPUs, held against the same run on the CPU in fp32."""

import numpy as np
import pytest
import torch

from tests.runtime.tiny_run import build_masks, losses, make_config, make_data, train

pytestmark = [
    pytest.mark.gpu,
    # Compiling imports and runs much of torch itself, which warns of its own deprecations.
    pytest.mark.filterwarnings("default"),
]

LENGTHS = [100, 128, 90, 250, 200, 60, 256, 129, 70, 128]
GPU_COUNT = torch.cuda.device_count()


def prepared(tmp_path, name, devices, **changes):
    folder = tmp_path / name
    folder.mkdir()
    config = make_config(
        folder,
        contexts=(128, 256),
        anchors=32,
        run={"devices": devices},
        masks={"BLOCK_SIZE": 128},
        target={"dtype": changes.pop("dtype", "float32")},
        train={"steps": 12, "lr": 1e-3, **changes},
    )
    for entry in config.masks["entry"]:
        entry.pop("BLOCK_SIZE", None)
    make_data(folder / "data", LENGTHS)
    build_masks(config)
    return config


@pytest.mark.parametrize("anchors", ["layouts", "data"])
def test_a_captured_run_equals_the_cpu_run(tmp_path, anchors):
    _, cpu, cpu_weights = train(prepared(tmp_path, "cpu", "cpu", anchors=anchors))
    result, gpu, gpu_weights = train(prepared(tmp_path, "gpu", "cuda:0", anchors=anchors))
    expected = "0 compiles, 0 FX traces, 0 host mask builds, 12 steps (12 graph replays)"
    assert result.summary == f"after freeze: {expected}"
    np.testing.assert_allclose(losses(gpu), losses(cpu), rtol=2e-3)
    assert [row["anchors_kept"] for row in gpu] == [row["anchors_kept"] for row in cpu]
    for name, weight in cpu_weights.items():
        torch.testing.assert_close(gpu_weights[name], weight, rtol=2e-2, atol=2e-3, msg=name)


def test_bf16_follows_fp32(tmp_path):
    _, exact, _ = train(prepared(tmp_path, "fp32", "cuda:0"))
    _, rough, _ = train(prepared(tmp_path, "bf16", "cuda:0", dtype="bfloat16"))
    np.testing.assert_allclose(losses(rough), losses(exact), rtol=5e-2)


def test_a_second_captured_run_gives_the_same_losses(tmp_path):
    _, first, _ = train(prepared(tmp_path, "a", "cuda:0"))
    _, second, _ = train(prepared(tmp_path, "b", "cuda:0"))
    np.testing.assert_allclose(losses(first), losses(second), rtol=1e-5)


@pytest.mark.parametrize("size", range(2, GPU_COUNT + 1))
def test_gpus_in_threads_give_the_losses_of_one(tmp_path, size):
    devices = ",".join(f"cuda:{index}" for index in range(size))
    batch = 2 * size
    _, one, _ = train(prepared(tmp_path, "one", "cuda:0", global_batch=batch))
    result, many, _ = train(prepared(tmp_path, "many", devices, global_batch=batch))
    assert result.summary.endswith(f"12 steps ({12 * size} graph replays)")
    np.testing.assert_allclose(losses(many), losses(one), rtol=1e-3)
