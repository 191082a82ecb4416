"""The captured step on GPUs, held against the same run on the CPU in fp32."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import maskgen
from runtime.dflash.network.markov import MarkovHead
from runtime.static.attention import dense_attention, flex_attention_over
from runtime.static.graph import GraphPool, StaticStep
from tests.runtime import tiny_run
from tests.runtime.tiny_run import build_masks, losses, make_config, make_data, make_trainer, train

pytestmark = pytest.mark.gpu

LENGTHS = [100, 128, 90, 250, 200, 60, 256, 129, 70, 128]
GPU_COUNT = torch.cuda.device_count()


def prepared(tmp_path, name, devices, **changes):
    folder = tmp_path / name
    folder.mkdir()
    config = make_config(
        folder,
        contexts=(128, 256),
        anchors=changes.pop("num_anchors", 32),
        run={"devices": devices},
        masks={"BLOCK_SIZE": 128},
        target={"dtype": changes.pop("dtype", "float32")},
        drafter=changes.pop("drafter", {}),
        train={"steps": 12, "lr": 1e-3, **changes},
    )
    for entry in config.masks["entry"]:
        entry.pop("BLOCK_SIZE", None)
    make_data(folder / "data", LENGTHS, last_hidden=config.train.has_teacher)
    build_masks(config)
    return config


@pytest.mark.parametrize(
    ("anchors", "loss"), [("layouts", "decay"), ("data", "decay"), ("layouts", "dpace")]
)
def test_a_captured_run_equals_the_cpu_run(tmp_path, anchors, loss):
    options = {"anchors": anchors, "loss": loss}
    _, cpu, cpu_weights = train(prepared(tmp_path, "cpu", "cpu", **options))
    result, gpu, gpu_weights = train(prepared(tmp_path, "gpu", "cuda:0", **options))
    expected = "0 compiles, 0 FX traces, 0 host mask builds, 12 steps (12 graph replays)"
    assert result.summary == f"after freeze: {expected}"
    np.testing.assert_allclose(losses(gpu), losses(cpu), rtol=2e-3)
    assert [row["anchors_kept"] for row in gpu] == [row["anchors_kept"] for row in cpu]
    for name, weight in cpu_weights.items():
        torch.testing.assert_close(gpu_weights[name], weight, rtol=2e-2, atol=2e-3, msg=name)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "num_anchors"),
    [(8, 1, 64, 8), (64, 8, 64, 8), (8, 1, 128, 8), (64, 8, 128, 8), (8, 2, 32, 31)],
)
def test_a_captured_run_of_few_rows_and_grouped_heads(
    tmp_path, monkeypatch, heads, kv_heads, head_dim, num_anchors
):
    network = replace(
        tiny_run.drafter_config(),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
    )
    monkeypatch.setattr(tiny_run, "drafter_config", lambda: network)
    for anchors in ("layouts", "data"):
        options = {"anchors": anchors, "num_anchors": num_anchors, "steps": 6}
        _, cpu, cpu_weights = train(prepared(tmp_path, f"cpu-{anchors}", "cpu", **options))
        _, gpu, gpu_weights = train(prepared(tmp_path, f"gpu-{anchors}", "cuda:0", **options))
        np.testing.assert_allclose(losses(gpu), losses(cpu), rtol=2e-3)
        for name, weight in cpu_weights.items():
            torch.testing.assert_close(gpu_weights[name], weight, rtol=2e-2, atol=2e-3, msg=name)


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "head_dim", "dtype"),
    [
        (8, 1, 32, 64, FP32),
        (64, 8, 32, 64, FP32),
        (8, 1, 32, 64, BF16),
        (64, 8, 32, 64, BF16),
        (8, 1, 32, 128, BF16),
        (64, 8, 32, 128, BF16),
        (32, 1, 4, 64, BF16),
        (16, 4, 100, 64, BF16),
        (16, 4, 124, 128, FP32),
        (32, 4, 32, 16, BF16),
        (6, 2, 32, 96, BF16),
        (8, 8, 32, 64, BF16),
        (8, 1, 128, 64, BF16),
        (64, 8, 256, 128, BF16),
    ],
)
def test_attention_of_few_rows_equals_dense_attention(heads, kv_heads, rows, head_dim, dtype):
    generator = torch.Generator("cuda").manual_seed(heads * rows + head_dim)
    B, S, slots = 2, 200, 4
    anchors = torch.randint(S, (B, rows // slots), generator=generator, device="cuda").sort().values
    n_valid = torch.tensor([rows // slots, rows // slots // 2])
    spans = maskgen.dflash(
        rows, S + rows, draft_block_size=slots, anchors=anchors.cpu(), n_valid=n_valid
    )
    mask = maskgen.to_block_mask(maskgen.compile_mask(spans), spans, "cuda")

    def attend(attention, tensors):
        q, k, v = (t.detach().clone().requires_grad_() for t in tensors)
        out = attention(q, k, v)
        weights = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)
        (out * weights.to(out.dtype)).sum().backward()
        return out, q.grad, k.grad, v.grad

    inputs = [
        torch.randn(B, h, n, head_dim, generator=generator, device="cuda").to(dtype)
        for h, n in ((heads, rows), (kv_heads, S + rows), (kv_heads, S + rows))
    ]
    compiled = torch.compile(flex_attention_over(mask), fullgraph=True, dynamic=False)
    exact = attend(dense_attention(spans.dense().cuda()), [t.float() for t in inputs])
    close = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-4}
    )
    for found, wanted in zip(attend(compiled, inputs), exact, strict=True):
        # Sums over many rows grow with their size, and so does their rounding.
        scale = wanted.abs().max().clamp(min=1)
        torch.testing.assert_close(found.float() / scale, wanted / scale, **close)


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


@pytest.mark.parametrize("loss", ["decay", "dpace"])
@pytest.mark.parametrize("kind", ["l1", "kl", "lk"])
def test_a_captured_run_that_distils_equals_the_cpu_run(tmp_path, kind, loss):
    options = {"distill": kind, "loss": loss}
    _, cpu, cpu_weights = train(prepared(tmp_path, "cpu", "cpu", **options))
    result, gpu, gpu_weights = train(prepared(tmp_path, "gpu", "cuda:0", **options))
    expected = "0 compiles, 0 FX traces, 0 host mask builds, 12 steps (12 graph replays)"
    assert result.summary == f"after freeze: {expected}"
    np.testing.assert_allclose(losses(gpu), losses(cpu), rtol=2e-3)
    overlaps = [[row["overlap"] for row in rows] for rows in (gpu, cpu)]
    np.testing.assert_allclose(*overlaps, rtol=2e-3)
    for name, weight in cpu_weights.items():
        torch.testing.assert_close(gpu_weights[name], weight, rtol=2e-2, atol=2e-3, msg=name)


@pytest.mark.parametrize(
    ("anchors", "loss", "reduce_dtype"),
    [("layouts", "decay", "float32"), ("data", "dpace", "compute")],
)
@pytest.mark.parametrize("size", range(1, min(2, GPU_COUNT) + 1))
def test_captured_micro_batches_give_the_run_of_the_whole_batch(
    tmp_path, anchors, loss, reduce_dtype, size
):
    options = {"anchors": anchors, "loss": loss, "global_batch": 8, "reduce_dtype": reduce_dtype}
    devices = ",".join(f"cuda:{index}" for index in range(size))
    _, whole, weights = train(prepared(tmp_path, "whole", "cuda:0", **options))
    result, parts, added = train(prepared(tmp_path, "parts", devices, accumulate=4, **options))
    expected = f"0 host mask builds, 12 steps ({12 * 4 * size} graph replays)"
    assert result.summary == f"after freeze: 0 compiles, 0 FX traces, {expected}"
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=1e-3)
    assert [row["anchors_kept"] for row in parts] == [row["anchors_kept"] for row in whole]
    for name, weight in weights.items():
        torch.testing.assert_close(added[name], weight, rtol=2e-2, atol=2e-3, msg=name)


def test_a_second_cosine_is_captured(tmp_path):
    _, cpu, weights = train(prepared(tmp_path, "cpu", "cpu"), cycles=(5, 12))
    result, gpu, found = train(prepared(tmp_path, "gpu", "cuda:0"), cycles=(5, 12))
    expected = "0 compiles, 0 FX traces, 0 host mask builds, 12 steps (12 graph replays)"
    assert result.summary == f"after freeze: {expected}"
    rates = [row["lr"] for row in gpu]
    assert rates[4] < rates[5] == pytest.approx(1e-3)
    np.testing.assert_allclose(rates, [row["lr"] for row in cpu], rtol=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=2e-2, atol=2e-3, msg=name)


@pytest.mark.parametrize("anchors", ["layouts", "data"])
def test_a_run_is_scored_in_graphs_of_its_own(tmp_path, anchors):
    """As the CPU scores the same weights, and the steps are those of a run without scores."""
    configs = {}
    for name, device, every in (("cpu", "cpu", 5), ("gpu", "cuda:0", 5), ("off", "cuda:0", 0)):
        config = prepared(tmp_path, name, device, anchors=anchors)
        configs[name] = replace(config, evaluate=replace(config.evaluate, every=every))
    result, rows, weights = train(configs["gpu"])
    expected = "0 compiles, 0 FX traces, 0 host mask builds, 12 steps (12 graph replays)"
    assert result.summary == f"after freeze: {expected}"
    found = [row for row in rows if "heldout_tau" in row]
    assert [row["step"] for row in found] == [5, 10, 12]
    plain = [row["loss"] for row in rows if "loss" in row]
    np.testing.assert_allclose(plain, losses(train(configs["off"])[1]), rtol=1e-3)
    trainer = make_trainer(configs["cpu"])
    try:
        trainer.prepare()
        trainer.start_from(weights=weights)
        tokens, blocks = trainer.replicas[0].scoring.sums().sum(axis=0)
    finally:
        trainer.teardown()
    assert blocks == 93
    # One draft may be another where two logits are nearly the same.
    assert found[-1]["heldout_tau"] == pytest.approx(tokens / blocks, abs=0.035)


MARKOV = {"drafter": {"markov_rank": 16}}
CONFIDENT = {"drafter": {"markov_rank": 16, "confidence": True}, "distill": "l1"}


@pytest.mark.parametrize("heads", [MARKOV, {**MARKOV, "loss": "dpace"}, CONFIDENT])
def test_a_captured_run_with_dsparks_heads_equals_the_cpu_run(tmp_path, heads):
    _, cpu, cpu_weights = train(prepared(tmp_path, "cpu", "cpu", **heads))
    result, gpu, gpu_weights = train(prepared(tmp_path, "gpu", "cuda:0", **heads))
    expected = "0 compiles, 0 FX traces, 0 host mask builds, 12 steps (12 graph replays)"
    assert result.summary == f"after freeze: {expected}"
    for name in ("loss", "confidence_loss") if heads is CONFIDENT else ("loss",):
        found, wanted = ([row[name] for row in rows] for rows in (gpu, cpu))
        np.testing.assert_allclose(found, wanted, rtol=2e-3)
    for name, weight in cpu_weights.items():
        torch.testing.assert_close(gpu_weights[name], weight, rtol=2e-2, atol=5e-3, msg=name)
    assert gpu_weights["markov_head.markov_w2.weight"].abs().max() > 0.003


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [MARKOV, CONFIDENT])
def test_two_runs_with_dsparks_heads_are_equal_to_the_bit(tmp_path, heads, dtype):
    """No gradient is added up in an order that changes from run to run."""
    _, first, weights = train(prepared(tmp_path, "a", "cuda:0", dtype=dtype, **heads))
    _, second, again = train(prepared(tmp_path, "b", "cuda:0", dtype=dtype, **heads))
    assert losses(first).tolist() == losses(second).tolist()
    for name, weight in weights.items():
        assert torch.equal(weight, again[name]), name


@pytest.mark.parametrize("rows", [100, 3072, 3073, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_markov_table_is_captured_and_equal_to_the_bit(rows, dtype):
    """Few tokens in many rows, so that many are added up."""
    generator = torch.Generator("cuda").manual_seed(rows)
    head = MarkovHead(50, 256).to("cuda", dtype)
    tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
    grad = torch.zeros(rows, 256, dtype=dtype, device="cuda")
    found = torch.zeros(50, 256, dtype=dtype, device="cuda")

    def step():
        table = head.markov_w1.weight
        found.copy_(torch.autograd.grad(head.rows(tokens), table, grad)[0])

    pool = GraphPool(torch.device("cuda", 0))
    captured = StaticStep(step, pool, "markov")
    captured.warm_up()
    captured.capture()
    for upper in (7, 40):
        tokens.copy_(torch.randint(upper, (rows,), generator=generator, device="cuda"))
        grad.copy_(torch.randn(rows, 256, generator=generator, device="cuda"))
        torch.cuda.synchronize()
        seen = []
        for _ in range(5):
            captured.run()
            torch.cuda.synchronize()
            seen.append(found.clone())
        assert all(torch.equal(seen[0], other) for other in seen)
        exact = torch.zeros(50, 256, dtype=torch.float64, device="cuda")
        exact.index_add_(0, tokens, grad.double())
        close = (
            {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1}
        )
        torch.testing.assert_close(seen[0].double(), exact, **close)
        assert not seen[0][upper:].any()
    captured.teardown()
