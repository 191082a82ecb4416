"""Records into samples: identities, what is counted with its place, order, and batches."""

import hashlib
import json

import pytest
import torch

from runtime.data import samples as samples_module
from runtime.data.answer import Answer
from runtime.data.candidate import to_samples
from runtime.data.split import split
from runtime.errors import SampleTooLongError
from runtime.prompts.records import Record
from tests.runtime.data.test_samples import (
    answered as answered,
)
from tests.runtime.data.test_samples import (
    decode,
    maker,
    prompt,
    samples_of,
    talk,
)
from tests.runtime.data.test_samples import (
    elsewhere as elsewhere,
)
from tests.runtime.data.test_samples import (
    target as target,
)
from tests.runtime.tiny_text import EOS

U, A, S = "user", "assistant", "system"


def turns(*given):
    return [{"role": role, "content": content} for role, content in given]


def digest(content):
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def test_an_identity_is_the_digest_of_the_prompt_alone(target, answered):
    """It decides the split, in old data folders too."""
    records = [
        Record(source="a", messages=turns((U, "hi"))),
        Record(source="b", messages=turns((S, "be calm"), (U, "hi"), (A, "yes, hello"))),
        Record(source="c", messages=turns((U, "hi"), (A, "yes, hello"), (U, "ho"))),
        Record(source="d", text="a short text"),
    ]
    drafts = maker(target, context=128).make(records)
    assert [draft.identity for draft in drafts] == [
        digest([{"role": U, "content": "hi"}]),
        digest(turns((S, "be calm"), (U, "hi"))),
        digest(records[2].messages),
        digest(target.tokenizer("a short text")["input_ids"]),
    ]


def test_the_first_of_equal_prompts_is_kept_whatever_its_kind(target, answered):
    records = [
        Record(source="a", file=4, messages=talk("hi", "yes, hello").messages),
        Record(source="b", messages=turns((U, "hi"))),
        Record(source="c", messages=turns((S, "calm"), (U, "hi"))),
        Record(source="d", messages=talk("hi", "no, not at all").messages),
        Record(source="e", text="a short text"),
        Record(source="f", text="a short text"),
    ]
    made = maker(target)
    drafts = made.make(records)
    assert [draft.source for draft in drafts] == ["a", "c", "e"]
    assert [draft.file for draft in drafts] == [4, 0, 0]
    assert +made.counts.dropped == {"duplicate prompt": 3}
    assert made.counts.places == {"duplicate prompt": ["b", "d", "f"]}


def test_the_order_of_the_records_stays(target, answered):
    texts = ["one two", "three", "four five six", "seven"]
    records = [
        talk(text, f"answer to {text}") if i % 2 else prompt(text) for i, text in enumerate(texts)
    ]
    drafts = maker(target).make(records)
    shown = [decode(target, draft.input_ids) for draft in drafts]
    assert [text in line for text, line in zip(texts, shown, strict=True)] == [True] * 4
    assert not any(draft.is_open for draft in drafts)
    assert [sample.index for sample in to_samples(drafts)] == [0, 1, 2, 3]


def test_each_reason_names_its_record(target, answered):
    answered["text"] = "no no no no no no"
    long = "a prompt that leaves no room at all for an answer of any length " * 2
    records = [
        Record(source="odd:1", messages=[{"role": "tool", "content": "x"}]),
        Record(source="rep:2", messages=turns((U, "hi"))),
        Record(source="long:3", messages=turns((U, long))),
        Record(source="short:4", messages=talk("ho", "no").messages),
        Record(source="cut:5", messages=talk("he", "an answer " * 9).messages),
    ]
    made = maker(target, too_long="skip")
    assert made.make(records) == []
    assert made.counts.places == {
        "role tool": ["odd:1"],
        "repetition": ["rep:2"],
        "prompt too long": ["long:3"],
        "too few supervised tokens": ["short:4"],
        "longer than the largest context": ["cut:5"],
    }
    assert set(made.counts.dropped.values()) == {1}


def test_what_the_target_answered_is_counted_with_what_is_dropped_later(target, answered):
    made = maker(target, min_answer_tokens=15)
    answered["text"] = "a fine answer"
    assert made.make([prompt("hi"), prompt("ho")]) == []
    assert made.counts.noted == {
        "answered": 2, "answer tokens": 28, "answers ended by the model": 2
    }  # fmt: skip
    assert +made.counts.dropped == {"too few supervised tokens": 2}


@pytest.mark.parametrize(("room", "limit"), [(1, 2), (3, 4), (19, 20), (20, 20), (40, 20)])
def test_a_limit_is_one_token_more_than_fits(target, answered, room, limit):
    # The prompt has 33 tokens.
    maker(target, context=33 + room, min_answer_tokens=1).make([prompt("hello there")])
    assert [asked for _, asked in answered["asked"]] == [limit]


