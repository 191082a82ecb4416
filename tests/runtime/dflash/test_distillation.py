"""The loss with a teacher and with a Markov head, against dense fp64 with autograd's gradients."""

import math

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from runtime.dflash.loss import head as loss_module
from runtime.dflash.loss.distillation import Distillation, divergence
from runtime.dflash.loss.head import head_loss

KINDS = ["l1", "kl", "lk"]
K, H, V, RANK = 5, 6, 13, 3


def make(blocks=4, seed=0):
    """Rows near and far from their teacher, some without weight."""
    generator = torch.Generator().manual_seed(seed)
    rows = blocks * K
    hidden = torch.randn(rows, H, generator=generator)
    head = torch.randn(V, H, generator=generator)
    teacher = hidden + torch.rand(rows, 1, generator=generator) * torch.randn(
        rows, H, generator=generator
    )
    weights = torch.rand(rows, generator=generator)
    weights[[3, 10, 19]] = 0
    return {
        "hidden": hidden,
        "head_weight": head,
        "labels": torch.randint(V, (rows,), generator=generator),
        "weights": weights,
        "teacher": teacher,
        "markov": (
            torch.randn(rows, RANK, generator=generator),
            torch.randn(V, RANK, generator=generator),
        ),
    }


def without(case, *names):
    return {name: value for name, value in case.items() if name not in names}


def plain_distance(kind, p, q):
    variation = (p - q).abs().sum(-1) / 2
    if kind == "l1":
        return 2 * variation
    kl = (p * (p.log() - q.log())).sum(-1)
    if kind == "kl":
        return kl
    lam = torch.exp(-3 * (1 - variation)).detach()
    return lam * kl + (1 - lam) * variation


def plain_dpace(entropy, supervised, alpha):
    chance = torch.where(supervised, (1 - alpha) * torch.exp(-entropy) + alpha, 1.0)
    log_chance = chance.detach().log().requires_grad_()
    length = (log_chance.cumsum(-1).exp() * supervised).sum()
    (weights,) = torch.autograd.grad(length, log_chance)
    return weights * supervised


def exact(case, distill=None, alpha=None):
    """Loss, cross entropy, overlap, and the gradients of hidden, e and w, all in fp64."""
    leaves = [case["hidden"], *case.get("markov", ())]
    leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    head, weights = case["head_weight"].double(), case["weights"].double()
    logits = leaves[0] @ head.T
    if "markov" in case:
        logits = logits + leaves[1] @ leaves[2].T
    entropy = torch.nn.functional.cross_entropy(logits, case["labels"], reduction="none")
    factor = weights
    if alpha is not None:
        factor = plain_dpace(entropy.view(-1, K), weights.view(-1, K) > 0, alpha).flatten()
    q = logits.softmax(-1)
    losses, common = entropy, None
    if "teacher" in case:
        p = (case["teacher"].double() @ head.T).softmax(-1)
        common = torch.minimum(p, q).sum(-1).detach()
        if distill is not None:
            distance = plain_distance(distill.kind, p, q)
            losses = (1 - distill.share) * entropy + distill.share * distance
    loss = (losses * factor).sum()
    grads = torch.autograd.grad(loss, leaves)
    return loss.detach(), (entropy * weights).sum().detach(), common, grads


def found(case, distill=None, alpha=None, take=head_loss):
    case = dict(case)
    leaves = [case["hidden"], *case.get("markov", ())]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    case["hidden"] = leaves[0]
    if "markov" in case:
        case["markov"] = (leaves[1], leaves[2])
    if alpha is not None:
        case["weights"] = (case["weights"] > 0).float()
    result = take(**case, distill=distill, slots=K, dpace_alpha=alpha)
    result.loss.backward()
    return result, [leaf.grad for leaf in leaves]


def supervised_only(case, alpha):
    return case if alpha is None else {**case, "weights": (case["weights"] > 0).float()}


@pytest.mark.parametrize("markov", [False, True])
@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("share", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_overlap_and_gradients_equal_plain_fp64(kind, share, alpha, markov):
    case = supervised_only(make() if markov else without(make(), "markov"), alpha)
    distill = Distillation(kind, share)
    result, grads = found(case, distill, alpha)
    loss, entropy, common, wanted = exact(case, distill, alpha)
    torch.testing.assert_close(result.loss.double(), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.cross_entropy.double(), entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.overlap.double(), common, rtol=1e-5, atol=1e-6)
    for grad, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-5)
    assert not result.overlap.requires_grad
    assert not result.cross_entropy.requires_grad


