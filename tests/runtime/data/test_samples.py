"""The rules by which records become samples, with given answers in place of the target's."""

import pytest
import torch
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing

from runtime.config import DataConfig
from runtime.data import samples
from runtime.data.answer import Answer
from runtime.data.answer_store import AnswerStore
from runtime.data.candidate import to_samples
from runtime.data.dataset import Sample
from runtime.data.samples import SampleMaker
from runtime.data.split import split
from runtime.errors import ConfigError, SampleTooLongError
from runtime.prompts.counts import Counts
from runtime.prompts.records import Record
from tests.runtime.tiny_text import CHATML, EOS, byte_target, byte_tokenizer

CONTEXT = 64
LAYER_IDS = (1, 4)


@pytest.fixture(scope="module")
def target():
    return byte_target()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Answers are kept in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def answered(monkeypatch):
    """Text of the answer to every prompt; ended unless it fills its limit."""
    given = {"text": "a fine answer", "asked": []}

    def answer_all(target, prompts, limits, *, batch, advance):
        given["asked"] += list(zip(prompts, limits, strict=True))
        for row, limit in enumerate(limits):
            ids = [*target.tokenizer(given["text"])["input_ids"], EOS][:limit]
            yield {row: Answer(token_ids=ids, ended=ids[-1] == EOS)}

    monkeypatch.setattr(samples, "answer_all", answer_all)
    return given


def maker(target, *, context=CONTEXT, store=False, last_hidden=False, **options):
    settings = {"min_answer_tokens": 4, "max_new_tokens": 20, **options}
    return SampleMaker(
        target=target,
        data=DataConfig(**settings),
        context=context,
        layer_ids=LAYER_IDS,
        store=store,
        answers=AnswerStore("answers", "d" * 64, "float32", vocab_size=target.vocab_size),
        counts=Counts(),
        last_hidden=last_hidden,
    )


def prompt(text):
    return Record(source="p:1", messages=[{"role": "user", "content": text}])


def talk(question, answer):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Record(source="p:2", messages=turns)


def decode(target, ids):
    return target.tokenizer.decode(ids)


def test_prompt_is_answered(target, answered):
    made = maker(target)
    (draft,) = made.make([prompt("hi")])
    assert decode(target, draft.input_ids) == "<s><user>\nhi</s>\n<assistant>\na fine answer</s>"
    assert decode(target, draft.input_ids[draft.prompt_len :]) == "a fine answer</s>"
    assert draft.loss_mask == [0] * draft.prompt_len + [1] * 14
    assert made.counts.noted == {
        "answered": 1, "answer tokens": 14, "answers ended by the model": 1
    }  # fmt: skip
    assert not +made.counts.dropped
    assert not made.counts.places


def test_answer_that_reaches_its_limit_is_kept(target, answered):
    made = maker(target, max_new_tokens=6)
    (draft,) = made.make([prompt("hi")])
    assert decode(target, draft.input_ids[draft.prompt_len :]) == "a fine"
    assert made.counts.noted["answers ended by the model"] == 0


def test_conversation_with_answers_is_taken_as_it_is(target, answered):
    made = maker(target)
    (draft,) = made.make([talk("hi", "yes, hello")])
    assert not answered["asked"]
    assert decode(target, draft.input_ids[draft.prompt_len :]) == "yes, hello</s>\n"
    assert sum(draft.loss_mask) == 11


def test_repetition_is_dropped_and_counted(target, answered):
    answered["text"] = "no no no no no no"
    made = maker(target)
    assert made.make([prompt("hi"), talk("ho", "no no no no no no")])[0].source == "p:2"
    assert +made.counts.dropped == {"repetition": 1}


def test_short_answers_are_dropped_and_counted(target, answered):
    answered["text"] = "ok"
    made = maker(target)
    assert not made.make([prompt("hi"), talk("ho", "no")])
    assert +made.counts.dropped == {"too few supervised tokens": 2}


