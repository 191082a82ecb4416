import dataclasses
import time

import pytest
import torch
from torch.nn.functional import embedding, scaled_dot_product_attention

from runtime.dflash.decoding.speculate import DraftSession, choice_gap, greedy
from runtime.dflash.start.initialise import drafter_config, from_target, random_start
from runtime.errors import CheckpointError, ConfigError
from tests.runtime.tiny_llama import prompts, tiny_target

LAYER_IDS = (1, 2, 3)
BLOCK = 4


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def make_drafter(target, block=BLOCK):
    config = drafter_config(
        target, num_layers=2, draft_block_size=block, target_layer_ids=LAYER_IDS
    )
    ids = torch.tensor([prompts(1)[0] * 5])
    return from_target(target, config, torch.Generator().manual_seed(0), input_ids=ids)


def transformers_greedy(target, prompt, count):
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
    )
    return tuple(out[0, len(prompt) :].tolist())


def without_caches(target, drafter, prompt, count):
    """Draft and verify again from nothing at every step, with whole forwards only."""
    tokens = [*prompt, int(target.logits(torch.tensor([prompt]))[0, -1].argmax())]
    kept = []
    end = len(prompt) + count
    while len(tokens) < end and tokens[-1] not in target.eos_token_ids:
        anchor = len(tokens) - 1
        context = target.features(torch.tensor([tokens[:anchor]]), LAYER_IDS)
        block = torch.tensor([[tokens[-1]] + [drafter.config.mask_token_id] * (BLOCK - 1)])
        hidden = drafter(
            embedding(block, target.embed_weight),
            drafter.fuse(context),
            torch.arange(anchor),
            torch.arange(anchor, anchor + BLOCK)[None],
            lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        )
        drafts = (hidden[0, 1:] @ target.head_weight.T).argmax(-1).tolist()
        choices = target.logits(torch.tensor([[*tokens, *drafts]]))[0, anchor:].argmax(-1).tolist()
        new = []
        for draft, choice in zip([*drafts, None], choices, strict=True):
            new.append(choice)
            if draft != choice or choice in target.eos_token_ids:
                break
        new = new[: end - len(tokens)]
        tokens += new
        kept.append(len(new))
    return tuple(tokens[len(prompt) :]), tuple(kept)


def test_text_is_the_targets_own(target):
    session = DraftSession(target, make_drafter(target))
    for prompt in prompts(3):
        expected = transformers_greedy(target, prompt, 24)
        assert greedy(target, prompt, 24).tokens == expected
        assert session.generate(prompt, 24).tokens == expected


def test_caches_change_nothing(target):
    drafter = make_drafter(target)
    session = DraftSession(target, drafter)
    taken = set()
    for prompt in prompts(8):
        found = session.generate(prompt, 24)
        assert (found.tokens, found.kept) == without_caches(target, drafter, prompt, 24)
        taken.update(found.kept)
    assert {1, 2} <= taken


def test_every_block_is_drafted_as_over_the_whole_text_before_it(target, monkeypatch):
    """Text and tau hardly show a context that lies a little off: the blocks themselves do."""
    drafter, prompt, blocks = make_drafter(target), prompts(2)[1], []

    def recorded(x, context, positions, *attention):
        hidden = type(drafter).draft(drafter, x, context, positions, *attention)
        blocks.append((positions.flatten().tolist(), hidden))
        return hidden

    with monkeypatch.context() as patch:
        patch.setattr(drafter, "draft", recorded)
        found = DraftSession(target, drafter).generate(prompt, 24)
    text = torch.tensor([[*prompt, *found.tokens]])
    assert len(blocks) == len(found.kept) > 4
    anchor = len(prompt)
    for (positions, hidden), kept in zip(blocks, found.kept, strict=True):
        assert positions == list(range(anchor, anchor + BLOCK))
        tokens = text[:, [anchor]], torch.full((1, BLOCK - 1), drafter.config.mask_token_id)
        wanted = drafter(
            embedding(torch.cat(tokens, dim=1), target.embed_weight),
            drafter.fuse(target.features(text[:, :anchor], LAYER_IDS)),
            torch.arange(anchor),
            torch.arange(anchor, anchor + BLOCK)[None],
            lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        )
        torch.testing.assert_close(hidden, wanted, rtol=1e-4, atol=1e-4)
        anchor += kept


