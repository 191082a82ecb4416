"""A DSpark folder, decoding and the training step compute one drafter.

The measure is ``plain_drafter``, which shares no code with the product.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from runtime.dflash.decoding.speculate import DraftSession, greedy
from runtime.dflash.folder.saved_drafter import load_published, save_published
from runtime.dflash.loss.head import HeadLoss
from runtime.dflash.network.drafter import Drafter
from runtime.dflash.start.initialise import drafter_config
from runtime.dflash.step.draft_batch import DraftBatch
from runtime.dflash.step.draft_loss import draft_loss
from runtime.errors import ConfigError
from runtime.static.attention import dense_attention
from runtime.target.frozen import FrozenTarget
from runtime.target.model import Target
from tests.runtime.dflash.test_parity import BLOCK, LAYER_IDS, SCALE, make_drafter
from tests.runtime.plain_drafter import WRONG_HEADS, drafted
from tests.runtime.tiny_llama import prompts, tiny_target

RANK = 24
"""As many as there are tokens, so that the head can know which follows which."""
WINDOW = 5
CONFIDENCE = [0.0, 0.5, 0.8, 1.0]


@dataclass
class Case:
    target: Target
    folder: object
    drafter: Drafter


@pytest.fixture(scope="module", params=["full", "sliding", "from anchor"])
def case(request, tmp_path_factory):
    target = tiny_target()
    plain = drafter_config(target, num_layers=2, draft_block_size=BLOCK, target_layer_ids=LAYER_IDS)
    network = replace(plain, markov_rank=RANK, confidence_head=True)
    if request.param == "sliding":
        network = replace(network, layers=("full", "sliding"), sliding_window=WINDOW)
    if request.param == "from anchor":
        network = replace(network, sample_from_anchor=True)
    drafter = make_drafter(network)
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight.add_(4 * torch.eye(RANK))
        for prompt in prompts(5):
            answer = greedy(target, prompt, 20).tokens
            for before, after in pairwise(answer):
                drafter.markov_head.markov_w2.weight[after, before] = 2.0
        drafter.confidence_head.proj.weight[:, -RANK:] *= 2
        drafter.confidence_head.proj.bias.fill_(-1.0)
    drafter.to(torch.bfloat16).float()
    folder = save_published(
        tmp_path_factory.mktemp("dspark"), network, drafter.state_dict(), feature_scale=SCALE
    )
    return Case(target, folder, load_published(folder, dtype=torch.float32))


def calls(case, prompt, answer, confidence):
    """Tokens of each call of the target if the folder is what ``plain_drafter`` reads."""
    kept, at = [], 1
    while at < len(answer):
        text = [*prompt, *answer[: at - 1]]
        logits, sure = drafted(case.folder, case.target.model, text)
        drafts = []
        for slot, chance in zip(logits, sure, strict=True):
            if chance < confidence:
                break
            drafts.append(int(slot.argmax()))
        right = 0
        while right < len(drafts) and answer[at : at + right + 1][-1:] == (drafts[right],):
            right += 1
            if at + right >= len(answer):
                break
        kept.append(min(right + 1, len(answer) - at))
        at += kept[-1]
    return tuple(kept)


def test_the_folder_holds_the_products_drafter(case):
    session = DraftSession(case.target, case.drafter)
    for prompt in prompts(6):
        found = session.first_block(prompt)
        assert len(found) == BLOCK - (not case.drafter.config.sample_from_anchor)
        wanted, _ = drafted(case.folder, case.target.model, prompt)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("confidence", CONFIDENCE)
def test_text_is_greedy_and_each_call_keeps_what_the_folder_drafts(case, confidence):
    session = DraftSession(case.target, case.drafter, confidence=confidence)
    lengths = set()
    for prompt in prompts(5)[::2]:
        answer = greedy(case.target, prompt, 14).tokens
        found = session.generate(prompt, 14)
        assert found.tokens == answer
        assert found.kept == calls(case, prompt, answer, confidence)
        lengths.update(found.kept)
    assert lengths == {1} if confidence == 1.0 else len(lengths) > 1


def test_the_training_step_computes_what_decoding_does(case):
    """Taught the drafts themselves, it has the logits and the confidence that decoding has."""
    target, drafter = case.target, case.drafter
    for prompt in prompts(3):
        n, wanted = len(prompt), DraftSession(target, drafter).first_block(prompt)
        _, sure = drafted(case.folder, target.model, prompt)
        anchor = int(target.logits(torch.tensor([prompt]))[0, -1].argmax())
        drafts = wanted.argmax(dim=-1)
        ids = torch.cat((torch.tensor([*prompt, anchor]), drafts))[None]
        S = ids.shape[1]
        mask = torch.zeros(1, 1, BLOCK, S + BLOCK, dtype=torch.bool)
        mask[..., :n] = mask[..., S:] = True
        near = mask.clone()
        for slot in range(BLOCK):
            near[..., slot, : max(0, n + slot + 1 - WINDOW)] = False
            near[..., slot, S + slot + 1 :] = False
        seen = []

        def head_loss(rows, head, labels, weights, *, teacher, markov, seen=seen):
            e, w = markov
            seen.append(rows @ head.T + e @ w.T)
            return HeadLoss(rows.sum(), labels, overlap=torch.zeros(len(rows)))

        found = draft_loss(
            drafter,
            FrozenTarget(
                embed_weight=target.embed_weight,
                head_weight=target.head_weight,
                feature_scale=torch.ones(len(LAYER_IDS)),
                features=None,
            ),
            DraftBatch(
                ids,
                target.features(ids, LAYER_IDS),
                torch.tensor([[n]], dtype=torch.int32),
                dense_attention(mask),
                sliding=dense_attention(near) if drafter.config.layers else None,
                teacher=torch.zeros(len(drafts), target.hidden_size),
            ),
            drafts[None, None],
            torch.ones(1, 1, len(drafts)),
            head_loss=head_loss,
        )
        torch.testing.assert_close(seen[0], wanted, rtol=0, atol=1e-5)
        # With an overlap of 0 the cross entropy is that of nothing accepted.
        nothing = -(1 - sure.double()).log().sum().item()
        assert found.confidence.item() == pytest.approx(nothing, rel=1e-4)


@pytest.mark.parametrize("wrong", WRONG_HEADS)
def test_one_thing_wrong_at_a_time_shows(case, wrong):
    session = DraftSession(case.target, case.drafter)
    moved = {"logits": 0.0, "confidence": 0.0}
    for prompt in prompts(3):
        right, sure = drafted(case.folder, case.target.model, prompt)
        logits, chance = drafted(case.folder, case.target.model, prompt, wrong)
        away = float((session.first_block(prompt) - logits).abs().max())
        moved["logits"] = max(moved["logits"], away)
        moved["confidence"] = max(moved["confidence"], float((chance - sure).abs().max()))
        assert float((right - logits).abs().max()) == pytest.approx(away, abs=1e-4)
    part = "confidence" if wrong.startswith("confidence") else "logits"
    assert moved[part] > 1e-2


def test_answer_and_drafts_stay_within_the_targets_positions(case):
    prompt, session = prompts(1)[0], DraftSession(case.target, case.drafter)
    room = 256 - len(prompt) - BLOCK - case.drafter.config.sample_from_anchor
    session.stream(prompt, room)
    with pytest.raises(ConfigError, match="max_new_tokens"):
        session.stream(prompt, room + 1)


def test_a_threshold_needs_a_head_and_a_share(case):
    heads = {"markov_rank": 0, "confidence_head": False, "sample_from_anchor": False}
    plain = replace(case.drafter.config, **heads)
    for network in (plain, replace(plain, markov_rank=RANK)):
        drafter = make_drafter(network)
        DraftSession(case.target, drafter, confidence=0.0)
        with pytest.raises(ConfigError, match=r"0\.5: must be 0 for a drafter without"):
            DraftSession(case.target, drafter, confidence=0.5)
    for value in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match=r"confidence = .*must be in"):
            DraftSession(case.target, case.drafter, confidence=value)
