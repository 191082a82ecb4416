import math

import pytest
import torch

from runtime.dflash.loss import head as loss_module
from runtime.dflash.loss.head import block_targets, head_loss


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


def plain_targets(ids, supervised, anchors, block, gamma):
    """Slot by slot; an anchor without a weight is not kept."""
    labels, weights, kept = [], [], 0
    for anchor in anchors:
        counts = supervised[anchor : anchor + 2] == [True, True]
        kept += counts
        row = []
        for slot in range(1, block):
            at = anchor + slot
            inside = at < len(ids)
            labels.append(ids[at] if inside else None)
            decay = math.exp(-(slot - 1) / gamma) if gamma else 1.0
            row.append(decay if counts and inside and supervised[at] else 0.0)
        weights.append(row)
    return labels, weights, kept


@pytest.mark.parametrize("gamma", [0.0, 0.7, 4.0])
@pytest.mark.parametrize("block", [2, 5])
def test_targets_of_several_samples_equal_a_plain_count(block, gamma):
    generator = torch.Generator().manual_seed(block)
    ids = torch.randint(90, (3, 20), generator=generator)
    loss_mask = torch.rand(3, 20, generator=generator) < 0.7
    loss_mask[1, 11:] = False
    anchors = torch.stack(
        [torch.randperm(20, generator=generator)[:6].sort().values for _ in range(3)]
    ).int()
    n_valid = torch.tensor([6, 3, 0], dtype=torch.int32)
    found = block_targets(ids, loss_mask, anchors, n_valid, draft_block_size=block, gamma=gamma)
    assert found.labels.shape == found.weights.shape == (3, 6, block - 1)
    assert (found.labels.dtype, found.weights.dtype) == (torch.int64, torch.float32)
    assert found.anchors_kept.dtype == torch.float32
    for sample in range(3):
        used = anchors[sample, : n_valid[sample]].tolist()
        labels, weights, kept = plain_targets(
            ids[sample].tolist(), loss_mask[sample].tolist(), used, block, gamma
        )
        drawn = found.labels[sample, : len(used)].flatten().tolist()
        pairs = zip(labels, drawn, strict=True)
        assert all(label in (None, other) for label, other in pairs)
        wanted = torch.zeros(6, block - 1)
        if used:
            wanted[: len(used)] = torch.tensor(weights)
        torch.testing.assert_close(found.weights[sample], wanted)
        assert found.anchors_kept[sample].item() == kept


@pytest.mark.parametrize("chunk", [3, 4096])
def test_in_bfloat16_softmax_and_sums_are_fp32(monkeypatch, chunk):
    """Only products round: logits, and the gradient's two."""
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", chunk)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(8, 16, generator=generator).bfloat16().requires_grad_()
    head = torch.randn(64, 16, generator=generator).bfloat16()
    labels = torch.randint(64, (8,), generator=generator)
    weights = torch.rand(8, generator=generator) + 0.1
    result = head_loss(hidden, head, labels, weights)
    result.loss.backward()
    assert (result.loss.dtype, result.correct.dtype) == (torch.float32, torch.float32)
    assert hidden.grad.dtype == torch.bfloat16
    assert not result.correct.requires_grad
    logits = (hidden.detach() @ head.T).double()
    exact = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(result.loss.double(), (exact * weights).sum(), rtol=1e-6, atol=0)
    pull = torch.nn.functional.one_hot(labels, 64).double()
    gradient = weights.double()[:, None] * (logits.softmax(-1) - pull) @ head.double()
    torch.testing.assert_close(hidden.grad.double(), gradient, rtol=0.02, atol=0.03)


def test_huge_logits_neither_overflow_nor_vanish():
    hidden = torch.tensor([[200.0, 0.0], [-200.0, 0.0]], requires_grad=True)
    head = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    result = head_loss(hidden, head, torch.tensor([2, 2]), torch.tensor([0.5, 2.0]))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(0.5 * 400)
    assert hidden.grad.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert result.correct.tolist() == [0.0, 1.0]


def test_gradients_are_computed_in_chunks_of_4096_rows():
    assert loss_module.CHUNK_ROWS == 4096