@pytest.mark.parametrize("right", [0, 1, 3])
def test_tau_counts_the_bonus_token(target, monkeypatch, right):
    """With drafts right up to ``right``, each call gives ``right + 1`` tokens."""
    prompt = prompts(1)[0]
    answer = greedy(target, prompt, 17).tokens
    session = DraftSession(target, make_drafter(target))

    def draft(anchor, position, context):
        del anchor, context
        start = position - len(prompt) + 1
        drafts = torch.tensor([*answer, *[0] * BLOCK][start : start + BLOCK - 1])
        drafts[right:] = (drafts[right:] + 1) % 24
        return torch.nn.functional.one_hot(drafts, 24)

    monkeypatch.setattr(session, "_draft", draft)
    found = session.generate(prompt, 17)
    assert found.tokens == answer
    assert found.kept == (right + 1,) * (16 // (right + 1))
    assert found.tau == right + 1


def test_drafts_come_in_published_numbers(target):
    """A block of 4 gives 3 drafts: slot 0 is the known token."""
    seen = []
    target.model.register_forward_pre_hook(
        lambda _m, _a, options: seen.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        DraftSession(target, make_drafter(target)).generate(prompts(1)[0], 6)
    finally:
        target.model._forward_pre_hooks.clear()
        target.model._forward_pre_hooks_with_kwargs.clear()
    assert seen[0] == 4
    assert set(seen[1:]) == {BLOCK}


def test_stops_at_the_end_token(target, monkeypatch):
    prompt = prompts(3)[2]
    whole = greedy(target, prompt, 40).tokens
    end = whole[9]
    monkeypatch.setattr(type(target), "eos_token_ids", frozenset({end}))
    expected = whole[: whole.index(end) + 1]
    assert greedy(target, prompt, 40).tokens == expected
    assert DraftSession(target, make_drafter(target)).generate(prompt, 40).tokens == expected


@pytest.mark.parametrize("count", [1, 2, 5])
def test_stops_at_the_limit(target, count):
    prompt = prompts(1)[0]
    found = DraftSession(target, make_drafter(target)).generate(prompt, count)
    assert found.tokens == greedy(target, prompt, 40).tokens[:count]
    assert sum(found.kept) == count - 1
    if count == 1:
        assert found.tau == 0


def test_stream_yields_what_generate_returns(target):
    session = DraftSession(target, make_drafter(target))
    prompt = prompts(1)[0]
    parts = list(session.stream(prompt, 20))
    found = session.generate(prompt, 20)
    assert tuple(token for part in parts for token in part) == found.tokens
    assert tuple(len(part) for part in parts[1:]) == found.kept


def test_a_paused_stream_leaves_gradients_on(target):
    stream = DraftSession(target, make_drafter(target)).stream(prompts(1)[0], 20)
    next(stream)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_bfloat16_target():
    target = tiny_target()
    target.model.to(torch.bfloat16)
    drafter = make_drafter(target).to(torch.bfloat16)
    prompt = prompts(1)[0]
    found = DraftSession(target, drafter).generate(prompt, 20)
    assert choice_gap(target, prompt, found.tokens) < 0.5


def test_choice_gap_is_the_worst_token(target):
    prompt = prompts(1)[0]
    answer = list(greedy(target, prompt, 12).tokens)
    assert choice_gap(target, prompt, answer) == pytest.approx(0, abs=1e-5)
    answer[5] = (answer[5] + 1) % 24
    logits = target.logits(torch.tensor([[*prompt, *answer]]))[0]
    row = logits[len(prompt) + 4]
    assert choice_gap(target, prompt, answer) >= float(row.max() - row[answer[5]]) > 0


def test_refuses_an_empty_or_too_long_prompt(target):
    session = DraftSession(target, make_drafter(target))
    with pytest.raises(ConfigError, match="must hold at least one token"):
        session.stream([], 4)
    with pytest.raises(ConfigError, match="within the target's 256 positions"):
        session.stream(prompts(1)[0], 250)
    with pytest.raises(ConfigError, match=r"must leave prompt \(4 tokens\)"):
        greedy(target, prompts(1)[0], 253)


def test_takes_what_the_targets_positions_just_hold(target):
    """Of 256: prompt, answer, and with a drafter the block that is verified last."""
    session = DraftSession(target, make_drafter(target))
    prompt = [3 + i % 20 for i in range(250 - BLOCK)]
    assert len(session.generate(prompt, 6).tokens) <= 6
    assert len(greedy(target, prompt, 6 + BLOCK).tokens) <= 6 + BLOCK
    session.first_block(prompt + [3] * 5)
    for refused in (
        lambda: session.stream(prompt, 7),
        lambda: greedy(target, prompt, 7 + BLOCK),
        lambda: session.first_block(prompt + [3] * 6),
    ):
        with pytest.raises(ConfigError, match="within the target's 256 positions"):
            refused()


def test_refuses_a_drafter_of_another_target(target):
    other = tiny_target(vocab_size=30)
    drafter = random_start(make_drafter(other).config, torch.Generator())
    with pytest.raises(CheckpointError, match=r"= \(32, 30, 6\), and 'tiny' has \(32, 24, 6\)"):
        DraftSession(target, drafter)


@pytest.mark.parametrize("block", [2, 7])
def test_other_block_sizes(target, block):
    session = DraftSession(target, make_drafter(target, block))
    prompt = prompts(2)[1]
    found = session.generate(prompt, 30)
    assert found.tokens == greedy(target, prompt, 30).tokens
    assert max(found.kept) <= block


def test_sliding_window_target_can_be_rewound():
    """Its cache must keep keys beyond the window, or nothing could be taken back."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from runtime.target.model import Target
    from tests.runtime.tiny_llama import tiny_tokenizer

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=24,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            initializer_range=0.15,
            max_position_embeddings=256,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=2,
        )
    )
    target = Target(model, tiny_tokenizer(), name="sliding")
    prompt = prompts(1)[0]
    found = DraftSession(target, make_drafter(target)).generate(prompt, 30)
    assert found.tokens == greedy(target, prompt, 30).tokens
    logits = target.logits(torch.tensor([[*prompt, *found.tokens]]))[0]
    assert tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist()) == found.tokens


def with_drafts(session, prompt, answer, right, monkeypatch):
    """Let each block be right up to ``right[call]`` drafts; the calls that were made."""
    calls = []

    def draft(anchor, position, context):
        start = position - len(prompt) + 1
        calls.append((anchor.tolist(), position, context[0][0].shape[2]))
        drafts = torch.tensor([*answer, *[0] * BLOCK][start : start + BLOCK - 1])
        wrong = right[(len(calls) - 1) % len(right)]
        drafts[wrong : wrong + 1] = (drafts[wrong : wrong + 1] + 1) % 24
        return torch.nn.functional.one_hot(drafts, 24)

    monkeypatch.setattr(session, "_draft", draft)
    return calls


def test_a_draft_that_is_right_after_a_wrong_one_is_not_kept(target, monkeypatch):
    """One wrong draft a block, at another slot in turn; those behind it are right."""
    prompt = prompts(1)[0]
    answer = greedy(target, prompt, 24).tokens
    session = DraftSession(target, make_drafter(target))
    calls = with_drafts(session, prompt, answer, [0, 2, 1, 3], monkeypatch)
    found = session.generate(prompt, 21)
    assert found.tokens == answer[:21]
    assert found.kept == (1, 3, 2, 4, 1, 3, 2, 4)
    assert found.tau == 2.5
    assert found.seconds > 0
    # Each block begins at the newest token, and its context ends right before that.
    at = [0, 1, 4, 6, 10, 11, 14, 16]
    assert calls == [([answer[n]], len(prompt) + n, len(prompt) + n) for n in at]


@pytest.mark.parametrize("count", range(1, 12))
def test_the_limit_cuts_a_block_that_was_kept_whole(target, monkeypatch, count):
    prompt = prompts(1)[0]
    answer = greedy(target, prompt, 24).tokens
    session = DraftSession(target, make_drafter(target))
    with_drafts(session, prompt, answer, [3], monkeypatch)
    found = session.generate(prompt, count)
    assert found.tokens == answer[:count]
    whole, rest = divmod(count - 1, 4)
    assert found.kept == (4,) * whole + ((rest,) if rest else ())


@pytest.mark.parametrize("at", range(10))
def test_text_after_an_end_token_inside_a_block_is_cut(target, monkeypatch, at):
    """Wherever in a block the end falls, and where the prompt's own first token is one."""
    prompt = prompts(3)[2]
    answer = greedy(target, prompt, 24).tokens
    end = answer[at]
    first = answer.index(end)
    # As a set of several, of which another never comes.
    monkeypatch.setattr(type(target), "eos_token_ids", frozenset({end, 23}))
    session = DraftSession(target, make_drafter(target))
    with_drafts(session, prompt, answer, [3], monkeypatch)
    found = session.generate(prompt, 24)
    assert found.tokens == answer[: first + 1] == greedy(target, prompt, 24).tokens
    assert sum(found.kept) == first
    assert found.kept == (4,) * (first // 4) + ((first % 4,) if first % 4 else ())


def test_one_token_costs_one_call_and_greedy_keeps_one_a_call(target):
    seen = []
    handle = target.model.register_forward_pre_hook(
        lambda _m, _a, options: seen.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        prompt = prompts(2)[1]
        found = greedy(target, prompt, 5)
        assert seen == [5, 1, 1, 1, 1]
        assert (found.kept, found.tau) == ((1, 1, 1, 1), 1.0)
        seen.clear()
        assert DraftSession(target, make_drafter(target)).generate(prompt, 1).kept == ()
    finally:
        handle.remove()
    # The drafter's own start reads the target once, too.
    assert seen[-1] == 5


def test_the_first_block_is_that_of_a_whole_forward(target):
    drafter, prompt = make_drafter(target), prompts(3)[2]
    token = int(target.logits(torch.tensor([prompt]))[0, -1].argmax())
    block = torch.tensor([[token] + [drafter.config.mask_token_id] * (BLOCK - 1)])
    hidden = drafter(
        embedding(block, target.embed_weight),
        drafter.fuse(target.features(torch.tensor([prompt]), LAYER_IDS)),
        torch.arange(len(prompt)),
        torch.arange(len(prompt), len(prompt) + BLOCK)[None],
        lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True),
    )
    found = DraftSession(target, drafter).first_block(prompt)
    assert found.shape == (BLOCK - 1, 24)
    torch.testing.assert_close(found, (hidden[0, 1:] @ target.head_weight.T), rtol=1e-4, atol=1e-4)


def test_the_gap_is_that_of_the_worst_token_of_the_answer_alone(target):
    prompt = prompts(2)[1]
    answer = list(greedy(target, prompt, 6).tokens)
    for at in (0, 3, 5):
        changed = [*answer[:at], (answer[at] + 1) % 24, *answer[at + 1 :]]
        logits = target.logits(torch.tensor([[*prompt, *changed]]))[0].double()
        gaps = [
            float(logits[len(prompt) - 1 + n].max() - logits[len(prompt) - 1 + n, token])
            for n, token in enumerate(changed)
        ]
        assert choice_gap(target, prompt, changed) == pytest.approx(max(gaps), abs=1e-5)
        assert max(gaps) > 0


def test_what_has_no_room_is_told_with_all_its_lengths(target, monkeypatch):
    session = DraftSession(target, make_drafter(target))
    with pytest.raises(ConfigError) as caught:
        session.generate(prompts(2)[1], 250)
    assert str(caught.value) == (
        "max_new_tokens = 250: must leave prompt (5 tokens), answer and a draft block (4) within "
        "the target's 256 positions"
    )
    with pytest.raises(ConfigError, match=r"^prompt = \[\]: must hold at least one token"):
        greedy(target, [], 4)
    # A target that does not say how far it goes takes any length.
    monkeypatch.setattr(type(target), "max_positions", None)
    assert len(greedy(target, prompts(1)[0], 260).tokens) <= 260
    session.stream(prompts(1)[0], 10**6)


@pytest.mark.parametrize(
    ("change", "made_for"),
    [
        ({"hidden_size": 16}, "(16, 24, 6)"),
        ({"vocab_size": 25}, "(32, 25, 6)"),
        ({"num_target_layers": 7}, "(32, 24, 7)"),
    ],
)
def test_a_drafter_of_any_other_size_is_refused(target, change, made_for):
    config = dataclasses.replace(make_drafter(target).config, **change)
    drafter = random_start(config, torch.Generator())
    with pytest.raises(CheckpointError) as caught:
        DraftSession(target, drafter)
    assert str(caught.value) == (
        f"the drafter was made for a target of (hidden size, vocabulary, layers) = {made_for}, and "
        "'tiny' has (32, 24, 6); use the target that it was trained with"
    )


def test_seconds_are_those_after_prefill(target, monkeypatch):
    prompt, extend = prompts(1)[0], type(target).extend

    def slow(self, ids, *given, **options):
        time.sleep(0.5 if ids.shape[1] == len(prompt) else 0.0)
        return extend(self, ids, *given, **options)

    session = DraftSession(target, make_drafter(target, 3))
    monkeypatch.setattr(type(target), "extend", slow)
    for found in (greedy(target, prompt, 2), session.generate(prompt, 2)):
        assert len(found.kept) == 1
        assert 0 < found.seconds < 0.5


def test_a_caller_in_autocast_gets_the_same_drafts(target):
    session, prompt = DraftSession(target, make_drafter(target)), prompts(2)[1]
    logits, found = session.first_block(prompt), session.generate(prompt, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(session.first_block(prompt), logits)
        assert session.generate(prompt, 12).tokens == found.tokens
    assert torch.is_grad_enabled()
