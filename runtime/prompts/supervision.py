"""Which tokens of a conversation are learned: its answers, with the end tokens.

An answer is found from its own text. The conversation is rendered, and rendered again with a mark
in the answer's place: what the two share before and behind is not the answer. That holds where a
template strips an answer, rewrites earlier turns, or renders a prompt that is no beginning of the
whole, and text that looks like a marker cannot mislead it.

An answer begins where the prompt that a server sends ends, if that is a beginning of the
conversation: markup between the two, and reasoning that the template renders, is what the model
itself writes. An empty thought there, which no model wrote, is left out. It ends with the first
end token that follows its text, before the next message's text. Where a template has generation
tags, what it leaves outside of them is not learned, but for the end token.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.prompts.conversation import Skipped
from runtime.prompts.template import ChatTemplate
from runtime.prompts.tokenisation import Tokens, common_length, encode

Span = tuple[int, int]
"""Characters [start, stop) of a rendering."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A tokenised conversation of S tokens."""

    input_ids: list[int]
    loss_mask: list[int]
    """1 on the tokens of answers, as long as ``input_ids``."""
    notes: Counter[str] = field(default_factory=Counter)
    """What stays unsupervised -> how often."""


def tokenise(
    template: ChatTemplate, messages: Sequence[Mapping[str, Any]], eos_token_ids: frozenset[int]
) -> Conversation:
    """Tokens and loss mask of a conversation.

    One that ends with the user is rendered up to where the answer begins, and nothing of it is
    supervised: the target's own answer will be, and those before it are what it was given. A token
    belongs to an answer when it begins within it: one that begins before belongs to the prompt, as
    the model is not asked for it.

    Args:
        template: Renders it.
        messages: As ``check_messages`` returns them.
        eos_token_ids: Tokens that end an answer.

    Raises:
        Skipped: The template refuses the conversation or leaves its open question out, or no token
            of one that ends with an answer is supervised.
    """
    rendering = _Rendering(template, messages)
    if rendering.is_open and not rendering.shows(len(messages) - 1):
        raise Skipped(f"question that {template.name} leaves out")
    tokens = encode(template.tokenizer, rendering.text)
    loss_mask = [0] * len(tokens.ids)
    notes: Counter[str] = Counter()
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if rendering.is_open:
            notes["given answers before an open question"] += 1
        elif message.get("weight") == 0:
            notes["answers of weight 0"] += 1
        else:
            _supervise(rendering, turn, tokens, eos_token_ids, loss_mask, notes)
    if not rendering.is_open and not any(loss_mask):
        raise Skipped(
            "every answer has weight 0"
            if notes.total() == notes["answers of weight 0"]
            else f"no answer supervised through {template.name}"
        )
    before = [0] * len(template.bos)
    return Conversation([*template.bos, *tokens.ids], before + loss_mask, notes)


