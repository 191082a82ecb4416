"""D-PACE against plain fp64 with the gradients of autograd, and what its weights must satisfy."""

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from runtime.dflash.loss import head as loss_module
from runtime.dflash.loss.dpace import dpace_weights
from runtime.dflash.loss.head import head_loss

ALPHAS = [1e-6, 0.3, 0.5, 1.0]
BLOCKS = [
    [1, 1, 1, 1, 1],
    [1, 0, 1, 1, 0],  # gaps in mid-block and at the end
    [0, 1, 1, 0, 1],
    [1, 0, 0, 0, 0],
    [0, 0, 0, 0, 1],
    [0, 0, 0, 0, 0],  # an anchor that is not kept, or padding
    [1, 1, 1, 1, 0],
]
"""Which slots are supervised."""
K, H, V = 5, 6, 13


def plain_weights(cross_entropy, supervised, alpha):
    """Of one block, in floats: over all later supervised slots, the chance of arriving there."""
    weights = []
    for k in range(len(supervised)):
        total = 0.0
        for last in range(k, len(supervised)):
            chance = 1.0
            for slot in range(last + 1):
                if supervised[slot]:
                    chance *= (1 - alpha) * torch.exp(-cross_entropy[slot]).item() + alpha
            total += chance * supervised[last]
        weights.append(total * supervised[k])
    return weights


def rows(blocks=BLOCKS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(blocks) * K, H, generator=generator)
    head = torch.randn(V, H, generator=generator)
    labels = torch.randint(V, (len(hidden),), generator=generator)
    # Some drafts that are nearly sure, right and wrong.
    hidden[:2] = 3 * head[labels[:2]]
    hidden[11] = -3 * head[labels[11]]
    return hidden, head, labels, torch.tensor(blocks, dtype=torch.float32).flatten()


def exact(hidden, head, labels, supervised, alpha):
    """The loss, its gradient by autograd, and the plain sum, all in fp64."""
    hidden = hidden.detach().double().requires_grad_()
    logits = hidden @ head.double().T
    entropy = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    pairs = zip(entropy.detach().view(-1, K), supervised.view(-1, K).tolist(), strict=True)
    weights = torch.tensor([plain_weights(*pair, alpha) for pair in pairs], dtype=torch.float64)
    loss = (weights.flatten() * entropy).sum()
    (grad,) = torch.autograd.grad(loss, hidden)
    return loss.detach(), grad, (entropy.detach() * supervised).sum()


def found(hidden, head, labels, supervised, alpha):
    hidden = hidden.clone().requires_grad_()
    result = head_loss(hidden, head, labels, supervised, slots=K, dpace_alpha=alpha)
    result.loss.backward()
    return result, hidden.grad


@pytest.mark.parametrize("alpha", ALPHAS)
def test_loss_and_gradient_equal_plain_fp64(alpha):
    case = rows()
    (result, grad), (loss, wanted, plain) = found(*case, alpha), exact(*case, alpha)
    torch.testing.assert_close(result.loss.double(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.cross_entropy.double(), plain, rtol=1e-5, atol=1e-6)
    assert not result.cross_entropy.requires_grad
    supervised = case[-1] > 0
    assert grad[~supervised].abs().max() == 0
    right = ((case[0] @ case[1].T).argmax(-1) == case[2]) & supervised
    assert result.correct.tolist() == right.float().tolist()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_weight_is_the_derivative_of_the_accepted_length(alpha):
    generator = torch.Generator().manual_seed(1)
    supervised = torch.tensor(BLOCKS, dtype=torch.bool)
    entropy = 4 * torch.rand(supervised.shape, generator=generator, dtype=torch.float64)
    chance = torch.where(supervised, (1 - alpha) * torch.exp(-entropy) + alpha, 1.0)
    log_chance = chance.log().requires_grad_()
    length = (log_chance.cumsum(-1).exp() * supervised).sum()
    (wanted,) = torch.autograd.grad(length, log_chance)
    weights = dpace_weights(entropy, supervised, alpha)
    # A slot that is passed over has no chance to be derived by.
    torch.testing.assert_close(weights, wanted * supervised, rtol=1e-12, atol=1e-12)


def test_with_alpha_1_a_slot_weighs_the_supervised_ones_from_it_on():
    supervised = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0]]).bool()
    weights = dpace_weights(9 * torch.rand(3, 5), supervised, 1.0)
    assert weights.tolist() == [[5, 4, 3, 2, 1], [3, 0, 2, 1, 0], [0, 0, 0, 0, 0]]


