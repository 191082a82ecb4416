from dataclasses import replace

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast

from runtime.prompts.conversation import Skipped, check_messages
from runtime.prompts.supervision import tokenise
from runtime.prompts.template import ChatTemplate, TemplateChoice
from tests.runtime.prompts.test_tokenisation import NoOffsets, with_bos
from tests.runtime.tiny_text import (
    CHATML,
    EOS,
    INST,
    TAGGED,
    THINKING,
    byte_tokenizer,
    supervised,
    talk,
)

U, A, S = "user", "assistant", "system"
NAME = "the target's chat template"
THOUGHTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "<think>{% if loop.last %}{{ m.reasoning_content }}{% endif %}</think>{% endif %}"
    "{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if quick %}<think></think>{% endif %}{% endif %}"
)
"""Writes a thought before each answer, empty where there is none or the turn is past."""
OPENED = THOUGHTS.replace(
    "<assistant>{% if quick %}<think></think>{% endif %}", "<assistant><think>"
)
"""Its prompt opens the thought."""


def template_of(template, tokenizer=None, **keywords):
    tokenizer = tokenizer or byte_tokenizer(template)
    choice = TemplateChoice("plain" if template is None else "target", keywords)
    return ChatTemplate.of(tokenizer, choice)


def learned(template, messages, **keywords):
    """Texts of the supervised runs, and the notes."""
    chat = template_of(template, **keywords)
    conversation = tokenise(chat, check_messages(messages), frozenset({EOS}))
    return supervised(chat.tokenizer, conversation), dict(conversation.notes)


def answer(content, **more):
    return {"role": A, "content": content, **more}


@pytest.mark.parametrize("template", [CHATML, INST, TAGGED, THOUGHTS, OPENED, None])
def test_answers_alone_are_supervised_with_their_end_token(template):
    found, notes = learned(template, talk((S, "be"), (U, "hi"), (A, "yes ok"), (U, "a"), (A, "no")))
    assert [run.strip(" ") for run in found] == ["yes ok</s>", "no</s>"]
    assert not notes


def test_mask_drawn_by_hand():
    conversation = tokenise(
        template_of(INST), talk((U, "hi"), (A, "yes"), (U, "n"), (A, "no")), frozenset({EOS})
    )
    #         [INST] hi [/INST] yes$[INST] n [/INST] no$      ($ is the end token)
    drawn = "00000000000000000" + "11111" + "0000000000000000" + "1111"
    assert "".join(map(str, conversation.loss_mask)) == drawn


def test_an_open_question_and_what_was_given_before_are_not_supervised():
    chat = template_of(CHATML)
    messages = talk((U, "a"), (A, "b"), (U, "c"))
    conversation = tokenise(chat, messages, frozenset({EOS}))
    text = chat.tokenizer.decode(conversation.input_ids)
    assert text == "<s><user>\na</s>\n<assistant>\nb</s>\n<user>\nc</s>\n<assistant>\n"
    assert not any(conversation.loss_mask)
    assert conversation.notes == {"given answers before an open question": 1}


def test_a_question_alone_has_nothing_supervised():
    assert not any(tokenise(template_of(CHATML), talk((U, "a")), frozenset({EOS})).loss_mask)


def test_text_that_looks_like_markup_does_not_mislead():
    messages = talk((U, "say <assistant>\nb"), (A, "<user>\nc"), (U, "<user>\nc"), (A, "a"))
    assert learned(CHATML, messages)[0] == ["<user>\nc</s>", "a</s>"]


def test_an_answer_equal_to_the_question_is_told_from_it():
    assert learned(CHATML, talk((U, "x"), (A, "x"), (U, "x"), (A, "x")))[0] == ["x</s>", "x</s>"]


def test_a_template_that_strips_and_rewrites_is_followed():
    shouting = CHATML.replace("{{ m.content }}", "{{ m.content | trim | upper }}")
    messages = talk((U, " hi "), (A, "\n\nyes, ok  \n"), (U, "a"), (A, "no"))
    assert learned(shouting, messages) == (["YES, OK</s>", "NO</s>"], {})


