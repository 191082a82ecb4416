"""Conversations into tokens and a loss mask, through any tokenizer's chat template.

The answers alone are supervised, each with the end token that the model has to produce. Where a
template marks answers with generation tags, the tags decide. Elsewhere the template is rendered
up to each answer and past it, and the tokens in which the two differ are the answer: no marker is
searched for, so text that looks like one cannot mislead.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""For tokenizers of base models, which have no template of their own."""

ROLES = ("system", "user", "assistant")
GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")


class Skipped(Exception):
    """A conversation cannot be a sample; ``reason`` is what it is counted under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Conversation:
    """A tokenised conversation of S tokens."""

    input_ids: list[int]
    loss_mask: list[int]
    """1 on the tokens of answers, as long as ``input_ids``."""


def check_messages(messages: Any) -> list[dict[str, str]]:
    """Check that a conversation can be trained on.

    An optional system message comes first, then user and assistant take turns, the user first.

    Returns:
        The messages, with role and content only.

    Raises:
        Skipped: With the reason: no messages, no role, unknown role, no content, system message
            not first, no user message, starts with assistant, or two turns of one role.
    """
    if not isinstance(messages, list) or not messages:
        raise Skipped("no messages")
    checked = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise Skipped("no role")
        if message["role"] not in ROLES:
            raise Skipped("unknown role")
        content = message.get("content")
        if not isinstance(content, str) or not content.strip():
            raise Skipped("no content")
        checked.append({"role": message["role"], "content": content})
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


def prompt_tokens(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Tokens of a conversation that ends with the user, up to where the answer begins.

    Raises:
        Skipped: The template refuses the conversation.
    """
    return _encode(tokenizer, _render(tokenizer, messages, answer_next=True))


def conversation_tokens(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], eos_token_ids: frozenset[int]
) -> Conversation:
    """Tokens and loss mask of a conversation that has its answers already.

    An answer is supervised up to its first end token; what a template puts after that (a line
    break, say) is not, as the model never produces it. A template that rewrites earlier turns once
    later ones follow leaves those earlier answers unsupervised.

    Args:
        tokenizer: With or without a chat template.
        messages: As ``check_messages`` returns them.
        eos_token_ids: Tokens that end an answer.

    Raises:
        Skipped: The template refuses the conversation, or no token is supervised.
    """
    if GENERATION_TAG.search(_template(tokenizer) or ""):
        conversation = _from_tags(tokenizer, messages)
    else:
        conversation = _from_prefixes(tokenizer, messages, eos_token_ids)
    if not any(conversation.loss_mask):
        raise Skipped("unsupervised")
    return conversation


def _from_tags(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> Conversation:
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except (jinja2.TemplateError, KeyError, TypeError, ValueError) as error:
        raise Skipped("template refuses it") from error
    return Conversation(list(encoded["input_ids"]), [int(m) for m in encoded["assistant_masks"]])


def _from_prefixes(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], eos_token_ids: frozenset[int]
) -> Conversation:
    text = _render(tokenizer, messages)
    ids = _encode(tokenizer, text)
    loss_mask = [0] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:turn], answer_next=True)
        after = _render(tokenizer, messages[: turn + 1])
        if not (text.startswith(after) and after.startswith(before)):
            continue
        start = _common(ids, _encode(tokenizer, before))
        for position in range(start, _common(ids, _encode(tokenizer, after))):
            loss_mask[position] = 1
            if ids[position] in eos_token_ids:
                break
    return Conversation(ids, loss_mask)


def _template(tokenizer: Any) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    return template.get("default") if isinstance(template, dict) else template


def _render(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], *, answer_next: bool = False
) -> str:
    options = {} if _template(tokenizer) else {"chat_template": PLAIN_TEMPLATE}
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=answer_next, **options
        )
    except (jinja2.TemplateError, KeyError, TypeError, ValueError) as error:
        raise Skipped("template refuses it") from error
    return text


def _encode(tokenizer: Any, text: str) -> list[int]:
    # The template has written the special tokens already.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return min(len(a), len(b))