def test_sure_drafts_weigh_as_alpha_1_and_doubtful_ones_fall_off():
    supervised = torch.ones(2, 3, dtype=torch.bool)
    entropy = torch.tensor([[0.0] * 3, [200.0] * 3])
    weights = dpace_weights(entropy, supervised, 0.5).tolist()
    assert weights == [[3, 2, 1], [0.875, 0.375, 0.125]]


def test_what_is_drafted_in_slots_without_supervision_changes_nothing():
    supervised = torch.tensor(BLOCKS, dtype=torch.bool)
    entropy = torch.rand(supervised.shape)
    other = torch.where(supervised, entropy, 50.0)
    assert torch.equal(
        dpace_weights(entropy, supervised, 0.5), dpace_weights(other, supervised, 0.5)
    )


# 3 rows are fewer than a block; 7 and 11 are no multiple of 5; 10 is; 35 is everything.
@pytest.mark.parametrize("chunk", [3, 7, 10, 11, 34, 35])
def test_no_chunk_cuts_a_block(monkeypatch, chunk):
    case = rows()
    whole, grad = found(*case, 0.5)
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", chunk)
    cut, grad_cut = found(*case, 0.5)
    for one, other in zip((*whole, grad), (*cut, grad_cut), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_more_rows_than_a_chunk_of_4096():
    case = rows(BLOCKS * 120)
    assert len(case[0]) == 4200
    (result, grad), (loss, wanted, plain) = found(*case, 0.5), exact(*case, 0.5)
    torch.testing.assert_close(result.loss.double(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.cross_entropy.double(), plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.double(), wanted, rtol=1e-4, atol=1e-5)


def test_in_bfloat16_weights_are_of_fp32_logits():
    hidden, head, labels, supervised = rows()
    hidden, head = hidden.bfloat16(), head.bfloat16()
    result, grad = found(hidden, head, labels, supervised, 0.5)
    entropy = torch.nn.functional.cross_entropy(
        (hidden @ head.T).double(), labels, reduction="none"
    )
    pairs = zip(entropy.view(-1, K), supervised.view(-1, K).tolist(), strict=True)
    weights = torch.tensor([plain_weights(*pair, 0.5) for pair in pairs]).flatten()
    torch.testing.assert_close(result.loss, (weights * entropy).sum().float(), rtol=1e-5, atol=0)
    assert (result.loss.dtype, grad.dtype) == (torch.float32, torch.bfloat16)
    _, wanted, _ = exact(hidden, head, labels, supervised, 0.5)
    torch.testing.assert_close(grad.double(), wanted, rtol=0.05, atol=0.1)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_one_graph_of_tensors_alone_whose_weights_follow_the_logits():
    """As on a GPU: compiled whole for fixed shapes, it computes what it does as it is."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(inputs)
        return lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(head_loss, fullgraph=True, dynamic=False, backend=backend)
    for seed in (0, 1):
        hidden, head, labels, supervised = rows(seed=seed)
        x = hidden.clone().requires_grad_()
        result = compiled(x, head, labels, supervised, slots=K, dpace_alpha=0.5)
        result.loss.backward()
        wanted, grad = found(hidden, head, labels, supervised, 0.5)
        torch.testing.assert_close(tuple(result), tuple(wanted))
        torch.testing.assert_close(x.grad, grad)
    # Slots and alpha are constants of the one graph; a number among its inputs would be a copy.
    (inputs,) = graphs
    assert [tuple(tensor.shape) for tensor in inputs] == [(35, H), (V, H), (35,), (35,)]


def test_no_value_is_read_on_the_host():
    case = rows()
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in case]
        assert head_loss(*fakes, slots=K, dpace_alpha=0.5).loss.shape == ()
        with pytest.raises(DataDependentOutputException):
            fakes[0].sum().item()