@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("names", [(), ("teacher",)])
def test_a_markov_head_without_distillation(names, alpha):
    case = supervised_only(without(make(), *names), alpha)
    result, grads = found(case, None, alpha)
    loss, entropy, common, wanted = exact(case, None, alpha)
    torch.testing.assert_close(result.loss.double(), loss, rtol=1e-5, atol=1e-6)
    for grad, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-5)
    assert (result.overlap is None) == (common is None)
    if alpha is None:
        assert result.cross_entropy is None
    else:
        torch.testing.assert_close(result.cross_entropy.double(), entropy, rtol=1e-5, atol=1e-6)
    logits = case["hidden"] @ case["head_weight"].T + case["markov"][0] @ case["markov"][1].T
    right = (logits.argmax(-1) == case["labels"]) & (case["weights"] > 0)
    assert result.correct.tolist() == right.float().tolist()


def test_a_scaled_loss_scales_every_gradient():
    case = make()
    _, grads = found(case, Distillation("l1", 0.9))
    case["hidden"].requires_grad_()
    for tensor in case["markov"]:
        tensor.requires_grad_()
    (3 * head_loss(**case, distill=Distillation("l1", 0.9)).loss).backward()
    for tensor, grad in zip((case["hidden"], *case["markov"]), grads, strict=True):
        torch.testing.assert_close(tensor.grad, 3 * grad)