def _supervise(
    rendering: "_Rendering",
    turn: int,
    tokens: Tokens,
    eos_token_ids: frozenset[int],
    loss_mask: list[int],
    notes: Counter[str],
) -> None:
    name = rendering.template.name
    own = rendering.content(turn)
    thought = rendering.reasoning(turn)
    if "reasoning" in rendering.messages[turn] and thought is None:
        notes[f"reasoning that {name} leaves out"] += 1
    if own is None:
        notes[f"answers that {name} leaves out or repeats"] += 1
        return
    start, stop = rendering.begin(turn, own, thought), own[1]
    tagged = rendering.tagged or [(start, stop)]
    spans = [(max(a, start), min(b, stop)) for a, b in tagged if a < stop and b > start]
    learned = [range(tokens.index(a), tokens.index(b)) for a, b in spans]
    if max((b for _, b in spans), default=0) <= own[0] or not any(learned):
        notes[f"answers that {name} leaves unsupervised"] += 1
        return
    for part in learned:
        loss_mask[part.start : part.stop] = [1] * len(part)
    behind = tokens.index(stop)
    limit = tokens.index(rendering.limit(turn))
    ends = (i for i in range(behind, limit) if tokens.ids[i] in eos_token_ids)
    end_token = next(ends, None)
    if end_token is None:
        notes[f"answers without an end token in {name}"] += 1
    else:
        loss_mask[behind : end_token + 1] = [1] * (end_token + 1 - behind)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a rendering differs from one with a mark in place of a text."""

    start: int
    stop: int
    left: bool
    """Whether the text begins at ``start``; it may begin later."""
    right: bool
    """Whether the text ends at ``stop``; it may end before."""
    once: bool
    """Whether it stands there once."""


class _Rendering:
    """A rendered conversation, and where its messages stand in it."""

    def __init__(self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]]) -> None:
        self.template = template
        self.messages = messages
        self.is_open = messages[-1]["role"] != "assistant"
        self.text, self.tagged = template.render_tagged(messages, answer_next=self.is_open)
        unused = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in self.text)
        self._marks = next(unused), next(unused)
        self._found: dict[tuple[int, str], _Place | None] = {}

    def shows(self, turn: int) -> bool:
        """Whether a message's own text is written at all."""
        return self._find(turn, "content") is not None

    def content(self, turn: int) -> Span | None:
        """A message's own text; None where the template leaves it out or writes it repeatedly."""
        return self._text(turn, "content")

    def reasoning(self, turn: int) -> Span | None:
        """An answer's reasoning; None where there is none or the template leaves it out."""
        return self._text(turn, "reasoning") if "reasoning" in self.messages[turn] else None

    def floor(self, turn: int) -> int:
        """Where the text of the messages before ends, or further on."""
        places = (self._find(earlier, "content") for earlier in reversed(range(turn)))
        return next((place.stop for place in places if place), 0)

    def limit(self, turn: int) -> int:
        """Where the text of the messages behind begins, or before."""
        places = (self._find(t, "content") for t in range(turn + 1, len(self.messages)))
        return next((place.start for place in places if place), len(self.text))

    def begin(self, turn: int, own: Span, thought: Span | None) -> int:
        """Where the model begins to write an answer."""
        floor = self.floor(turn)
        prompt = self._try(self.messages[:turn], answer_next=True)
        if prompt and self.text.startswith(prompt) and floor <= len(prompt) < own[1]:
            between = self.text[len(prompt) : own[0]]
            if thought or not self._is_empty_thought(turn, prompt, between):
                return len(prompt)
        return max(floor, min(own[0], thought[0])) if thought else own[0]

    def _is_empty_thought(self, turn: int, prompt: str, between: str) -> bool:
        """Whether reasoning would stand in markup that is all there is ``between``."""
        if not between.strip():
            return False
        content, reasoning = self._marks
        answer = {"role": "assistant", "content": content, "reasoning": reasoning}
        text = self._try([*self.messages[:turn], answer])
        shown = text.removeprefix(prompt).partition(content)[0]
        return reasoning in shown and _squeezed(shown.replace(reasoning, "")) == _squeezed(between)

    def _text(self, turn: int, key: str) -> Span | None:
        place = self._find(turn, key)
        if place is None or not place.once:
            return None
        # Where a template decides by the text, more than the text differs from its mark: that must
        # not reach into other messages, and the text may stand at its edge as it is.
        start = place.start if place.left else max(place.start, self.floor(turn))
        stop = place.stop if place.right else min(place.stop, self.limit(turn))
        text = self.messages[turn][key].strip()
        if not place.left and self.text[start:stop].endswith(text):
            start = stop - len(text)
        if not place.right and self.text[start:stop].startswith(text):
            stop = start + len(text)
        return (start, stop) if start < stop else None

    def _find(self, turn: int, key: str) -> _Place | None:
        if (turn, key) not in self._found:
            self._found[turn, key] = self._compare(turn, key)
        return self._found[turn, key]

    def _compare(self, turn: int, key: str) -> _Place | None:
        """Compare the rendering with one that has a mark, as long as the text, in its place."""
        mark = self._marks[0]
        message = self.messages[turn]
        marked = [*self.messages]
        marked[turn] = {**message, key: mark * len(message[key].strip())}
        text = self._try(marked, answer_next=self.is_open)
        if mark not in text:
            return None
        before, behind = text[: text.index(mark)], text[text.rindex(mark) + 1 :]
        start = common_length(self.text, before)
        stop = len(self.text) - common_length(self.text[::-1], behind[::-1])
        return _Place(
            start=start,
            stop=stop,
            left=start == len(before),
            right=len(self.text) - stop == len(behind),
            once=text.count(mark) == len(text) - len(before) - len(behind),
        )

    def _try(self, messages: Sequence[Mapping[str, Any]], *, answer_next: bool = False) -> str:
        """A rendering for comparison; empty where the template refuses it."""
        try:
            return self.template.render(messages, answer_next=answer_next)
        except Skipped:
            return ""


def _squeezed(text: str) -> str:
    return "".join(text.split())
