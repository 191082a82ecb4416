import math

import pytest
import torch

from runtime.dflash import loss as loss_module
from runtime.dflash.loss import block_targets, head_loss


def test_slots_predict_the_tokens_after_the_anchor():
    # ids 10..21, anchor 5, block 4: slot 0 holds token 15, slots 1..3 predict 16, 17, 18.
    targets = block_targets(
        torch.arange(10, 22)[None],
        torch.ones(1, 12, dtype=torch.bool),
        torch.tensor([[5]], dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
        draft_block_size=4,
        gamma=2.0,
    )
    assert targets.labels.tolist() == [[[16, 17, 18]]]
    expected = [1.0, math.exp(-0.5), math.exp(-1.0)]
    torch.testing.assert_close(targets.weights[0, 0], torch.tensor(expected))


def test_what_carries_no_weight():
    loss_mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1]], dtype=torch.bool)
    targets = block_targets(
        torch.arange(8)[None],
        loss_mask,
        # 1: unsupervised itself; 3: its slot 2 falls on token 5; 4: followed by an unsupervised
        # token; 6: its slots 2 and 3 lie past the end; the last anchor is not valid.
        torch.tensor([[1, 3, 4, 6, 2]], dtype=torch.int32),
        torch.tensor([4], dtype=torch.int32),
        draft_block_size=4,
        gamma=0.0,
    )
    assert targets.weights[0].tolist() == [
        [0, 0, 0],
        [1, 0, 1],
        [0, 0, 0],
        [1, 0, 0],
        [0, 0, 0],
    ]
    assert targets.anchors_kept.tolist() == [2.0]


@pytest.mark.parametrize("chunk", [3, 7, 4096])
def test_head_loss_equals_dense_cross_entropy_in_fp64(monkeypatch, chunk):
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", chunk)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator).requires_grad_()
    head = torch.randn(11, 5, generator=generator)
    labels = torch.randint(11, (7,), generator=generator)
    weights = torch.rand(7, generator=generator)
    weights[2] = 0
    result = head_loss(hidden, head, labels, weights)
    (3 * result.loss).backward()
    exact_hidden = hidden.detach().double().requires_grad_()
    logits = exact_hidden @ head.double().T
    exact = (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * weights).sum()
    (3 * exact).backward()
    torch.testing.assert_close(result.loss.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(hidden.grad.double(), exact_hidden.grad, rtol=1e-5, atol=1e-6)
    right = (logits.argmax(-1) == labels) & (weights > 0)
    assert result.correct.tolist() == right.float().tolist()


def test_without_a_supervised_token_the_loss_is_zero_and_so_is_its_gradient():
    hidden = torch.randn(4, 5).requires_grad_()
    result = head_loss(hidden, torch.randn(11, 5), torch.zeros(4, dtype=torch.long), torch.zeros(4))
    result.loss.backward()
    assert result.loss.item() == 0.0
    assert hidden.grad.abs().max().item() == 0.0
