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
