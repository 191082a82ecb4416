"""The Markov head: where it starts, what it adds, and its gradients."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from runtime.config import parse_config
from runtime.dflash.decoding.speculate import DraftSession
from runtime.dflash.loss.head import HeadLoss
from runtime.dflash.loss.vocabulary import SeenTokens
from runtime.dflash.network.drafter import Drafter, backward_stages
from runtime.dflash.network.markov import ConfidenceHead, tokens_before, with_confidence
from runtime.dflash.settings import DFlashConfig
from runtime.dflash.start.initialise import drafter_config, from_target, random_start
from runtime.dflash.step.draft_batch import DraftBatch
from runtime.dflash.step.draft_loss import draft_loss
from runtime.errors import ConfigError
from runtime.shaping import shaping_settings
from runtime.static.attention import dense_attention
from tests.runtime import tiny_run
from tests.runtime.tiny_llama import prompts, tiny_target

RANK = 5
HEADS = ("markov_head", "confidence_head")
S, BLOCK = 12, 4
ANCHORS = [[2, 5, 8], [0, 4, 10]]


def with_heads(network, rank=RANK, confidence=True):
    return replace(network, markov_rank=rank, confidence_head=confidence)


def start(network, kind, target=None):
    generator = torch.Generator().manual_seed(4)
    if kind == "random":
        return random_start(network, generator)
    return from_target(target, network, generator, input_ids=torch.tensor([prompts(1)[0] * 5]))


@pytest.mark.parametrize("kind", ["random", "target"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drafter_starts_as_dflash_bit_for_bit(kind, dtype):
    target = tiny_target()
    plain = drafter_config(target, num_layers=2, draft_block_size=BLOCK, target_layer_ids=(1, 3))
    first, second = (start(net, kind, target) for net in (plain, with_heads(plain)))
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name]), name
    heads = {k: v for k, v in second.state_dict().items() if k.startswith(HEADS)}
    assert {name: tuple(weight.shape) for name, weight in heads.items()} == {
        "markov_head.markov_w1.weight": (24, RANK),
        "markov_head.markov_w2.weight": (24, RANK),
        "confidence_head.proj.weight": (1, 32 + RANK),
        "confidence_head.proj.bias": (1,),
    }
    assert 0.005 < heads.pop("markov_head.markov_w1.weight").std() < 0.02
    assert not any(weight.any() for weight in heads.values())
    target.model.to(dtype)
    sessions = [DraftSession(target, drafter.to(dtype)) for drafter in (first, second)]
    for prompt in prompts(4):
        found = [session.first_block(prompt).float() for session in sessions]
        assert torch.equal(found[0], found[1])
        drafted = [session.generate(prompt, 16) for session in sessions]
        assert drafted[0].kept == drafted[1].kept


def test_the_token_before_each_slot():
    text = torch.arange(100, 120)
    anchors = torch.tensor([[3, 7], [0, 16]])
    labels = text[anchors[..., None] + torch.arange(1, 4)]
    wanted = [[[103, 104, 105], [107, 108, 109]], [[100, 101, 102], [116, 117, 118]]]
    assert tokens_before(text[anchors], labels).tolist() == wanted


def test_without_a_head_there_is_nothing_of_it():
    network = tiny_run.drafter_config()
    assert not any(name.startswith(HEADS) for name in Drafter(network).state_dict())
    assert Drafter(with_heads(network, confidence=False)).confidence_head is None
    for rank, confidence in ((-1, False), (0, True), (2**14 + 1, False)):
        with pytest.raises(ConfigError, match=f"markov_rank = {rank}: must be at least 0"):
            with_heads(network, rank, confidence)


def make_batch():
    """A drafter with heads that are not 0, and all that ``draft_loss`` takes."""
    generator = torch.Generator().manual_seed(9)
    drafter = random_start(with_heads(tiny_run.drafter_config(), confidence=False), generator)
    with torch.no_grad():
        for parameter in drafter.markov_head.parameters():
            parameter.normal_(generator=generator)
    ids = torch.randint(tiny_run.VOCAB - 1, (2, S), generator=generator)
    features = torch.randn(2, S, 2 * tiny_run.HIDDEN, generator=generator)
    anchors = torch.tensor(ANCHORS, dtype=torch.int32)
    at = anchors[..., None] + torch.arange(1, BLOCK)
    labels = ids.gather(1, at.clamp(max=S - 1).flatten(1).long()).view(at.shape)
    weights = (at < S) * torch.tensor([1.0, 0.7, 0.4])
    mask = torch.zeros(2, 1, 3 * BLOCK, S + 3 * BLOCK, dtype=torch.bool)
    for row, found in enumerate(ANCHORS):
        for block, anchor in enumerate(found):
            own = slice(block * BLOCK, (block + 1) * BLOCK)
            mask[row, 0, own, :anchor] = True
            mask[row, 0, own, S + own.start : S + own.stop] = True
    target = tiny_run.frozen_target()
    batch = DraftBatch(ids, features, anchors, dense_attention(mask))
    return drafter, (target, batch, labels, weights)


def places(tokens):
    """int64 ``[V]``: where each of the tokens stands among them."""
    rows = torch.zeros(tiny_run.VOCAB, dtype=torch.int64)
    for place, token in enumerate(tokens):
        rows[token] = place
    return rows


@pytest.mark.parametrize("some", [False, True])
def test_the_loss_and_its_gradients_are_those_of_whole_logits(some):
    """With ``some`` those without the logits of tokens that no label is, and a few more."""
    drafter, parts = make_batch()
    target, batch, labels, weights = parts
    ids = batch.input_ids
    seen, among, learned = None, parts, range(tiny_run.VOCAB)
    if some:
        learned = sorted({4, 30, 59, *labels.flatten().tolist()})
        seen = SeenTokens(ids=torch.tensor(learned), rows=places(learned))
        among = (replace(target, head_weight=target.head_weight[learned]), *parts[1:])
    read = []

    def head_loss(rows, head, labels, weights, *, markov):
        read.append(rows)
        return rows.sum()

    draft_loss(drafter, *among, seen=seen, head_loss=head_loss)
    rows = read[0].detach().double()
    w2 = drafter.markov_head.markov_w2.weight.detach().double()
    # The head of the table is looked up by hand, one slot at a time.
    w1 = drafter.markov_head.markov_w1.weight.detach().double().requires_grad_()
    w2.requires_grad_()
    rows.requires_grad_()
    logits = []
    before = [
        ids[row, min(anchor + slot, S - 1)]
        for row, found in enumerate(ANCHORS)
        for anchor in found
        for slot in range(BLOCK - 1)
    ]
    for hidden, token in zip(rows, before, strict=True):
        logits.append(target.head_weight.double() @ hidden + w2 @ w1[token])
    never = torch.ones(tiny_run.VOCAB, dtype=torch.bool).index_fill(0, torch.tensor(learned), False)
    logits = torch.stack(logits).masked_fill(never, -torch.inf)
    wanted = cross_entropy(logits, labels.flatten(), reduction="none")
    wanted = (wanted * weights.flatten()).sum()
    wanted.backward()
    found = draft_loss(drafter, *among, seen=seen)
    assert found.loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    found.loss.backward()
    head = drafter.markov_head
    for ours, reference in ((head.markov_w1, w1), (head.markov_w2, w2)):
        torch.testing.assert_close(ours.weight.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)
    supervised = {int(t) for t, weight in zip(before, weights.flatten(), strict=True) if weight}
    others = [token for token in range(tiny_run.VOCAB) if token not in supervised]
    assert len(others) > 30
    assert not head.markov_w1.weight.grad[others].any()
    assert all(head.markov_w1.weight.grad[token].any() for token in supervised)
    assert head.markov_w2.weight.grad.any(1).nonzero().flatten().tolist() == list(learned)
    right = (logits.argmax(-1) == labels.flatten()) & (weights.flatten() > 0)
    assert found.correct.tolist() == right.float().tolist()


def test_the_backward_pass_finishes_the_heads_first():
    drafter, parts = make_batch()
    stages = backward_stages(drafter)
    assert sorted(stages[0]) == ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"]
    assert sorted(name for stage in stages for name in stage) == sorted(
        name for name, _ in drafter.named_parameters()
    )
    done = []
    for name, parameter in drafter.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: done.append(name))
    draft_loss(drafter, *parts).loss.backward()
    place = {name: number for number, stage in enumerate(stages) for name in stage}
    assert [place[name] for name in done] == sorted(place[name] for name in done)
    assert len(done) == len(place)


def test_confidence_reads_the_hidden_state_and_then_the_token_before():
    head = ConfidenceHead(3, 2)
    with torch.no_grad():
        head.proj.weight.copy_(torch.tensor([[1.0, 10.0, 100.0, 1000.0, 10000.0]]))
        head.proj.bias.fill_(0.5)
    found = head(torch.tensor([[1.0, 2, 3], [0, 0, 1]]), torch.tensor([[4.0, 5], [0, 1]]))
    assert found.tolist() == [54321.5, 10100.5]


def test_confidence_rests_where_it_is_the_overlap():
    """A constant of the loss, whose gradient goes on into what the head reads."""
    overlap = torch.tensor([0.2, 0.9, 0.5, 1e-3], dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    result = HeadLoss(torch.tensor(3.0), weights, overlap=overlap)
    logits = overlap.detach().logit().requires_grad_()
    found = with_confidence(result, logits, weights)
    p = overlap.detach()
    entropy = -(p * p.log() + (1 - p) * (1 - p).log()) * weights
    assert found.loss.item() == pytest.approx(3 + entropy.sum().item())
    assert (found.cross_entropy.item(), found.overlap) == (3.0, overlap)
    assert found.confidence.item() == pytest.approx(entropy.sum().item())
    found.loss.backward()
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits), rtol=0, atol=1e-12)
    assert overlap.grad is None
    for less in (-0.1, 0.1):
        moved = with_confidence(result, logits.detach() + less, weights)
        assert moved.loss > found.loss
    shown = with_confidence(result._replace(cross_entropy=torch.tensor(2.0)), logits, weights)
    assert shown.cross_entropy.item() == 2.0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"drafter": {"confidence": True}, "train": {"distill": "l1"}},
            r"drafter\.confidence = True: must be false where drafter\.markov_rank is 0",
        ),
        (
            {"drafter": {"confidence": True, "markov_rank": 4}},
            r"drafter\.confidence = True: must be false without a teacher.* set train\.distill",
        ),
        ({"drafter": {"markov_rank": -1}}, r"drafter\.markov_rank = -1: must be at least 0"),
        ({"drafter": {"markov_rank": 2**14 + 1}}, r"drafter\.markov_rank = 16385: must be at most"),
        ({"drafter": {"confidence": 1}}, r"drafter\.confidence = 1: must be of type bool"),
        ({"evaluate": {"confidence": 1.5}}, r"evaluate\.confidence = 1\.5: must be at most 1"),
        ({"evaluate": {"confidence": -0.5}}, r"evaluate\.confidence = -0\.5: must be at least 0"),
    ],
)
def test_settings_that_do_not_go_together(sections, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(sections, DFlashConfig)


def test_heads_shape_a_run_only_where_they_are_asked_for():
    """Runs of before had no such keys."""
    before, now = parse_config({}, DFlashConfig).as_dict(), parse_config({}, DFlashConfig).as_dict()
    for key in ("markov_rank", "confidence"):
        before["drafter"].pop(key)
    assert shaping_settings(before, DFlashConfig) == shaping_settings(now, DFlashConfig)
    raw = {"drafter": {"markov_rank": 4, "confidence": True}, "train": {"distill": "l1"}}
    shaped = shaping_settings(parse_config(raw, DFlashConfig).as_dict(), DFlashConfig)
    assert raw["drafter"].items() <= shaped["drafter"].items()
