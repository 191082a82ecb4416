import json

import pytest

from runtime.prompts.conversation import Skipped, check_messages
from tests.runtime.tiny_text import talk

U, A, S = "user", "assistant", "system"


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "no messages"),
        ([], "no messages"),
        ({"role": U, "content": "a"}, "no messages"),
        (["hello"], "no role"),
        ([{"content": "a"}], "no role"),
        ([{"role": "narrator", "content": "a"}], "unknown role"),
        ([{"role": "tool", "content": "a"}], "role tool"),
        ([{"role": "developer", "content": "a"}, *talk((U, "a"))], "role developer"),
        ([{"role": U}], "no content"),
        ([{"role": U, "content": None}], "no content"),
        ([{"role": U, "content": "  "}], "no content"),
        ([{"role": U, "content": []}], "no content"),
        ([{"role": U, "content": parts(" ", "")}], "no content"),
        ([{"role": U, "content": 7}], "content that is not text"),
        ([{"role": U, "content": [{"type": "image", "url": "x"}]}], "content that is not text"),
        ([{"role": U, "content": [{"type": "text", "text": 3}]}], "content that is not text"),
        ([{"role": U, "content": json.loads(r'"\ud83d"')}], "content that is not Unicode text"),
        ([*talk((U, "a")), {"role": A, "content": "b", "thinking": 3}], "content that is not text"),
        ([*talk((U, "a")), {"role": A, "content": "b", "tool_calls": [{}]}], "tool calls"),
        ([*talk((U, "a")), {"role": A, "content": "b", "function_call": {"x": 1}}], "tool calls"),
        (
            [*talk((U, "a")), {"role": A, "content": "b", "weight": 0.5}],
            "weight is neither 0 nor 1",
        ),
        ([*talk((U, "a")), {"role": A, "content": "b", "weight": []}], "weight is neither 0 nor 1"),
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


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (parts("only"), "only"),
        (parts("only")[0], "only"),
        (parts("one ", "two"), "one two"),
        (["bare ", {"type": "input_text", "text": "words"}], "bare words"),
        ([{"type": "output_text", "text": "a"}, {"type": "text", "text": None}], "a"),
    ],
)
def test_text_parts_are_joined(content, text):
    assert check_messages([{"role": U, "content": content}]) == talk((U, text))


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_kept_under_one_name(key):
    answer = {"role": A, "content": "b", "reasoning": None, key: parts("because")}
    found = check_messages([*talk((U, "a")), answer])
    assert found[1] == {"role": A, "content": "b", "reasoning": "because"}


def test_reasoning_of_a_user_and_blank_reasoning_are_nothing():
    messages = [{"role": U, "content": "a", "reasoning": "why"}, *talk((A, "b"))]
    messages[1]["reasoning_content"] = " \n"
    assert check_messages(messages) == talk((U, "a"), (A, "b"))


@pytest.mark.parametrize(
    ("weight", "kept"), [(0, {"weight": 0}), (0.0, {"weight": 0}), (1, {}), (None, {})]
)
def test_weights(weight, kept):
    messages = [*talk((U, "a")), {"role": A, "content": "b", "weight": weight}]
    assert check_messages(messages)[1] == {"role": A, "content": "b", **kept}


@pytest.mark.parametrize("role", ["developer", "function", "tool"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_roles_of_the_field_that_nothing_here_handles_are_named(role, place):
    messages = talk((U, "a"), (A, "b"), (U, "c"))
    messages[place]["role"] = role
    with pytest.raises(Skipped, match=f"^role {role}$"):
        check_messages(messages)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"content": None}, "no content"),
        ({"content": 7}, "content that is not text"),
        ({"role": None}, "no role"),
        ({"role": "User"}, "unknown role"),
        ({"tool_calls": [1]}, "tool calls"),
        ({"function_call": "x"}, "tool calls"),
    ],
)
def test_any_message_of_a_conversation_may_be_the_odd_one(place, change, reason):
    messages = talk((S, "s"), (U, "a"), (A, "b"), (U, "c"))
    messages[place] |= change
    with pytest.raises(Skipped, match=f"^{reason}$"):
        check_messages(messages)


def test_calls_that_are_none_are_passed_over():
    messages = talk((U, "a"), (A, "b"))
    messages[1] |= {"tool_calls": [], "function_call": None}
    assert check_messages(messages) == talk((U, "a"), (A, "b"))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (talk((U, "a"), (A, "b"), (U, "c"), (U, "d")), "two turns of one role"),
        (talk((S, "s"), (U, "a"), (A, "b"), (A, "c")), "two turns of one role"),
        (talk((U, "a"), (A, "b"), (S, "c")), "system message not first"),
        (talk((S, "s"), (S, "s")), "system message not first"),
    ],
)
def test_turns_further_on_are_looked_at_too(messages, reason):
    with pytest.raises(Skipped, match=f"^{reason}$"):
        check_messages(messages)


def test_the_first_reasoning_that_is_given_is_taken():
    for given, kept in (
        ({"reasoning_content": "1", "reasoning": "2", "thinking": "3"}, "1"),
        ({"reasoning": "2", "thinking": "3"}, "2"),
        ({"reasoning_content": None, "thinking": "3"}, "3"),
        ({"reasoning_content": " so \n"}, " so \n"),
    ):
        messages = talk((U, "a"), (A, "b"))
        messages[1] |= given
        assert check_messages(messages)[1]["reasoning"] == kept


def test_content_is_kept_as_it_is_and_parts_of_other_types_are_no_text():
    assert check_messages(talk((U, "  a \n"))) == talk((U, "  a \n"))
    for part in ({"type": "image_url", "text": "x"}, {"text": "x"}, {"type": "audio"}, [], 3):
        with pytest.raises(Skipped, match=r"^content that is not text$"):
            check_messages([{"role": U, "content": ["a", part]}])


@pytest.mark.parametrize("weight", [2, -1, "0", "1", 0.5, {}])
def test_weights_that_are_none(weight):
    messages = talk((U, "a"), (A, "b"))
    messages[1]["weight"] = weight
    with pytest.raises(Skipped, match=r"^weight is neither 0 nor 1$"):
        check_messages(messages)
    # Only of answers it is read.
    messages = talk((U, "a"), (A, "b"))
    messages[0]["weight"] = weight
    assert check_messages(messages) == talk((U, "a"), (A, "b"))


def test_a_false_weight_is_none_at_all():
    messages = talk((U, "a"), (A, "b"))
    messages[1]["weight"] = False
    assert check_messages(messages)[1] == {"role": A, "content": "b", "weight": 0}


def test_what_is_skipped_says_its_reason_and_what_another_program_said():
    plain, detailed = Skipped("no role"), Skipped("refused", "KeyError: 'x'")
    assert (str(plain), plain.reason, plain.detail) == ("no role", "no role", "")
    assert str(detailed) == "refused (KeyError: 'x')"
    assert (detailed.reason, detailed.detail) == ("refused", "KeyError: 'x'")
