"""Compose many varied prompts out of the lists in examples/prompts/, for training data.

    python examples/compose_prompts.py --count 24000 build/prompts.jsonl

Every file there is a kind of request. A section ``[name]`` has an item a line, or between commas
where its header ends in one; ``{name}`` in an item stands for an item of that section, capitalised
for ``{Name}``, ``{3..9}`` for a number, and ``{x:name}`` for one that ``{x}`` repeats. Items of
``[ask]`` are the requests; " || " parts the turns of a conversation.

The draws are by counter: a smaller count gives the first lines of a larger one, on any machine.
None is close to one of examples/prompts.jsonl, written by hand: these are for held-out data.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from runtime.data.draws import raw_words

FOLDER = Path(__file__).parent / "prompts"
BY_HAND = Path(__file__).parent / "prompts.jsonl"
SHARES = {
    "facts": 16, "howto": 15, "writing": 12, "lists": 11, "language": 11, "talks": 11, "texts": 9,
    "code": 9, "advice": 9, "numbers": 9,
}  # fmt: skip
"""How often each kind is drawn, as parts of their sum."""
AS_WRITTEN = ("talks", "code")
"""Kinds that stay as they are; to others a sentence may be added, or their capitals taken."""
SLOT = re.compile(r"\{(?:(\w+):)?([A-Za-z]\w*|\d+\.\.\d+)\}")
VOWEL = re.compile(r"\b([Aa]) (?=(?!(?:and|in|if|is|or|uni\w*|use\w*|one)\b)(?:[aeiou]|honest))")
"""An article that wants an "n"."""
CLOSE = 0.6
"""Share of a prompt's word triples in one written by hand from which they are taken for close."""

Sections = dict[str, list[str]]


def read_sections(path: Path) -> Sections:
    """The sections of a file: name to items."""
    sections: Sections = {}
    items: list[str] = []
    between = None
    for line in path.read_text(encoding="utf-8").splitlines():
        header = re.fullmatch(r"\[(\w+)(,?)\]", line)
        if header:
            items = sections.setdefault(header[1], [])
            between = ", " if header[2] else None
        elif line and not line.startswith("#"):
            items += line.split(between) if between else [line]
    return sections


class Composer:
    """Draws prompts of all kinds."""

    def __init__(self) -> None:
        self._own = {path.stem: read_sections(path) for path in sorted(FOLDER.glob("*.txt"))}
        self._shared: Sections = {}
        for sections in (self._own["words"], *self._own.values()):
            self._shared = {**sections, **self._shared}
        self._kinds = [kind for kind, share in SHARES.items() for _ in range(share)]

    def turns(self, number: int, attempt: int) -> list[str]:
        """The turns of prompt ``number``; another ``attempt`` draws another one."""
        words = iter(raw_words(256, key=(1, 100), counter=(number, attempt, 0)).tolist())
        kind = self._kinds[next(words) % len(self._kinds)]
        draw = _Draw(self._shared | self._own[kind], words)
        text = VOWEL.sub(r"\1n ", draw.text("{ask}").replace("\\n", "\n"))
        if kind in AS_WRITTEN:
            return text.split(" || ")
        style = next(words) % 100
        if style < 8:
            text = f"{draw.text('{before}')} {text}"
        elif style < 30:
            text = f"{text} {draw.text('{after}')}"
        elif style < 40 and "\n" not in text and kind != "language":
            text = text.lower().removesuffix("?").removesuffix(".")
        return [text]


class _Draw:
    """One prompt's draws: no item twice of one section, and what is named stays."""

    def __init__(self, sections: Sections, words: Iterator[int]) -> None:
        self._sections = sections
        self._words = words
        self._named: dict[str, str] = {}
        self._used: set[str] = set()

    def text(self, pattern: str) -> str:
        """``pattern`` with all its slots filled."""
        return SLOT.sub(self._fill, pattern)

    def _fill(self, slot: re.Match[str]) -> str:
        label, name = slot[1], slot[2]
        key = name.lower()
        if key in self._named:
            text = self._named[key]
        else:
            text = self._number(name) if ".." in name else self._item(key)
        if label:
            self._named[label] = text
        return text[0].upper() + text[1:] if name[0].isupper() else text

    def _number(self, name: str) -> str:
        low, high = map(int, name.split(".."))
        return str(low + next(self._words) % (high - low + 1))

    def _item(self, name: str) -> str:
        items = self._sections[name]
        fresh = [item for item in items if item not in self._used] or items
        item = fresh[next(self._words) % len(fresh)]
        self._used.add(item)
        return self.text(item)


def triples(turns: Sequence[str]) -> set[tuple[str, ...]]:
    """The word triples of a prompt, or its words where it has fewer."""
    words = re.findall(r"\w+", " ".join(turns).lower())
    return {tuple(words[start : start + 3]) for start in range(max(1, len(words) - 2))}


def by_hand() -> list[set[tuple[str, ...]]]:
    """The word triples of each prompt that was written by hand."""
    records = map(json.loads, BY_HAND.read_text(encoding="utf-8").splitlines())
    talks = (record.get("messages") or [{"content": record["prompt"]}] for record in records)
    return [triples([turn["content"] for turn in talk]) for talk in talks]


def compose(number: int) -> list[list[str]]:
    """``number`` different prompts, each a list of turns, the user's first and last."""
    composer, written = Composer(), by_hand()
    anywhere = set().union(*written)
    seen: set[str] = set()
    prompts = []

    def is_close(turns: list[str]) -> bool:
        own = triples(turns)
        if len(own & anywhere) < CLOSE * len(own):
            return False
        return any(len(own & other) >= CLOSE * len(own) for other in written)

    for index in range(number):
        for attempt in count():
            turns = composer.turns(index, attempt)
            plain = " ".join(re.findall(r"\w+", " ".join(turns).lower()))
            if plain not in seen and not is_close(turns):
                break
        seen.add(plain)
        prompts.append(turns)
    return prompts


def record(turns: Sequence[str]) -> dict[str, object]:
    """A prompt as a line of a prompt file."""
    if len(turns) == 1:
        return {"prompt": turns[0]}
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turns[i]} for i in range(len(turns))]}


def at_least_one(text: str) -> int:
    """A number of prompts."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {number}")
    return number


def main() -> None:
    """Write the prompts as JSONL."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="where to write them; a file there is replaced")
    parser.add_argument(
        "--count", type=at_least_one, default=24000, help="how many prompts (default: %(default)s)"
    )
    options = parser.parse_args()
    file = options.file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replaced = file.exists()
        # Before the prompts are composed, which takes a while, and without emptying it.
        file.open("a").close()
        lines = [json.dumps(record(turns)) for turns in compose(options.count)]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        parser.error(f"{file} cannot be written ({error.strerror})")
    print(f"{len(lines)} prompts in {file}" + (", replaced" if replaced else ""))


if __name__ == "__main__":
    main()