def test_only_what_is_missing_is_asked_and_kept_batch_by_batch(target, monkeypatch, capsys):
    asked = []

    def answer_all(_target, prompts, limits, *, batch, advance):
        asked.append((len(prompts), limits, batch))
        for row in reversed(range(len(prompts))):
            if len(asked) == 1 and row == 0:
                raise KeyboardInterrupt
            advance(limits[row])
            ids = [*_target.tokenizer(f"answer {len(prompts[row])}")["input_ids"], EOS]
            yield {row: Answer(token_ids=ids, ended=True)}

    monkeypatch.setattr(samples_module, "answer_all", answer_all)
    records = [prompt(text) for text in ("a", "bb", "ccc")]
    with pytest.raises(KeyboardInterrupt):
        maker(target, batch=2).make(records)
    capsys.readouterr()
    drafts = maker(target, batch=2).make(records)
    assert asked == [(3, [20] * 3, 2), (1, [20], 2)]
    assert "answering 1 prompts (2 answers are there)" in capsys.readouterr().err
    lengths = [len(draft.input_ids[: draft.prompt_len]) for draft in drafts]
    texts = [decode(target, draft.input_ids[draft.prompt_len :]) for draft in drafts]
    assert texts == [f"answer {length}</s>" for length in lengths]
    maker(target, batch=2).make(records)
    assert len(asked) == 2
    assert capsys.readouterr().err == "answering 0 prompts (3 answers are there)\n"


def test_answers_are_given_to_their_prompts_past_those_that_are_dropped(target, monkeypatch):
    texts = {"a": "no no no no no no", "bb": "well, fine then", "ccc": "not as bad"}

    def answer_all(_target, prompts, limits, *, batch, advance):
        for row, ids in enumerate(prompts):
            text = next(t for key, t in texts.items() if f"\n{key}<" in decode(target, ids))
            yield {row: Answer(token_ids=_target.tokenizer(text)["input_ids"], ended=False)}

    monkeypatch.setattr(samples_module, "answer_all", answer_all)
    long = prompt("x" * 200)
    drafts = maker(target).make([prompt("a"), talk("d", "yes, hello"), long, *map(prompt, texts)])
    shown = [decode(target, draft.input_ids[draft.prompt_len :]) for draft in drafts]
    assert shown == ["yes, hello</s>\n", "well, fine then", "not as bad"]


@pytest.mark.parametrize(
    ("size", "pieces"), [(15, [15]), (16, [16]), (17, [16, 1]), (33, [16, 16, 1])]
)
def test_a_text_is_cut_at_exactly_the_context(target, answered, size, pieces):
    text = "".join(chr(97 + i % 26) for i in range(size))
    made = maker(target, context=16, min_answer_tokens=1)
    drafts = made.make([Record(source="book", text=text)])
    whole = [length for length in pieces if length > 1]
    assert [len(draft.input_ids) for draft in drafts] == whole
    assert "".join(decode(target, draft.input_ids) for draft in drafts) == text[: sum(whole)]
    assert [draft.prompt_len for draft in drafts] == [length // 2 for length in whole]
    assert made.counts.dropped["too few supervised tokens"] == len(pieces) - len(whole)


@pytest.mark.parametrize(
    ("length", "message"), [(47, None), (46, "p:1 needs at least 47 tokens, ")]
)
def test_a_sample_of_just_the_context_is_not_refused(target, answered, length, message):
    made = maker(target, context=length, too_long="refuse")
    if message is None:
        assert len(made.make([prompt("hello there")])) == 1
        return
    with pytest.raises(SampleTooLongError) as caught:
        made.make([prompt("hello there")])
    assert str(caught.value) == (
        f"{message}the largest context of the mask entries is 46; set data.too_long to cut or "
        "skip, or add a larger one"
    )


def test_a_features_sample_that_is_not_finite_costs_itself(target, answered, monkeypatch):
    made = maker(target, store=True)
    plain = target.features

    def features(ids, layers):
        found = plain(ids, layers).clone()
        found[0, 3] = torch.inf
        return found

    records = [Record(source=f"x:{i}", messages=talk(f"q{i}", "yes, hello" * i).messages)
               for i in (1, 2, 3)]  # fmt: skip
    monkeypatch.setattr(target, "features", features)
    drafts = made.make(records)
    # All share a pass, shortest first, and the first row of it is spoilt.
    assert [draft.source for draft in drafts] == ["x:2", "x:3"]
    assert made.counts.places == {"features not finite": ["x:1"]}


def test_a_scale_without_stored_features_is_of_the_first_samples(target, answered, monkeypatch):
    monkeypatch.setattr(samples_module, "SCALE_SAMPLES", 2)
    made = maker(target)
    drafts = made.make([talk(f"question {i}", "yes, hello " * (4 - i)) for i in range(4)])
    stored = maker(target, store=True)
    stored_drafts = stored.make([talk(f"question {i}", "yes, hello " * (4 - i)) for i in range(4)])
    assert made.feature_scale(drafts) == pytest.approx(
        stored.feature_scale(stored_drafts[:2]), rel=1e-3
    )


def test_heldout_are_the_samples_of_the_smallest_hashes():
    found = samples_of(12, file=lambda i: i % 2)
    rank = {i: hashlib.sha256(f"7:{i}".encode()).hexdigest() for i in range(12)}
    for count in (0, 1, 5, 12, 20):
        chosen = set(sorted(range(12), key=rank.get)[:count])
        train, heldout = split(found, count, seed=7)
        assert [s.index for s in heldout] == sorted(chosen)
        assert [s.index for s in train] == [i for i in range(12) if i not in chosen]
    odd = set(sorted(range(1, 12, 2), key=rank.get)[:3])
    train, heldout = split(found, 3, seed=7, file=1)
    assert [s.index for s in heldout] == sorted(odd)
    assert len(train) == 9
    assert split(found, 3, seed=7, file=0)[1][0].file == 0
    assert split(found, 3, seed=7, file=2) == (found, [])