def test_a_teacher_alone_is_compared_with_and_changes_nothing_else():
    case = without(make(), "markov")
    result, (grad,) = found(case)
    plain, (wanted,) = found(without(case, "teacher"))
    assert (plain.overlap, plain.cross_entropy, result.cross_entropy) == (None, None, None)
    torch.testing.assert_close(result.loss, plain.loss)
    torch.testing.assert_close(grad, wanted)
    torch.testing.assert_close(result.overlap.double(), exact(case)[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_markov_head_of_zeros_is_none_bit_for_bit(dtype):
    case = make()
    case["markov"] = (case["markov"][0], torch.zeros(V, RANK))
    for name in ("hidden", "head_weight", "teacher"):
        case[name] = case[name].to(dtype)
    case["markov"] = tuple(tensor.to(dtype) for tensor in case["markov"])
    result, grads = found(case)
    plain, _ = found(without(case, "markov"))
    for name in ("loss", "correct", "overlap"):
        assert torch.equal(getattr(result, name), getattr(plain, name)), name
    assert grads[1].abs().max() == 0
    assert grads[2].abs().max() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_moving_the_teacher_by_a_row_changes_the_loss(kind):
    case = without(make(), "markov")
    moved = {**case, "teacher": case["teacher"].roll(1, dims=0)}
    one, other = (found(c, Distillation(kind, 0.9))[0].loss.item() for c in (case, moved))
    assert abs(one - other) > 0.01 * one


@pytest.mark.parametrize("alpha", [None, 0.5])
# 3 rows are fewer than a block; 14 and 22 are halved to no multiple of 5; 40 takes all.
@pytest.mark.parametrize("chunk", [3, 10, 14, 22, 40])
def test_chunks_change_nothing(monkeypatch, chunk, alpha):
    case = make()
    whole = found(case, Distillation("lk", 0.9), alpha)
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", chunk)
    cut = found(case, Distillation("lk", 0.9), alpha)
    for one, other in zip((*whole[0], *whole[1]), (*cut[0], *cut[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_more_rows_than_a_chunk_of_2048():
    case = make(blocks=500)
    result, grads = found(case, Distillation("l1", 0.9))
    loss, _, common, wanted = exact(case, Distillation("l1", 0.9))
    torch.testing.assert_close(result.loss.double(), loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(result.overlap.double(), common, rtol=1e-5, atol=1e-6)
    for grad, expected in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-4)


def test_in_bfloat16_both_distributions_are_of_fp32_logits():
    case = make()
    for name in ("hidden", "head_weight", "teacher"):
        case[name] = case[name].bfloat16()
    case["markov"] = tuple(tensor.bfloat16() for tensor in case["markov"])
    result, grads = found(case, Distillation("l1", 0.9))
    hidden, head, (e, w) = case["hidden"], case["head_weight"], case["markov"]
    logits = (hidden @ head.T).double() + (e @ w.T).double()
    p, q = (case["teacher"] @ head.T).double().softmax(-1), logits.softmax(-1)
    entropy = torch.nn.functional.cross_entropy(logits, case["labels"], reduction="none")
    losses = 0.1 * entropy + 0.9 * (p - q).abs().sum(-1)
    torch.testing.assert_close(result.loss.double(), (losses * case["weights"]).sum())
    assert (result.loss.dtype, result.overlap.dtype) == (torch.float32, torch.float32)
    for grad, expected in zip(grads, exact(case, Distillation("l1", 0.9))[3], strict=True):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad.double(), expected, rtol=0.05, atol=0.1)


def distributions(seed=0, sharpness=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(2, 50, V, generator=generator, dtype=torch.float64)
    return logits[0].log_softmax(-1), logits[1].log_softmax(-1)


def test_l1_is_twice_the_variation_which_kl_bounds():
    log_p, log_q = distributions()
    l1, _ = divergence("l1", log_p, log_q)
    kl, _ = divergence("kl", log_p, log_q)
    variation = 1 - torch.minimum(log_p.exp(), log_q.exp()).sum(-1)
    torch.testing.assert_close(l1, 2 * variation, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(l1, (log_p.exp() - log_q.exp()).abs().sum(-1))
    assert bool((variation <= (kl / 2).sqrt()).all())


def test_lk_turns_from_kl_to_variation_as_the_overlap_grows():
    log_p, log_q = distributions()
    (lk, slope), (kl, of_kl), (l1, of_l1) = (
        divergence(kind, log_p, log_q) for kind in ("lk", "kl", "l1")
    )
    lam = torch.exp(-3 * (1 - l1 / 2))
    torch.testing.assert_close(lk, lam * kl + (1 - lam) * l1 / 2)
    torch.testing.assert_close(slope, lam[:, None] * of_kl + (1 - lam)[:, None] * of_l1 / 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_sums_to_0_over_the_vocabulary(kind):
    _, slope = divergence(kind, *distributions())
    assert slope.abs().max() > 0.01
    torch.testing.assert_close(slope.sum(-1), torch.zeros(50, dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_drafter_is_the_target_there_is_nothing_to_learn(kind):
    log_p, _ = distributions()
    distance, slope = divergence(kind, log_p, log_p)
    torch.testing.assert_close(distance, torch.zeros_like(distance), rtol=0, atol=1e-12)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-12)


def test_a_teacher_that_is_sure_is_a_label():
    """KL is then cross entropy, with its gradient, and L1 twice the chance of any other token."""
    _, log_q = distributions()
    labels = torch.arange(50) % V
    sure = torch.full((50, V), -1e4, dtype=torch.float64)
    sure[torch.arange(50), labels] = 1e4
    log_p = sure.log_softmax(-1)
    picked = log_q[torch.arange(50), labels]
    kl, slope = divergence("kl", log_p, log_q)
    torch.testing.assert_close(kl, -picked)
    torch.testing.assert_close(slope, log_q.exp() - torch.nn.functional.one_hot(labels, V))
    torch.testing.assert_close(divergence("l1", log_p, log_q)[0], 2 * (1 - picked.exp()))


def test_chances_that_vanish_in_fp32_leave_numbers():
    case = without(make(), "markov")
    case["hidden"], case["teacher"] = 300 * case["hidden"], -300 * case["teacher"]
    for kind in KINDS:
        result, (grad,) = found(case, Distillation(kind, 0.9))
        assert result.loss.isfinite()
        assert bool(grad.isfinite().all())
        assert bool(((result.overlap >= 0) & (result.overlap <= 1)).all())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("markov", [False, True])
@pytest.mark.parametrize("distill", [None, *(Distillation(kind, 0.9) for kind in KINDS)])
def test_one_graph_of_tensors_alone(distill, markov):
    """As on a GPU: compiled whole for fixed shapes, it computes what it does as it is."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(inputs)
        return lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(head_loss, fullgraph=True, dynamic=False, backend=backend)
    for seed in (0, 1):
        case = make(seed=seed) if markov else without(make(seed=seed), "markov")
        wanted = found(case, distill, 0.5)
        result = found(case, distill, 0.5, take=compiled)
        torch.testing.assert_close(tuple(result[0]), tuple(wanted[0]))
        torch.testing.assert_close(result[1], wanted[1])
    # All else is a constant of the one graph; a number among its inputs would be a copy.
    (inputs,) = graphs
    assert len(inputs) == 5 + 2 * markov
    assert all(isinstance(tensor, torch.Tensor) for tensor in inputs)


def test_no_value_is_read_on_the_host():
    case = make()
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(case[name]) for name in without(case, "markov")}
        markov = tuple(mode.from_tensor(tensor) for tensor in case["markov"])
        result = head_loss(**fakes, markov=markov, distill=Distillation("lk", 0.9))
        assert result.loss.shape == ()
        with pytest.raises(DataDependentOutputException):
            fakes["hidden"].sum().item()


@pytest.mark.parametrize(("kind", "share"), [("tv", 0.5), ("l1", -0.1), ("l1", 1.1)])
def test_what_is_no_distillation_is_refused(kind, share):
    with pytest.raises(ValueError, match=r"kind|share"):
        Distillation(kind, share)
    with pytest.raises(ValueError, match="teacher"):
        head_loss(**without(make(), "teacher"), distill=Distillation("l1", 0.5))


def test_deepseeks_mix_by_hand():
    """One row, p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4), label 0: CE log 4, L1 1/2."""
    head = torch.eye(3)
    teacher = torch.tensor([[0.5, 0.25, 0.25]]).log()
    hidden = torch.tensor([[0.25, 0.5, 0.25]]).log()
    result = head_loss(
        hidden,
        head,
        torch.tensor([0]),
        torch.tensor([2.0]),
        teacher=teacher,
        distill=Distillation("l1", 0.9),
    )
    assert result.loss.item() == pytest.approx(2 * (0.1 * math.log(4) + 0.9 * 0.5), rel=1e-6)
    assert result.overlap.tolist() == pytest.approx([0.75])
