"""A loss over the tokens of the training data: which these are, and that it is the same loss."""

import pytest
import torch
from torch.nn import functional

from runtime.config import parse_config
from runtime.dflash.capabilities import STEP, Request, check_request
from runtime.dflash.loss import vocabulary
from runtime.dflash.loss.head import head_loss
from runtime.dflash.loss.vocabulary import seen_tokens
from runtime.dflash.settings import DFlashConfig
from runtime.errors import ConfigError
from tests.runtime.tiny_run import VOCAB, losses, make_data, train
from tests.runtime.training.test_trainer import prepared


@pytest.fixture
def few(monkeypatch):
    """Only the first 3 ids are common."""
    monkeypatch.setattr(vocabulary, "COMMON", 3)


def test_tokens_of_all_samples_and_the_common_ones(few, tmp_path):
    dataset = make_data(tmp_path / "data", [5, 6])
    held = {int(token) for i in range(2) for token in dataset.sample(i).input_ids}
    seen = seen_tokens(dataset, VOCAB)
    assert seen.ids.tolist() == sorted(held | {0, 1, 2})
    assert len(seen.ids) < VOCAB
    for token in range(VOCAB):
        if token in held:
            assert seen.ids[seen.rows[token]] == token
        elif token > 2:
            assert seen.rows[token] == 0


def test_the_loss_is_cross_entropy_without_the_other_tokens(few, tmp_path):
    """Against fp64 logits that are minus infinity where a token was not seen."""
    dataset = make_data(tmp_path / "data", [5, 6])
    seen = seen_tokens(dataset, VOCAB)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(7, 16, generator=generator, requires_grad=True)
    head = torch.randn(VOCAB, 16, generator=generator)
    labels = dataset.sample(0).input_ids[torch.arange(7) % 5].long()
    weights = torch.rand(7, generator=generator)
    found = head_loss(hidden, head[seen.ids], seen.rows[labels], weights)
    found.loss.backward()
    plain = hidden.detach().double().requires_grad_()
    logits = plain @ head.double().T
    logits = logits.masked_fill(~torch.isin(torch.arange(VOCAB), seen.ids), -torch.inf)
    wanted = (functional.cross_entropy(logits, labels, reduction="none") * weights).sum()
    wanted.backward()
    assert float(found.loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    torch.testing.assert_close(hidden.grad.double(), plain.grad, rtol=1e-4, atol=1e-5)
    assert found.correct.tolist() == (logits.argmax(-1) == labels).float().tolist()


def test_a_run_over_all_tokens_is_the_same_run(tmp_path):
    """The tiny vocabulary is common as a whole."""
    _, rows, weights = train(prepared(tmp_path, "all"))
    _, again, same = train(prepared(tmp_path, "seen", train={"softmax": "seen"}))
    assert losses(again).tolist() == losses(rows).tolist()
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def test_a_run_over_fewer_tokens_learns_and_shows_a_smaller_loss(few, tmp_path):
    _, rows, _ = train(prepared(tmp_path, "all", train={"steps": 30}))
    result, again, _ = train(prepared(tmp_path, "seen", train={"softmax": "seen", "steps": 30}))
    assert "0 compiles, 0 FX traces, 0 host mask builds, 30 steps" in result.summary
    assert losses(again)[0] <= losses(rows)[0]
    assert losses(again)[-5:].mean() < losses(again)[:5].mean() - 0.1


@pytest.mark.parametrize("drafter", [{}, {"markov_rank": 4}])
@pytest.mark.parametrize("distill", ["none", "l1"])
def test_a_teacher_needs_all_tokens(drafter, distill):
    document = {"drafter": drafter, "train": {"softmax": "seen", "distill": distill}}
    request = Request(config=parse_config(document, DFlashConfig), specs={})
    if distill == "none":
        check_request(request, (STEP,))
        return
    with pytest.raises(ConfigError, match=r"train\.softmax"):
        check_request(request, (STEP,))