def test_same_prompt_counts_once(target, answered):
    made = maker(target)
    assert len(made.make([prompt("hi"), talk("hi", "yes, hello"), prompt("ho")])) == 2
    assert +made.counts.dropped == {"duplicate prompt": 1}
    assert made.counts.places == {"duplicate prompt": ["p:2"]}


def test_odd_conversations_are_counted(target, answered):
    made = maker(target)
    odd = [Record(source="x", messages=m) for m in ([], [{"role": "user", "content": None}])]
    assert len(made.make([*odd, prompt("hi")])) == 1
    assert +made.counts.dropped == {"no messages": 1, "no content": 1}


def test_token_outside_the_embedding_is_counted(target, answered):
    target.tokenizer.add_tokens(["[far]", "[farther]", "[farthest]"])
    try:
        made = maker(target)
        assert not made.make([prompt("hi [farthest]")])
        assert +made.counts.dropped == {"token outside the embedding": 1}
    finally:
        target.tokenizer = byte_target().tokenizer


def test_a_prompt_of_which_no_token_is_left_is_counted(target, answered, monkeypatch):
    deaf = byte_tokenizer("{{ messages[0].content }}")
    deaf.backend_tokenizer.normalizer = normalizers.Replace("hi", "")
    monkeypatch.setattr(target, "tokenizer", deaf)
    made = maker(target)
    assert not made.make([prompt("hi")])
    assert +made.counts.dropped == {"no tokens": 1}
    assert not answered["asked"]


def test_text_is_cut_into_pieces_of_the_context(target, answered):
    made = maker(target, context=16)
    text = "abcdefghijklmnopqrstuvwxyz0123456789"
    drafts = made.make([Record(source="book.txt", text=text)])
    assert [decode(target, draft.input_ids) for draft in drafts] == [text[:16], text[16:32]]
    assert all(draft.loss_mask == [0] + [1] * 15 for draft in drafts)
    assert [draft.prompt_len for draft in drafts] == [8, 8]
    # The last piece, "6789", has three supervised tokens of the four that are asked for.
    assert +made.counts.dropped == {"too few supervised tokens": 1}
    assert not answered["asked"]


def test_one_token_of_text_is_no_prompt(target, answered):
    made = maker(target, context=16)
    made.make([Record(source="book.txt", text="abcdefghijklmnopq")])
    assert not answered["asked"]


@pytest.mark.parametrize("store", [False, True])
def test_too_long_is_cut(target, answered, store):
    made = maker(target, context=40, store=store)
    (draft,) = made.make([prompt("hello there")])
    assert len(draft.input_ids) == len(draft.loss_mask) == 40
    assert made.counts.noted["cut at the largest context"] == 1
    assert (draft.features is not None) == store
    assert draft.features is None or draft.features.shape == (40, 64)


def test_answer_that_just_fits_is_not_cut(target, answered):
    made = maker(target, context=47)
    (draft,) = made.make([prompt("hello there")])
    assert len(draft.input_ids) == 47
    assert not made.counts.noted["cut at the largest context"]


def test_too_long_is_skipped_and_counted(target, answered):
    made = maker(target, context=46, too_long="skip")
    assert not made.make([prompt("hello there")])
    assert +made.counts.dropped == {"longer than the largest context": 1}


def test_too_long_is_refused(target, answered):
    made = maker(target, context=46, too_long="refuse")
    with pytest.raises(
        SampleTooLongError, match=r"p:1 needs at least 47 tokens, .* is 46; set data"
    ):
        made.make([prompt("hello there")])


@pytest.mark.parametrize("too_long", ["cut", "skip"])
def test_prompt_without_room_for_an_answer_is_dropped(target, answered, too_long):
    made = maker(target, context=35, too_long=too_long)
    assert not made.make([prompt("hello there")])
    assert +made.counts.dropped == {"prompt too long": 1}
    assert not answered["asked"]


