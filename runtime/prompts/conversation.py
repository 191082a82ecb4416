"""Conversations: what may be trained on, message by message.

What cannot be is counted by reason and left out. Content becomes one text: the text parts of a
list are joined with nothing between, as the templates that read parts themselves write them.
"""

import itertools
from collections.abc import Mapping
from typing import Any

ROLES = ("system", "user", "assistant")
OTHER_ROLES = ("developer", "function", "tool")
"""Known in the field; no part of this project handles them yet."""
TEXT_PARTS = ("text", "input_text", "output_text")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names under which records and templates know an answer's reasoning."""
MESSAGE_KEYS = {"role", "content", "weight", "tool_calls", "function_call", *REASONING_KEYS}
"""What is read of a message."""


class Skipped(Exception):
    """A conversation cannot be a sample; ``reason`` is what it is counted under.

    ``detail`` is what someone else's program said of it.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        self.detail = detail


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Check that a conversation can be trained on.

    An optional system message comes first, then user and assistant take turns, the user first.

    Returns:
        The messages: ``role`` and ``content``, and for an answer that has them ``reasoning`` (the
        text before the answer) and ``weight`` 0 (not to be supervised).

    Raises:
        Skipped: With the reason.
    """
    if not isinstance(messages, list) or not messages:
        raise Skipped("no messages")
    checked = [_check_message(message) for message in messages]
    roles = [message["role"] for message in checked]
    if "system" in roles[1:]:
        raise Skipped("system message not first")
    turns = roles[1:] if roles[0] == "system" else roles
    if not turns:
        raise Skipped("no user message")
    if turns[0] == "assistant":
        raise Skipped("starts with assistant")
    if any(a == b for a, b in itertools.pairwise(turns)):
        raise Skipped("two turns of one role")
    return checked


def _check_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Skipped("no role")
    role = message["role"]
    if role in OTHER_ROLES:
        raise Skipped(f"role {role}")
    if role not in ROLES:
        raise Skipped("unknown role")
    if message.get("tool_calls") or message.get("function_call"):
        raise Skipped("tool calls")
    checked = {"role": role, "content": _text(message.get("content"))}
    if not checked["content"].strip():
        raise Skipped("no content")
    if role == "assistant":
        given = (message[key] for key in REASONING_KEYS if message.get(key) is not None)
        reasoning = _text(next(given, None))
        if reasoning.strip():
            checked["reasoning"] = reasoning
        weight = message.get("weight")
        if weight not in (None, 0, 1):
            raise Skipped("weight is neither 0 nor 1")
        if weight == 0:
            checked["weight"] = 0
    return checked


def _text(content: Any) -> str:
    """Content as one text, empty when there is none."""
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        if isinstance(part, Mapping):
            part = part.get("text") if part.get("type") in TEXT_PARTS else part
        if part is not None and not isinstance(part, str):
            raise Skipped("content that is not text")
        texts.append(part or "")
    text = "".join(texts)
    try:
        text.encode()
    except UnicodeEncodeError:
        # A JSON string may hold half of a surrogate pair; no tokenizer takes it.
        raise Skipped("content that is not Unicode text") from None
    return text