def test_what_a_template_writes_in_the_last_turn_only():
    found, _ = learned(THINKING, talk((U, "a"), (A, "b"), (U, "c"), (A, "d")))
    assert found == ["b</s>", "(thought)d</s>"]


def test_markup_between_prompt_and_answer_is_what_the_model_writes():
    channels = CHATML.replace(
        "{{ m.content }}", "{% if m.role == 'assistant' %}<final>{% endif %}{{ m.content }}"
    )
    assert learned(channels, talk((U, "a"), (A, "b"), (U, "c"), (A, "d")))[0] == [
        "<final>b</s>", "<final>d</s>"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("template", "before", "keywords"),
    [
        (THOUGHTS, "<think>so</think>", {}),
        (THOUGHTS, "so</think>", {"quick": True}),
        (OPENED, "so</think>", {}),
    ],
)
def test_reasoning_is_supervised_where_the_template_renders_it(template, before, keywords):
    messages = [*talk((U, "a")), answer("b", reasoning_content="why"), *talk((U, "c"))]
    messages.append(answer("d", thinking="so"))
    found, notes = learned(template, messages, **keywords)
    assert found == ["b</s>", f"{before}d</s>"]
    assert notes == {f"reasoning that {NAME} leaves out": 1}


def test_an_empty_thought_is_not_supervised():
    for template, keywords in ((THOUGHTS, {}), (OPENED, {}), (THOUGHTS, {"quick": True})):
        assert learned(template, talk((U, "a"), (A, "b")), **keywords) == (["b</s>"], {})