def test_prompt_without_room_is_refused(target, answered):
    made = maker(target, context=35, too_long="refuse")
    with pytest.raises(SampleTooLongError, match="p:1 needs at least 37 tokens"):
        made.make([prompt("hello there")])


def test_a_prompt_with_room_for_just_the_shortest_answer_is_answered(target, answered):
    # 33 tokens of the prompt and 4 of an answer; one more is asked for, to see that it goes on.
    made = maker(target, context=37)
    (draft,) = made.make([prompt("hello there")])
    assert [limit for _, limit in answered["asked"]] == [5]
    assert len(draft.input_ids) == 37
    assert sum(draft.loss_mask) == 4
    assert not +made.counts.dropped


def test_a_conversation_of_just_the_largest_context_is_whole(target, answered):
    (whole,) = maker(target).make([talk("hi", "yes, hello")])
    length = len(whole.input_ids)
    for too_long in ("skip", "refuse", "cut"):
        made = maker(target, context=length, too_long=too_long, min_answer_tokens=11)
        (draft,) = made.make([talk("hi", "yes, hello")])
        assert draft.input_ids == whole.input_ids
        assert not +made.counts.dropped
        assert not made.counts.noted["cut at the largest context"]
    assert not maker(target, min_answer_tokens=12).make([talk("hi", "yes, hello")])


def test_an_answer_just_distinct_enough_is_kept(target, answered):
    # "abcabca" and the end token: 5 4-grams, of which "abca" stands twice.
    answered["text"] = "abcabca"
    assert maker(target, min_distinct_4grams=0.8).make([prompt("hi")])
    made = maker(target, min_distinct_4grams=0.801)
    assert not made.make([prompt("hi")])
    assert +made.counts.dropped == {"repetition": 1}


def test_conversation_cut_before_its_answer_is_dropped(target, answered):
    made = maker(target, context=20)
    assert not made.make([talk("a question that is long", "yes, hello")])
    assert +made.counts.dropped == {"too few supervised tokens": 1}


def test_cut_conversation_starts_at_its_last_visible_answer(target, answered):
    turns = ["one", "first answer", "two", "second answer"]
    roles = ["user", "assistant"] * 2
    messages = [{"role": r, "content": c} for r, c in zip(roles, turns, strict=True)]
    made = maker(target, context=50)
    (draft,) = made.make([Record(source="x", messages=messages)])
    assert decode(target, draft.input_ids[draft.prompt_len :]).startswith("first answer</s>\n<us")


def test_features_that_are_not_finite_are_dropped(target, answered, monkeypatch):
    made = maker(target, store=True)
    monkeypatch.setattr(
        target, "features", lambda ids, layers: torch.full((*ids.shape, 64), torch.nan)
    )
    assert not made.make([prompt("hi"), talk("ho", "yes, hello")])
    assert +made.counts.dropped == {"features not finite": 2}


def test_feature_scale_leaves_out_what_is_not_finite(target, answered, monkeypatch):
    made = maker(target)
    drafts = made.make([talk("hi", "yes, hello"), talk("a longer question", "yes, hello")])
    expected = made.feature_scale(drafts[1:])
    plain = target.features

    def features(ids, layers):
        found = plain(ids, layers).clone()
        found[0, 2] = torch.nan
        return found

    monkeypatch.setattr(target, "features", features)
    assert made.feature_scale(drafts) == pytest.approx(expected, rel=1e-3)


def test_features_come_from_forward_passes(target, answered):
    made = maker(target, store=True)
    records = [talk(f"question {i}", "a longer answer " * (i + 1)) for i in range(3)]
    records += [prompt("hi")]
    drafts = made.make(records)
    for draft in drafts:
        expected = target.features(torch.tensor([draft.input_ids]), LAYER_IDS)[0]
        torch.testing.assert_close(draft.features.float(), expected, rtol=0.01, atol=0.01)


