"""Whole runs of packed fine-tuning: trained, resumed, exported, over two ranks and on a GPU."""

import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.errors import CheckpointError
from runtime.methods import find_method
from runtime.packed.published import is_of, read_record
from runtime.static.graph import StaticStep
from runtime.training.checkpoint import find_checkpoints
from runtime.training.job import Job
from runtime.training.metrics import read_metrics
from runtime.training.run_folder import taken
from tests.runtime.packed.packed_run import make_run, save_model


def train(config, **options):
    """Run to the end; the result, the rows of metrics and the job."""
    with taken(config.run.folder):
        job = Job(find_method("packed"), config, "run.toml")
        result = job.run(**options)
    return result, read_metrics(job.folder / "metrics.jsonl"), job


def losses(rows):
    return np.array([row["loss"] for row in rows])


def test_a_run_learns_and_leaves_a_model_that_transformers_loads(tmp_path):
    config = make_run(tmp_path, train={"steps": 30, "log_every": 5})
    result, rows, job = train(config)
    assert result.summary == (
        "after freeze: 0 compiles, 0 FX traces, 0 host mask builds, 30 steps (eager)"
    )
    assert losses(rows)[-1] < 0.8 * losses(rows)[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model", dtype="float32")
    AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    (newest, *_) = find_checkpoints(tmp_path / "run" / "checkpoints")
    assert newest.step == 30
    state = newest.load()
    for name, weight in model.named_parameters():
        assert torch.equal(weight, state[f"master.{name}"].bfloat16().float()), name
    run = {"fingerprint": job.inputs.fingerprint, "step": 30}
    assert read_record(tmp_path / "run" / "model") == run
    weights = tmp_path / "run" / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert not is_of(tmp_path / "run" / "model", run)
    # The same command finds the run finished, and makes again what is not whole.
    again, _, _ = train(config)
    assert again.steps == 30
    assert is_of(tmp_path / "run" / "model", run)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    rows = {}
    for name, stops in (("whole", ()), ("halves", (4,))):
        root = tmp_path / name
        config = make_run(root, train={"steps": 8, "log_every": 1, "save_every": 4})
        if stops:
            _, _, job = train(config)
            for item in find_checkpoints(job.folder / "checkpoints")[:1]:
                for path in item.folder.iterdir():
                    path.unlink()
                item.folder.rmdir()
        _, rows[name], _ = train(config)
    assert losses(rows["whole"]).tolist() == losses(rows["halves"]).tolist()


def test_two_ranks_compute_what_one_does(tmp_path):
    found = {}
    for name, devices in (("one", "cpu"), ("two", "cpu,cpu")):
        config = make_run(tmp_path / name, run={"devices": devices}, train={"log_every": 1})
        _, rows, job = train(config)
        assert {row["predictions_per_step"] for row in rows} != {0}
        found[name] = losses(rows)
        del job
    np.testing.assert_allclose(found["one"], found["two"], rtol=1e-5)


def test_micro_batches_compute_what_the_whole_batch_does(tmp_path):
    found = {}
    for count in (1, 2, 4):
        batch = {"global_batch": 4, "accumulate": count, "log_every": 1}
        config = make_run(tmp_path / f"by {count}", train=batch)
        _, rows, job = train(config)
        state = find_checkpoints(job.folder / "checkpoints")[0].load()
        found[count] = rows, {name: state[name] for name in state if name.startswith("master.")}
    for count in (2, 4):
        np.testing.assert_allclose(losses(found[count][0]), losses(found[1][0]), rtol=1e-5)
        for key in ("predictions_per_step", "documents_per_step"):
            assert [row[key] for row in found[count][0]] == [row[key] for row in found[1][0]]
        for name, weight in found[1][1].items():
            torch.testing.assert_close(found[count][1][name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_embeddings_stay_tied(tmp_path, tied):
    (tmp_path / "r").mkdir()
    model = save_model(tmp_path / "r" / "model", tie_word_embeddings=tied)
    config = make_run(tmp_path / "r", model=model)
    train(config)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "r" / "run" / "model")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    before = AutoModelForCausalLM.from_pretrained(model)
    assert not torch.equal(loaded.model.embed_tokens.weight, before.model.embed_tokens.weight)


def test_an_entry_of_another_family_is_refused(tmp_path):
    config = make_run(tmp_path)
    config.masks["entry"][0] |= {"family": "causal", "kind": "static"}
    with pytest.raises(Exception, match=re.escape("packed/q32-kv32: causal, static")):
        train(config)


def test_a_run_whose_model_would_take_the_place_of_something_is_refused_before_a_step(tmp_path):
    (tmp_path / "run").mkdir()
    base = save_model(tmp_path / "run" / "model")
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    with pytest.raises(CheckpointError, match="run/model is the model that is trained"):
        train(make_run(tmp_path, model=base))
    elsewhere = save_model(tmp_path / "base")
    with pytest.raises(CheckpointError, match="run/model must be a new or empty folder"):
        train(make_run(tmp_path, model=elsewhere))
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["model"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_equal_eager_ones_and_those_of_the_cpu(tmp_path, monkeypatch, dtype):
    sizes = [20, 60, 9, 128, 5, 5, 5, 100, 20, 200, 3, 50, 50, 50, 250, 255, 256, 1, 40, 90]
    # FlexAttention takes heads of 16 and more on a GPU.
    model = save_model(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=32)
    found = {}
    for name in ("captured", "eager", "cpu"):
        device = "cpu" if name == "cpu" else "cuda:0"
        with monkeypatch.context() as patch:
            if name == "eager":
                patch.setattr(StaticStep, "capture", lambda step: None)
            config = make_run(
                tmp_path / name,
                sizes=sizes,
                lengths=(128, 256),
                model=model,
                run={"devices": device},
                target={"dtype": "float32" if name == "cpu" else dtype},
                train={"steps": 12, "log_every": 1, "lr": 1e-3},
                masks={"BLOCK_SIZE": 128},
            )
            result, rows, _ = train(config)
        replays = re.search(r"(\d+) graph replays", result.summary)
        assert (name == "captured") == (replays is not None and int(replays[1]) == 12)
        found[name] = losses(rows)
        torch._dynamo.reset()
    exact = dtype == "float32"
    np.testing.assert_allclose(found["captured"], found["eager"], rtol=1e-5 if exact else 1e-3)
    np.testing.assert_allclose(found["captured"], found["cpu"], rtol=1e-3 if exact else 3e-2)
