"""Packed rows against each document alone, through transformers' own eager attention."""

import pytest
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from runtime.errors import ConfigError
from runtime.packed.model import packed_attention
from tests.runtime.packed.packed_run import load, make_run


def loss_alone(model, sample):
    """Sum of cross entropies of the learned tokens of one document, and how many they are."""
    tokens = sample.input_ids.long()[None]
    logits = model(tokens).logits[0, :-1].float()
    losses = functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
    learned = sample.loss_mask[1:].bool()
    return losses[learned].sum(), int(learned.sum())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("packed")
    config = make_run(root)
    inputs, trainee = load(config)
    return config, inputs, trainee


def batches_of(inputs, trainee, bucket, batch=2):
    """Host tensors of every batch of a bucket, the last filled up with empty rows."""
    rows = [row for row, length in enumerate(inputs.rows.buckets) if length == bucket]
    objective = trainee.objective(
        trainee.module(torch.device("cpu")), bucket, inputs.entries[bucket], batch, 0
    )
    for first in range(0, len(rows), batch):
        chosen = rows[first : first + batch]
        tensors = {
            name: torch.zeros(field.shape, dtype=field.dtype)
            for name, field in objective.fields.items()
        }
        for place, row in enumerate(chosen):
            trainee.fill(tensors, place, row, epoch=0)
        yield objective, tensors, chosen


@pytest.mark.parametrize("bucket", [32, 64])
def test_loss_and_gradients_are_those_of_the_documents_alone(run, bucket):
    config, inputs, trainee = run
    seen = set()
    for objective, tensors, chosen in batches_of(inputs, trainee, bucket):
        plain = LlamaForCausalLM.from_pretrained(config.target.model, attn_implementation="eager")
        documents = [d for row in chosen for d in inputs.rows.documents[row]]
        singles = [loss_alone(plain, inputs.dataset.sample(d)) for d in documents]
        expected = sum(loss for loss, _ in singles)
        expected.backward()
        objective.model.zero_grad()
        loss, sums = objective(tensors)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        tokens = sum(len(inputs.dataset.sample(d).input_ids) for d in documents)
        counts = [sum(count for _, count in singles), tokens, len(documents)]
        assert sums[1:].tolist() == counts
        assert sums[0].item() == loss.item()
        grads = dict(plain.named_parameters())
        for name, parameter in objective.model.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[name].grad, rtol=1e-4, atol=1e-5)
        seen |= set(documents)
    assert len(seen) > 4


def test_a_batch_of_empty_rows_weighs_nothing_and_is_finite(run):
    _, inputs, trainee = run
    objective, tensors, _ = next(batches_of(inputs, trainee, 32))
    loss, sums = objective({name: torch.zeros_like(t) for name, t in tensors.items()})
    assert sums.tolist() == [0, 0, 0, 0]
    loss.backward()
    grads = [p.grad for p in objective.model.parameters() if p.grad is not None]
    assert all(grad.isfinite().all() for grad in grads)


def test_the_mask_is_that_of_a_formula_and_positions_restart(run):
    _, inputs, trainee = run
    objective, tensors, _ = next(batches_of(inputs, trainee, 32))
    tensors = {name: torch.zeros_like(t) for name, t in tensors.items()}
    tensors["doc_lens"][0, :3] = torch.tensor([5, 9, 2])
    seen = {}
    handle = objective.model.model.layers[0].register_forward_pre_hook(
        lambda _module, _args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    objective(tensors)
    handle.remove()
    doc_ids = torch.tensor([[0] * 5 + [1] * 9 + [2] * 2 + [3] * 16, [0] * 32])
    q, kv = torch.arange(32)[:, None], torch.arange(32)
    expected = (doc_ids[:, :, None] == doc_ids[:, None]) & (q >= kv)
    assert torch.equal(seen["attention_mask"], expected[:, None])
    wanted = [*range(5), *range(9), *range(2), *range(16)]
    assert seen["position_ids"].tolist() == [wanted, [*range(32)]]


@pytest.mark.parametrize("name", ["sliding_window", "softcap", "s_aux"])
def test_attention_that_the_mask_does_not_describe_is_refused(name):
    states = torch.zeros(1, 2, 8, 4)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    with pytest.raises(ConfigError, match=f"target.model = 'Identity': must attend without {name}"):
        packed_attention(torch.nn.Identity(), states, states, states, mask, **{name: 4})


def test_a_window_of_the_whole_row_is_no_window():
    states = torch.zeros(1, 2, 8, 4)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    out, weights = packed_attention(
        torch.nn.Identity(), states, states, states, mask, sliding_window=8, scaling=0.5
    )
    assert out.shape == (1, 8, 2, 4)
    assert weights is None
