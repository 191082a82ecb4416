"""Conversations into text, as a server of the target renders them.

One value, made from the tokenizer and the run's choice, renders for data, evaluation and
generation alike. The choice is ``[data] chat_template`` and ``[data] template``; it is part of the
data's key, stands in their ``meta.json`` and goes along with an exported drafter.
"""

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from runtime.errors import ConfigError
from runtime.prompts.conversation import REASONING_KEYS, Skipped
from runtime.prompts.tokenisation import bos_tokens

TARGET, PLAIN = "target", "plain"
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For targets without a template of their own, when it is asked for. A prompt ends without the
space that follows it: most tokenizers make the space part of the answer's first word."""

GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")


@dataclass(frozen=True, slots=True)
class TemplateChoice:
    """Which template, with which keywords: plain data, equal where the rendering is."""

    chat_template: str = TARGET
    """``target``, ``plain``, or the name of a jinja file."""
    keywords: Mapping[str, Any] | None = None
    """Passed to the template with every conversation."""
    text: str | None = None
    """The template itself where it is from a file."""

    @classmethod
    def read(cls, chat_template: str, keywords: Mapping[str, Any]) -> "TemplateChoice":
        """Take the settings ``data.chat_template`` and ``data.template``.

        Raises:
            ConfigError: The template is a file that cannot be read.
        """
        if chat_template in (TARGET, PLAIN):
            return cls(chat_template, dict(keywords))
        try:
            text = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                "data.chat_template",
                chat_template,
                f"must be {TARGET}, {PLAIN} or a readable jinja file ({error})",
            ) from error
        return cls(Path(chat_template).name, dict(keywords), text)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "TemplateChoice":
        """Take what ``as_dict`` returned.

        Raises:
            ConfigError: It is something else.
        """
        try:
            choice = cls(saved["chat_template"], dict(saved["keywords"]), saved.get("text"))
            own = choice.text is None and choice.chat_template in (TARGET, PLAIN)
            whole = choice.as_dict() == saved and (own or isinstance(choice.text, str))
        except (KeyError, TypeError, ValueError):
            whole = False
        if not whole:
            raise ConfigError("template", saved, "must be as runtime.prepare writes it")
        return choice

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        text = {} if self.text is None else {"text": self.text}
        return {"chat_template": self.chat_template, "keywords": dict(self.keywords or {}), **text}

    def with_keywords(self, keywords: Mapping[str, Any]) -> "TemplateChoice":
        """The same template, with these keywords set over its own."""
        return replace(self, keywords={**(self.keywords or {}), **keywords})


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """Renders conversations for one tokenizer."""

    tokenizer: Any
    source: str
    """Jinja."""
    name: str
    """For messages and counts."""
    keywords: Mapping[str, Any]
    bos: tuple[int, ...] = ()
    """Tokens before the text: a template writes its special tokens itself, the plain form has the
    tokenizer's BOS."""
    reads_parts: bool = False
    """Whether it renders content as a list of parts only."""

    @classmethod
    def of(cls, tokenizer: Any, choice: TemplateChoice) -> "ChatTemplate":
        """Find the template, and check it and the keywords.

        Raises:
            ConfigError: The target has no chat template and the plain form is not asked for, the
                template is not jinja, or it reads no such keyword.
        """
        keywords = dict(choice.keywords or {})
        bos: tuple[int, ...] = ()
        if choice.text is not None:
            source, name = choice.text, f"chat template {choice.chat_template}"
        elif choice.chat_template == PLAIN:
            source, name, bos = PLAIN_TEMPLATE, "the plain form", tuple(bos_tokens(tokenizer))
        else:
            source, name = _own_template(tokenizer), "the target's chat template"
        _check_keywords(keywords, _variables(source, choice.chat_template), name)
        template = cls(tokenizer=tokenizer, source=source, name=name, keywords=keywords, bos=bos)
        parts = replace(template, reads_parts=True)
        return parts if parts._shows_users() and not template._shows_users() else template

    @property
    def has_generation_tags(self) -> bool:
        """Whether the template marks what the model writes."""
        return GENERATION_TAG.search(self.source) is not None

    def render(self, messages: Sequence[Mapping[str, Any]], *, answer_next: bool = False) -> str:
        """The text of a conversation.

        Args:
            messages: As ``check_messages`` returns them.
            answer_next: Whether it ends where an answer begins.

        Raises:
            Skipped: The template refuses the conversation.
        """
        return self.render_tagged(messages, answer_next=answer_next)[0]

    def render_tagged(
        self, messages: Sequence[Mapping[str, Any]], *, answer_next: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the characters [start, stop) within generation tags.

        Raises:
            Skipped: The template refuses the conversation.
        """
        # Data that are up to date are told without transformers, whose import takes a second.
        from transformers.utils.chat_template_utils import render_jinja_template

        options = {**self.tokenizer.special_tokens_map, **self.keywords}
        try:
            texts, tagged = render_jinja_template(
                conversations=[[self._shown(message) for message in messages]],
                chat_template=self.source,
                return_assistant_tokens_mask=self.has_generation_tags,
                add_generation_prompt=answer_next,
                **options,
            )
        except Exception as error:
            # A template is a program of someone else's: it may raise anything.
            reason = f"refused by {self.name}"
            raise Skipped(reason, f"{type(error).__name__}: {error}") from error
        return str(texts[0]), [tuple(span) for span in tagged[0]] if tagged else []

    def _shown(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message["content"]
        parts = [{"type": "text", "text": content}]
        shown = {"role": message["role"], "content": parts if self.reads_parts else content}
        reasoning = message.get("reasoning")
        return shown if reasoning is None else {**shown, **dict.fromkeys(REASONING_KEYS, reasoning)}

    def _shows_users(self) -> bool:
        mark = "\ue000"
        try:
            return mark in self.render([{"role": "user", "content": mark}], answer_next=True)
        except Skipped:
            return False


def _own_template(tokenizer: Any) -> str:
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, Mapping):
        if "default" not in found:
            raise ConfigError(
                "data.chat_template",
                TARGET,
                f"the target's templates are named {', '.join(sorted(found))} and none default; "
                "write the one to use to a file and name that",
            )
        found = found["default"]
    if not isinstance(found, str) or not found:
        raise ConfigError(
            "data.chat_template",
            TARGET,
            f'the target has no chat template; set it to "{PLAIN}" for the plain form, or to a '
            "jinja file",
        )
    return found


class _GenerationTag(Extension):
    """Parses generation tags, which mean nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _variables(source: str, chat_template: str) -> set[str]:
    """Names that a template reads and does not set itself.

    Raises:
        ConfigError: It is not jinja.
    """
    environment = jinja2.Environment(extensions=[_GenerationTag, loopcontrols])
    try:
        return meta.find_undeclared_variables(environment.parse(source))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            "data.chat_template", chat_template, f"must be jinja (line {error.lineno}: {error})"
        ) from error


def _check_keywords(keywords: Mapping[str, Any], known: set[str], name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    # The rendering passes these itself.
    reserved = {"messages", *inspect.signature(render_jinja_template).parameters}
    for key, value in keywords.items():
        if key in reserved:
            raise ConfigError(f"data.template.{key}", value, "is set with each conversation")
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"data.template.{key}", value, f"{name} reads no such name{hint}")
