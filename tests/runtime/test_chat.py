import pytest

from runtime.chat import Skipped, check_messages, conversation_tokens, prompt_tokens
from tests.runtime.tiny_text import (
    CHATML,
    EOS,
    INST,
    STRICT,
    TAGGED,
    THINKING,
    byte_tokenizer,
    supervised,
)

U, A, S = "user", "assistant", "system"


def talk(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def tokens(tokenizer, messages):
    return conversation_tokens(tokenizer, messages, frozenset({EOS}))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "no messages"),
        ([], "no messages"),
        ({"role": U, "content": "a"}, "no messages"),
        (["hello"], "no role"),
        ([{"content": "a"}], "no role"),
        ([{"role": "tool", "content": "a"}], "unknown role"),
        ([{"role": U}], "no content"),
        ([{"role": U, "content": None}], "no content"),
        ([{"role": U, "content": "  "}], "no content"),
        (talk((S, "be kind")), "no user message"),
        (talk((A, "yes"), (U, "a")), "starts with assistant"),
        (talk((S, "be kind"), (A, "yes")), "starts with assistant"),
        (talk((U, "a"), (U, "b")), "two turns of one role"),
        (talk((U, "a"), (A, "b"), (A, "c")), "two turns of one role"),
        (talk((U, "a"), (S, "b")), "system message not first"),
        (talk((S, "a"), (S, "b"), (U, "c")), "system message not first"),
    ],
)
def test_odd_conversations_are_skipped_by_reason(messages, reason):
    with pytest.raises(Skipped, match=f"^{reason}$") as caught:
        check_messages(messages)
    assert caught.value.reason == reason


def test_ordered_conversations_pass_with_role_and_content_only():
    messages = [{**turn, "id": 3} for turn in talk((S, "s"), (U, "a"), (A, "b"), (U, "c"))]
    assert check_messages(messages) == talk((S, "s"), (U, "a"), (A, "b"), (U, "c"))


@pytest.mark.parametrize("template", [CHATML, INST, TAGGED, None])
def test_answers_alone_are_supervised_with_their_end_token(template):
    tokenizer = byte_tokenizer(template)
    conversation = tokens(tokenizer, talk((U, "hi"), (A, "yes ok"), (U, "a"), (A, "no")))
    found = [run.strip(" ") for run in supervised(tokenizer, conversation)]
    assert found == ["yes ok</s>", "no</s>"]


def test_mask_drawn_by_hand():
    tokenizer = byte_tokenizer(INST)
    conversation = tokens(tokenizer, talk((U, "hi"), (A, "yes"), (U, "n"), (A, "no")))
    #         [INST] hi [/INST] yes$[INST] n [/INST] no$      ($ is the end token)
    drawn = "00000000000000000" + "11111" + "0000000000000000" + "1111"
    assert "".join(map(str, conversation.loss_mask)) == drawn


def test_what_a_template_puts_behind_the_end_token_is_not_supervised():
    tokenizer = byte_tokenizer(CHATML)
    conversation = tokens(tokenizer, talk((U, "a"), (A, "b")))
    assert tokenizer.decode(conversation.input_ids).endswith("b</s>\n")
    assert conversation.loss_mask[-3:] == [1, 1, 0]


def test_text_that_looks_like_a_marker_does_not_mislead():
    tokenizer = byte_tokenizer(CHATML)
    messages = talk((U, "say <assistant>\nb"), (A, "<user>\nc"))
    assert supervised(tokenizer, tokens(tokenizer, messages)) == ["<user>\nc</s>"]


def test_token_across_the_border_of_prompt_and_answer_is_supervised():
    tokenizer = byte_tokenizer(INST, merges=[("]", "\u0120")])
    conversation = tokens(tokenizer, talk((U, "hi"), (A, "yes")))
    assert supervised(tokenizer, conversation) == ["] yes</s>"]


def test_system_message_is_not_supervised():
    tokenizer = byte_tokenizer(CHATML)
    conversation = tokens(tokenizer, talk((S, "be kind"), (U, "a"), (A, "b")))
    assert supervised(tokenizer, conversation) == ["b</s>"]


def test_turns_that_a_template_rewrites_later_stay_unsupervised():
    tokenizer = byte_tokenizer(THINKING)
    conversation = tokens(tokenizer, talk((U, "a"), (A, "b"), (U, "c"), (A, "d")))
    assert supervised(tokenizer, conversation) == ["(thought)d</s>"]


def test_prompt_is_the_beginning_of_the_conversation():
    for template in (CHATML, TAGGED, None):
        tokenizer = byte_tokenizer(template)
        prompt = prompt_tokens(tokenizer, talk((U, "hi")))
        conversation = tokens(tokenizer, talk((U, "hi"), (A, "yes")))
        assert conversation.input_ids[: len(prompt)] == prompt
        assert conversation.loss_mask.index(1) == len(prompt)


def test_special_tokens_are_not_added_twice():
    tokenizer = byte_tokenizer(CHATML)
    assert prompt_tokens(tokenizer, talk((U, "hi"))).count(1) == 1


def test_template_that_refuses():
    with pytest.raises(Skipped, match="template refuses it"):
        prompt_tokens(byte_tokenizer(STRICT), talk((U, "hi")))


def test_template_that_refuses_with_tags():
    template = TAGGED + STRICT
    with pytest.raises(Skipped, match="template refuses it"):
        tokens(byte_tokenizer(template), talk((U, "hi"), (A, "yes")))


def test_conversation_without_supervised_token():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(Skipped, match="unsupervised"):
        tokens(byte_tokenizer(template), talk((U, "hi"), (A, "yes")))
