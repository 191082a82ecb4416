"""An answer of the target: how much of it repeats itself, and which limits a kept one serves."""

import hashlib
import json
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


def choose(
    kept: Iterable[Mapping[str, Any]], prompts: Sequence[Sequence[int]], limits: Sequence[int]
) -> dict[int, Answer]:
    """Of kept answers those that serve prompts; the first one of each.

    An answer that the model ended serves every limit that it fits; one that a limit cut serves that
    limit and any smaller one, as greedy answers only differ in where they stop.

    Args:
        kept: Of each answer ``prompt`` (its key), ``tokens`` and ``ended``.
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
