"""The held-out loss against a plain loop over transformers' own eager model."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from runtime.data.dataset import open_splits, write_dataset
from runtime.errors import CheckpointError, DatasetError, NoSamplesError
from runtime.packed.evaluation import evaluate
from runtime.packed.published import save_model as save_model_of_run
from runtime.target.model import Target
from tests.runtime.packed.packed_run import documents_of, make_run, save_model


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("evaluation")


@pytest.fixture(scope="module")
def config(root):
    return make_run(root, evaluate={"documents": 2})


def plain_loss(folder, samples):
    """Mean over the learned tokens, summed in float64, and how many they are."""
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")
    losses = []
    for sample in samples:
        tokens = sample.input_ids.long()
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1].double()
        found = functional.cross_entropy(logits, tokens[1:], reduction="none")
        losses += found[sample.loss_mask[1:].bool()].tolist()
    return sum(losses) / len(losses), len(losses)


def test_losses_before_and_after_are_those_of_a_plain_loop(root, config):
    other = save_model(root / "run" / "model", seed=5)
    samples = documents_of([5, 9])  # the first two of the held-out ones
    result = evaluate(config)
    before, count = plain_loss(root / "model", samples)
    after, _ = plain_loss(other, samples)
    assert result.before == pytest.approx(before, rel=1e-5)
    assert result.after == pytest.approx(after, rel=1e-5)
    assert before != pytest.approx(after, rel=1e-2)
    assert (result.documents, result.predictions) == (2, count)
    assert result.exact
    assert result.ends == {"heldout_loss": (result.before, result.after)}
    first, second = result.table().splitlines()
    assert first == f"2 held-out documents, {count} predicted tokens (cpu, float32)"
    assert second == f"loss (nats a token)  before {before:.4f}  after {after:.4f}"


def test_a_folder_that_is_named_takes_the_place_of_the_runs(root, config):
    result = evaluate(config, root / "model")
    assert result.after == result.before


def test_a_run_without_a_model_is_refused(tmp_path):
    config = make_run(tmp_path)
    with pytest.raises(CheckpointError, match=r"no model in .*run/model; run: python -m runtime.t"):
        evaluate(config)
    with pytest.raises(CheckpointError, match=r"no model in .*nothere; name a folder that runtime"):
        evaluate(config, tmp_path / "nothere")


def test_a_model_that_is_not_as_it_was_written_is_not_scored(tmp_path):
    config = make_run(tmp_path)
    trained = Target.load(config.target.model, device="cpu", dtype="float32")
    weights = {name: w.detach().clone() for name, w in trained.model.named_parameters()}
    folder = save_model_of_run(tmp_path / "kept", trained, weights, {"fingerprint": "f", "step": 1})
    assert evaluate(config, folder).predictions > 0
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        whole = (folder / name).read_bytes()
        data = bytearray(whole)
        data[len(data) // 3] ^= 4
        (folder / name).write_bytes(data)
        with pytest.raises(CheckpointError, match="kept is not as it was written: copy or fetch"):
            evaluate(config, folder)
        (folder / name).write_bytes(whole)


def test_another_model_than_that_of_the_data_is_refused(tmp_path):
    config = make_run(tmp_path)
    other = save_model(tmp_path / "other", seed=9)
    config = replace(config, target=replace(config.target, model=str(other)))
    with pytest.raises(DatasetError, match="was prepared with target 'tiny'"):
        evaluate(config, tmp_path / "model")


def test_documents_of_which_nothing_is_learned_are_refused(tmp_path):
    config = make_run(tmp_path)
    train, _ = open_splits(config.data.folder)
    nothing = documents_of([1, 1])
    write_dataset(
        tmp_path / "data", {"train": [train.sample(0)], "heldout": nothing}, dict(train.meta)
    )
    with pytest.raises(NoSamplesError, match="must have a held-out document with learned tokens"):
        evaluate(config, tmp_path / "model")
