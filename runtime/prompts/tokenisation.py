"""Text into tokens, each with the character at which it begins."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Tokens(Protocol):
    """The tokens of a text, and where in them a character stands."""

    @property
    def ids(self) -> list[int]:
        """The N token ids."""
        ...

    def index(self, character: int) -> int:
        """The first token that begins at or behind a character; N where none does."""
        ...


def encode(tokenizer: Any, text: str) -> Tokens:
    """Tokenise a text as it stands: no special token is added, those written in it are read."""
    if not getattr(tokenizer, "is_fast", False):
        return _ByPrefix(tokenizer, text, token_ids(tokenizer, text))
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = list(found["input_ids"])
    begins: list[int] = []
    end = 0
    for token, (start, stop) in zip(
        tokenizer.convert_ids_to_tokens(ids), found["offset_mapping"], strict=True
    ):
        # Byte-level tokenizers may report a token without the spaces that it begins with.
        begins.append(end if start > end and token.startswith("\u0120") else start)
        end = max(end, stop)
    return _ByOffset(ids, begins)


def token_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text as it stands: no special token is added."""
    # A whole file may be one text: the length warning does not concern its pieces.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def bos_tokens(tokenizer: Any) -> list[int]:
    """What the tokenizer itself puts before a text: its BOS token, or nothing."""
    whole = list(tokenizer("a")["input_ids"])
    bare = token_ids(tokenizer, "a")
    starts = (i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[: next(starts, 0)]


def common_length(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common beginning of two texts or lists."""
    if a[: len(b)] == b:
        return len(b)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


@dataclass(frozen=True, slots=True)
class _ByOffset:
    ids: list[int]
    begins: list[int]
    """Ascending."""

    def index(self, character: int) -> int:
        return bisect.bisect_left(self.begins, character)


@dataclass(frozen=True, slots=True)
class _ByPrefix:
    """For tokenizers that report no offsets: the text up to a character is tokenised alone."""

    tokenizer: Any
    text: str
    ids: list[int]

    def index(self, character: int) -> int:
        alone = token_ids(self.tokenizer, self.text[:character])
        common = common_length(self.ids, alone)
        # Where the two differ, a token of the whole begins before the character and ends behind.
        return common + (common < len(alone))