def test_feature_scale_leaves_the_first_token_out(target, answered):
    made = maker(target, store=True)
    (draft,) = made.make([talk("hi", "yes, hello")])
    draft.features[:] = torch.tensor([2.0, -3.0]).repeat_interleave(32).bfloat16()
    draft.features[0] = 1000.0
    assert made.feature_scale([draft]) == pytest.approx([2.0, 3.0])


def test_the_last_hidden_state_is_stored_behind_the_features(target, answered):
    records = [prompt("hi"), prompt("a longer question")]
    plain, made = maker(target, store=True), maker(target, store=True, last_hidden=True)
    without, found = plain.make(records), made.make(records)
    assert made.stored_layer_ids == (*LAYER_IDS, target.num_layers)
    for one, other in zip(without, found, strict=True):
        width = one.features.shape[1]
        assert torch.equal(other.features[:, :width], one.features)
        ids = torch.tensor([other.input_ids])
        last = target.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(other.features[:, width:], last.bfloat16(), rtol=0.01, atol=0.01)
    assert made.feature_scale(found) == plain.feature_scale(without)


def test_feature_scale_without_stored_features(target, answered):
    drafts = maker(target).make([prompt("hi"), prompt("a longer question")])
    stored = maker(target, store=True)
    expected = stored.feature_scale(stored.make([prompt("hi"), prompt("a longer question")]))
    assert maker(target).feature_scale(drafts) == pytest.approx(expected, rel=1e-3)


def test_answers_that_are_there_are_not_made_again(target, answered):
    first = maker(target).make([prompt("hi"), prompt("ho")])
    answered["asked"].clear()
    more = maker(target).make([prompt("one more"), prompt("ho"), prompt("hi")])
    assert [decode(target, ids) for ids, _ in answered["asked"]] == [
        "<s><user>\none more</s>\n<assistant>\n"
    ]
    assert [draft.input_ids for draft in more[1:]] == [draft.input_ids for draft in first[::-1]]
    answered["asked"].clear()
    # Rules about answers ask for none, nor does more room for those that have ended.
    for options in ({"min_answer_tokens": 1}, {"min_distinct_4grams": 1.0}, {"batch": 1}):
        maker(target, **options).make([prompt("hi"), prompt("ho")])
    maker(target, context=60, max_new_tokens=18).make([prompt("hi"), prompt("ho")])
    assert not answered["asked"]


def samples_of(count, file=lambda i: 0):
    ones = torch.ones(2)
    return [
        Sample(input_ids=ones, loss_mask=ones, prompt_len=1, identity=f"{i}", file=file(i), index=i)
        for i in range(count)
    ]


def test_split_is_by_hash_of_seed_and_prompt():
    found = samples_of(40)
    train, heldout = split(found, 10, seed=1)
    assert (len(train), len(heldout)) == (30, 10)
    assert sorted(sample.index for sample in train + heldout) == list(range(40))
    again = split(found[::-1], 10, seed=1)[1]
    assert {s.identity for s in again} == {s.identity for s in heldout}
    other = split(found, 10, seed=2)[1]
    assert {s.identity for s in other} != {s.identity for s in heldout}
    # Dropping a training sample moves nothing.
    fewer = [sample for sample in found if sample is not train[0]]
    assert [s.identity for s in split(fewer, 10, seed=1)[1]] == [s.identity for s in heldout]


def test_split_takes_heldout_from_one_file():
    found = samples_of(9, file=lambda i: i % 3)
    train, heldout = split(found, 9, seed=1, file=2)
    assert [sample.index for sample in heldout] == [2, 5, 8]
    assert [sample.index for sample in train] == [0, 1, 3, 4, 6, 7]


def test_split_without_heldout():
    found = samples_of(2)
    assert split(found, 0, seed=1) == (found, [])


