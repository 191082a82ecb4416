"""An answer of the target: how much of it repeats itself, and which limits a kept one serves.

A kept one is a JSON object: ``prompt``, its key; ``tokens``; and ``ended``.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to one prompt of P tokens."""

    token_ids: list[int]
    """A tokens; the last is an end token when ``ended``."""
    ended: bool
    """Whether the model ended it; otherwise its limit did."""


def distinct_share(token_ids: Sequence[int], n: int = 4) -> float:
    """Share of an answer's n-grams that are distinct; 1.0 for fewer than n tokens."""
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def prompt_key(prompt: Sequence[int]) -> str:
    """What kept answers know a prompt by: the SHA-256 of its token ids."""
    return hashlib.sha256(json.dumps(list(prompt)).encode()).hexdigest()


class UnusableAnswersError(Exception):
    """Why kept answers are not taken."""


def check_kept(kept: object, vocab_size: int) -> list[dict[str, Any]]:
    """Kept answers as they were read, each one checked: a seal does not show what it seals.

    Args:
        kept: A list of them.
        vocab_size: Of the target; token ids are below it.

    Raises:
        UnusableAnswersError: One is not as this module has it; the first is named, from 1.
    """
    if not isinstance(kept, list):
        raise UnusableAnswersError(f"found {kept!r:.40}, expected a list of answers")
    for number, one in enumerate(kept, start=1):
        wrong = _unlike_kept(one, vocab_size)
        if wrong is not None:
            raise UnusableAnswersError(f"record {number}: {wrong}")
    return kept


def _unlike_kept(one: object, vocab_size: int) -> str | None:
    """What of a kept answer was found and what was expected; None where it is as it should be."""
    if not isinstance(one, dict):
        return f"found {one!r:.40}, expected an object"
    missing = [name for name in ("prompt", "tokens", "ended") if name not in one]
    if missing:
        return f"found no {missing[0]!r}, expected one"
    prompt, tokens, ended = one["prompt"], one["tokens"], one["ended"]
    if not (isinstance(prompt, str) and re.fullmatch("[0-9a-f]{64}", prompt)):
        return f"found prompt = {prompt!r:.40}, expected a SHA-256 in small hex digits"
    if not isinstance(ended, bool):
        return f"found ended = {ended!r:.40}, expected true or false"
    if not isinstance(tokens, list):
        return f"found tokens = {tokens!r:.40}, expected a list of token ids"
    for place, token in enumerate(tokens):
        # A bool is an int of Python's, and none of JSON's.
        if type(token) is not int or not 0 <= token < vocab_size:
            ids = f"a token id of the target, 0 to {vocab_size - 1}"
            return f"found tokens[{place}] = {token!r:.40}, expected {ids}"
    return None


def choose(
    kept: Iterable[Mapping[str, Any]], prompts: Sequence[Sequence[int]], limits: Sequence[int]
) -> dict[int, Answer]:
    """Of kept answers those that serve prompts; the first one of each.

    An answer that the model ended serves every limit that it fits; one that a limit cut serves that
    limit and any smaller one, as greedy answers only differ in where they stop.

    Args:
        kept: Checked ones, see ``check_kept``.
        prompts: Token ids of each.
        limits: Longest answer of each, in tokens.

    Returns:
        Answers by the number of the prompt.
    """
    wanted: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        wanted.setdefault(prompt_key(prompt), []).append(index)
    found: dict[int, Answer] = {}
    for one in kept:
        for index in wanted.get(one["prompt"], ()):
            answer = _within(one["tokens"], one["ended"], limits[index])
            if answer is not None:
                found.setdefault(index, answer)
    return found


def _within(tokens: list[int], ended: bool, limit: int) -> Answer | None:
    """The answer that this limit would have given; None where it would have been longer."""
    if len(tokens) > limit:
        return Answer(token_ids=tokens[:limit], ended=False)
    return Answer(token_ids=tokens, ended=ended) if ended or len(tokens) == limit else None