def test_thoughts_within_the_content_are_supervised_as_rendered():
    splitting = (
        "{% for m in messages %}<{{ m.role }}>{% if '</think>' in m.content %}"
        "[{{ m.content.split('</think>')[0] }}]{{ m.content.split('</think>')[1] }}"
        "{% else %}{{ m.content }}{% endif %}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = talk((U, "a"), (A, "so</think>b"), (U, "c"), (A, "so</think>d"))
    assert learned(splitting, messages)[0] == ["[so]b</s>", "[so]d</s>"]


def test_an_answer_that_changes_the_whole_does_not_reach_into_other_messages():
    messages = talk((U, "question"), (A, "long answer"), (U, "more"), (A, "end"))
    counting = "{{ messages | map(attribute='content') | join | length }}:" + THINKING
    assert learned(counting, messages) == (["long answer</s>", "end</s>"], {})
    judging = "{{ 'calm' if 'long' in messages[1].content else 'terse' }}:" + THINKING
    assert learned(judging, messages) == (["long answer</s>", "(thought)end</s>"], {})
    closing = THINKING + "{{ 'calm' if 'long' in messages[1].content else 'terse' }}"
    assert learned(closing, messages) == (["long answer</s>", "end</s>"], {})
    for template in (judging, closing):
        shouting = template.replace("{{ m.content }}", "{{ m.content | upper }}")
        found = "".join(learned(shouting, messages)[0])
        assert "LONG ANSWER</s>" in found
        assert "QUESTION" not in found
        assert "MORE" not in found
    quoting = "{{ messages[1].content | first }}:" + THINKING
    found, notes = learned(quoting, messages)
    assert found == ["(thought)end</s>"]
    assert notes == {f"answers that {NAME} leaves out or repeats": 1}


def test_a_prompt_that_lacks_the_question_is_none():
    pairs = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "[{{ messages[loop.index0 - 1].content }}]{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    found, _ = learned(pairs, talk((U, "a"), (A, "b"), (U, "c"), (A, "d")))
    assert found == ["b</s>", "d</s>"]


@pytest.mark.parametrize(
    "template",
    [
        "hello",
        "{% for m in messages %}<{{ m.role }}>{% endfor %}",
        "{% for m in messages %}{% if not loop.last %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
def test_an_open_question_that_the_template_leaves_out_is_not_asked(template):
    with pytest.raises(Skipped, match=f"^question that {NAME} leaves out$"):
        learned(template, talk((U, "a"), (A, "b"), (U, "c")))


def test_texts_written_twice_do_not_reach_into_other_messages():
    messages = talk((U, "question"), (A, "answer"), (U, "more"), (A, "end"))
    found, notes = learned(THINKING + "{{ messages[1].content }}", messages)
    assert found == ["end</s>"]
    assert notes == {f"answers that {NAME} leaves out or repeats": 1}
    asked = THINKING.replace(
        "{{ m.content }}", "{{ m.content }}{% if m.role == 'user' %} {{ m.content }}{% endif %}"
    )
    assert learned(asked, messages) == (["answer</s>", "(thought)end</s>"], {})


def test_weight_zero_is_rendered_and_not_supervised():
    messages = [*talk((U, "a")), answer("b", weight=0), *talk((U, "c")), answer("d", weight=1)]
    for template in (CHATML, TAGGED):
        assert learned(template, messages) == (["d</s>"], {"answers of weight 0": 1})
        chat = template_of(template)
        plain = talk((U, "a"), (A, "b"), (U, "c"), (A, "d"))
        ids = [
            tokenise(chat, check_messages(m), frozenset({EOS})).input_ids for m in (messages, plain)
        ]
        assert ids[0] == ids[1]
    with pytest.raises(Skipped, match="every answer has weight 0"):
        learned(CHATML, [*talk((U, "a")), answer("b", weight=0)])


def test_answers_that_a_template_leaves_out_are_counted():
    recent = CHATML.replace("in messages", "in messages[-2:]")
    messages = talk((U, "a"), (A, "b"), (U, "c"), (A, "d"))
    assert learned(recent, messages) == (
        ["d</s>"],
        {f"answers that {NAME} leaves out or repeats": 1},
    )
    users = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(Skipped, match=f"^no answer supervised through {NAME}$"):
        learned(users, messages)


def test_the_end_token_is_looked_for_before_the_next_message_only():
    bare = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}</s>{% else %}{{ m.content }}|{% endif %}{% endfor %}"  # noqa: E501
    found, notes = learned(bare, talk((U, "a"), (A, "b"), (U, "c"), (A, "d")))
    assert found == ["b", "d"]
    assert notes == {f"answers without an end token in {NAME}": 2}
    later = bare.replace("{{ m.content }}|", "{{ m.content }}\n<|a|></s>|")
    assert learned(later, talk((U, "a"), (A, "b")))[0] == ["b\n<|a|></s>"]


@pytest.mark.parametrize(
    ("tagged", "found"),
    [
        ("{% generation %}{{ m.content }}</s>\n\n{% endgeneration %}", "yes</s>"),
        ("{% generation %}{{ m.content }}{% endgeneration %}</s>\n", "yes</s>"),
        ("{%- generation -%}{{ m.content }}</s>{%- endgeneration -%}", "yes</s>"),
        ("{% generation %}{{ m.content }}{% endgeneration %}\n", "yes"),
        ("{% generation %}({% endgeneration %}{{ m.content }}</s>", None),
        ("{% generation %}ye{% endgeneration %}s</s>", None),
    ],
)
def test_generation_tags_and_the_end_token(tagged, found):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + tagged + "{% else %}"
        "<user>{{ m.content }}<assistant>{% endif %}{% endfor %}"
    )
    if found is None:
        with pytest.raises(Skipped, match="no answer supervised through"):
            learned(template, talk((U, "a"), (A, "yes")))
    else:
        runs, notes = learned(template, talk((U, "a"), (A, "yes"), (U, "b"), (A, "yes")))
        assert runs == [found, found]
        assert bool(notes) == ("</s>" not in found)


def test_tags_leave_out_what_the_prompt_contains_and_answers_without_them():
    header = TAGGED.replace("<|u|>{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}",
        "{% if m.role == 'assistant' %}{% generation %}<|u|>assistant:").replace(
        "{% else %}{{ m.content }}", "{% else %}<|u|>user:{{ m.content }}")  # fmt: skip
    messages = talk((U, "a"), (A, "b"), (U, "c"), (A, "d"))
    assert learned(header, messages)[0] == ["b</s>", "d</s>"]
    last = TAGGED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    assert learned(last, messages) == (["d</s>"], {f"answers that {NAME} leaves unsupervised": 1})


def test_tags_that_are_never_reached_decide_nothing():
    never = CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    assert learned(never, talk((U, "a"), (A, "b")))[0] == ["b</s>"]


@pytest.mark.parametrize("wrap", [lambda tokenizer: tokenizer, NoOffsets])
def test_tokens_across_the_borders_of_an_answer(wrap):
    """One that begins before it is the prompt's; one that begins within it is the answer's."""
    tokenizer = byte_tokenizer(INST.replace("</s>", "."), merges=[("]", "\u0120"), ("s", ".")])
    chat = replace(template_of("", tokenizer=tokenizer), tokenizer=wrap(tokenizer))
    conversation = tokenise(chat, talk((U, "hi"), (A, "yes")), frozenset({EOS}))
    assert supervised(tokenizer, conversation) == ["yes."]
    assert conversation.notes.total() == 1, "there is no end token"


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_word_that_has_its_space_within_is_the_answers(scheme):
    """As tokenizers of sentencepiece have it: the space belongs to the word."""
    tokens = ["<unk>", "<s>", "</s>", *"\u2581[]/INSThieysno", "\u2581yes", "\u2581no"]
    scores = [(token, float(len(token))) for token in dict.fromkeys(tokens)]
    model = Tokenizer(Unigram(scores, unk_id=0))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    model.add_special_tokens(["<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>")
    tokenizer.chat_template = INST
    conversation = tokenise(
        template_of(INST, tokenizer=tokenizer),
        talk((U, "hi"), (A, "yes"), (U, "hi"), (A, "no yes")),
        frozenset({EOS}),
    )
    learned = [
        token
        for token, mask in zip(conversation.input_ids, conversation.loss_mask, strict=True)
        if mask
    ]
    assert tokenizer.convert_ids_to_tokens(learned) == [
        "\u2581yes", "</s>", "\u2581no", "\u2581yes", "</s>"
    ]  # fmt: skip
    assert not conversation.notes


def test_the_plain_form_begins_with_the_tokenizers_bos():
    tokenizer = with_bos(byte_tokenizer(None))
    chat = template_of(None, tokenizer=tokenizer)
    conversation = tokenise(chat, talk((U, "hi"), (A, "yes")), frozenset({EOS}))
    assert tokenizer.decode(conversation.input_ids) == "<s>user: hi\nassistant: yes</s>\n"
    assert supervised(tokenizer, conversation) == [" yes</s>"]
    assert conversation.loss_mask[0] == 0


def test_special_tokens_that_the_template_writes_are_not_added_again():
    chat = template_of(CHATML, tokenizer=with_bos(byte_tokenizer(CHATML)))
    assert tokenise(chat, talk((U, "hi")), frozenset({EOS})).input_ids.count(1) == 1


def test_an_end_token_that_also_pads_is_supervised_where_it_ends_an_answer():
    tokenizer = byte_tokenizer(CHATML, pad_token="</s>")
    chat = template_of(CHATML, tokenizer=tokenizer)
    conversation = tokenise(chat, talk((U, "a"), (A, "b"), (U, "c"), (A, "d")), frozenset({EOS}))
    assert supervised(tokenizer, conversation) == ["b</s>", "d</s>"]


def test_a_prompt_is_the_beginning_of_its_conversation():
    for template in (CHATML, TAGGED, INST, THOUGHTS, None):
        chat = template_of(template)
        prompt = tokenise(chat, talk((U, "hi")), frozenset({EOS})).input_ids
        conversation = tokenise(chat, talk((U, "hi"), (A, "yes")), frozenset({EOS}))
        assert conversation.input_ids[: len(prompt)] == prompt


def test_markup_that_reasoning_would_stand_in_is_no_thought_where_more_stands_there():
    """Only an empty thought is left out: what else the model writes there is its own."""
    naming = THOUGHTS.replace(
        "<think>", "<think>{% if not m.reasoning_content %}none{% endif %}", 1
    )
    found, notes = learned(naming, talk((U, "a"), (A, "b")))
    assert found == ["<think>none</think>b</s>"]
    assert not notes


def test_blanks_between_prompt_and_answer_are_the_answers():
    spaced = CHATML.replace(
        "{{ m.content }}", "{% if m.role == 'assistant' %}{{ '\\n ' }}{% endif %}{{ m.content }}"
    )
    assert learned(spaced, talk((U, "a"), (A, "b"), (U, "c"), (A, "d")))[0] == [
        "\n b</s>", "\n d</s>"
    ]  # fmt: skip


def test_an_empty_thought_with_blanks_of_its_own_is_left_out():
    spaced = THOUGHTS.replace(
        "<think>{% if loop.last %}{{ m.reasoning_content }}{% endif %}</think>",
        "<think>\n{{ m.reasoning_content }}\n</think>\n\n",
    ).replace("{% if quick %}<think></think>{% endif %}", "")
    assert learned(spaced, talk((U, "a"), (A, "b")))[0] == ["b</s>"]
    messages = [*talk((U, "a")), answer("b", reasoning="so")]
    assert learned(spaced, messages)[0] == ["<think>\nso\n</think>\n\nb</s>"]


@pytest.mark.parametrize("judged", ["{j}:{m}", "{m}{j}"])
def test_answers_with_blanks_at_their_edges_where_the_template_judges_the_text(judged):
    judgement = "{{ 'calm' if 'long' in messages[1].content else 'terse' }}"
    whole = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    template = judged.replace("{j}", judgement).replace("{m}", whole)
    messages = talk((U, "question"), (A, "  long answer\n"), (U, "more"), (A, " end "))
    assert learned(template, messages)[0] == ["long answer</s>", "end</s>"]


def test_reasoning_of_several_answers_is_noted_once_for_each_that_lacks():
    messages = [*talk((U, "a")), answer("b", reasoning="one"), *talk((U, "c"))]
    messages += [answer("d", reasoning="two"), *talk((U, "e")), answer("f", reasoning="three")]
    found, notes = learned(THOUGHTS, messages)
    assert found == ["b</s>", "d</s>", "<think>three</think>f</s>"]
    assert notes == {f"reasoning that {NAME} leaves out": 2}


def test_every_given_answer_before_an_open_question_is_noted():
    messages = talk((U, "a"), (A, "b"), (U, "c"), (A, "d"), (U, "e"))
    messages[1]["weight"] = 0
    found, notes = learned(CHATML, messages)
    assert found == []
    assert notes == {"given answers before an open question": 2}


def test_of_answers_of_which_some_have_no_weight_the_others_are_learned():
    turns = talk((U, "a"), (A, "b"), (U, "c"), (A, "d"), (U, "e"), (A, "f"))
    for silent in ([1], [3], [5], [1, 5], [1, 3]):
        messages = [{**turn, "weight": 0} if i in silent else turn for i, turn in enumerate(turns)]
        found, notes = learned(CHATML, messages)
        assert found == [f"{turns[i]['content']}</s>" for i in (1, 3, 5) if i not in silent]
        assert notes == {"answers of weight 0": len(silent)}


def test_where_answers_are_silent_or_left_out_the_template_is_named():
    users = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    messages = talk((U, "a"), (A, "b"), (U, "c"), (A, "d"))
    messages[1]["weight"] = 0
    with pytest.raises(Skipped, match=f"^no answer supervised through {NAME}$"):
        learned(users, messages)
    messages[3]["weight"] = 0
    with pytest.raises(Skipped, match=r"^every answer has weight 0$"):
        learned(users, messages)


@pytest.mark.parametrize("ends", [{EOS}, {EOS, 4}, {4, 5}])
def test_the_first_of_several_end_tokens_ends_an_answer(ends):
    template = CHATML.replace("</s>", "<|u|></s>")
    chat = template_of(template)
    messages = talk((U, "a"), (A, "b"), (U, "c"), (A, "d"))
    found = supervised(chat.tokenizer, tokenise(chat, messages, frozenset(ends)))
    end = "<|u|>" if 4 in ends else "<|u|></s>"
    assert found == [f"b{end}", f"d{end}"]


def test_characters_that_no_text_should_have_are_text_like_any_other():
    messages = talk((U, "\ue000 a"), (A, "b\ue001\ue000"), (U, "\ue002"), (A, "\ue000"))
    found, notes = learned(CHATML, messages)
    assert found == ["b\ue001\ue000</s>", "\ue000</s>"]
    assert not notes