def test_to_samples(target, answered):
    drafts = maker(target, store=True).make([prompt("hi"), prompt("ho")])
    for index, (draft, sample) in enumerate(zip(drafts, to_samples(drafts), strict=True)):
        assert sample.input_ids.tolist() == draft.input_ids
        assert sample.loss_mask.tolist() == draft.loss_mask
        assert (sample.input_ids.dtype, sample.loss_mask.dtype) == (torch.int32, torch.uint8)
        assert sample.features is draft.features
        assert (sample.identity, sample.index) == (draft.identity, index)


def test_samples_know_their_file(target, answered):
    text = "abcdefghijklmnopqrstuvwxyz0123456789"
    records = [Record(source="a.txt", file=3, text=text), talk("hi", "yes, hello, and more")]
    drafts = maker(target, context=35).make(records)
    assert [sample.file for sample in to_samples(drafts)] == [3, 0]


def beginning_with_bos(template=None):
    target = byte_target(template)
    target.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return target


def test_each_piece_of_text_begins_with_the_tokenizers_bos(answered):
    target = beginning_with_bos()
    text = "abcdefghijklmnopqrstuvwxyz"
    for record in (text, f"<s>{text}"):
        made = maker(target, context=16).make([Record(source="book.txt", text=record)])
        pieces = [decode(target, draft.input_ids) for draft in made]
        assert pieces == [f"<s>{text[:15]}", f"<s>{text[15:]}"]
        assert all(draft.loss_mask[:2] == [0, 1] for draft in made)


def test_conversations_of_a_target_without_a_template_are_refused_before_any_answer(answered):
    target = beginning_with_bos()
    book = Record(source="book.txt", text="a text needs none")
    assert len(maker(target).make([book])) == 1
    with pytest.raises(ConfigError, match='no chat template; set it to "plain"'):
        maker(target).make([book, prompt("hi")])
    assert not answered["asked"]
    (draft,) = maker(target, chat_template="plain").make([prompt("hi")])
    assert decode(target, draft.input_ids[: draft.prompt_len]) == "<s>user: hi\nassistant:"


def test_of_an_open_conversation_the_targets_own_answer_is_supervised(target, answered):
    turns = [*talk("hi", "yes, hello").messages, {"role": "user", "content": "ho"}]
    made = maker(target, context=128)
    (draft,) = made.make([Record(source="x", messages=turns)])
    assert draft.loss_mask == [0] * draft.prompt_len + [1] * 14
    assert decode(target, draft.input_ids[draft.prompt_len :]) == "a fine answer</s>"
    assert made.counts.noted["given answers before an open question"] == 1


def test_what_a_template_leaves_out_is_counted(target, answered):
    turns = talk("hi", "yes, hello").messages
    turns[1] |= {"reasoning_content": "so"}
    silent = [*turns, *talk("ho", "well, fine").messages]
    silent[3] |= {"weight": 0}
    made = maker(target, context=128)
    made.make([Record(source="x", messages=turns), Record(source="y", messages=silent)])
    assert made.counts.noted == {
        "reasoning that the target's chat template leaves out": 2,
        "answers of weight 0": 1,
    }


def test_a_refusal_is_reported_with_its_place_and_the_templates_words(answered):
    made = maker(byte_target(CHATML.replace("<s>", "{{ messages[1].content }}", 1)))
    assert not made.make([Record(source="p.jsonl:7", messages=talk("hi", "a").messages[:1])])
    reason = "refused by the target's chat template"
    assert +made.counts.dropped == {reason: 1}
    (place,) = made.counts.places[reason]
    assert place.startswith("p.jsonl:7 (UndefinedError: ")


def test_keywords_reach_the_template(answered):
    target = byte_target("{{ messages[0].content }}{{ mood }}|")
    made = maker(target, template={"mood": " calmly"})
    (draft,) = made.make([prompt("hi")])
    assert decode(target, draft.input_ids) == "hi calmly|a fine answer</s>"
