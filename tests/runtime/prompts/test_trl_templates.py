"""All chat templates that the trl package ships, against a table of outcomes."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from runtime.prompts.conversation import Skipped, check_messages
from runtime.prompts.supervision import tokenise
from runtime.prompts.template import ChatTemplate, TemplateChoice
from tests.runtime.tiny_text import byte_tokenizer, supervised

FOLDER = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
TABLE = tomllib.loads(Path(__file__).with_name("trl_templates.toml").read_text(encoding="utf-8"))
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
BAR = "[|\uff5c]"
SPECIAL = re.compile(
    rf"<{BAR}[^|\uff5c<>\s]+{BAR}>|<end_of_utterance>|<(?:start|end)_of_turn>|<turn\|>"
)

ASK, ASK_MORE = ({"role": "user", "content": f"ask{i}"} for i in (1, 2))
SAY, SAY_MORE = ({"role": "assistant", "content": text} for text in ("say1 x", "say2 y"))
CONVERSATIONS = {
    "one": [ASK, SAY],
    "two": [ASK, SAY, ASK_MORE, SAY_MORE],
    "open": [ASK, SAY, ASK_MORE],
    "system": [{"role": "system", "content": "rule"}, ASK, SAY],
    "parts": [ASK, {**SAY, "content": [{"type": "text", "text": "say1 x"}]}],
    "weight": [ASK, {**SAY, "weight": 0}, ASK_MORE, SAY_MORE],
    "reasoning": [
        ASK,
        {**SAY, "reasoning_content": "think1"},
        ASK_MORE,
        {**SAY_MORE, "reasoning_content": "think2"},
    ],
}


@pytest.fixture(scope="module")
def tokenizer():
    """Bytes, and every special token that the templates write."""
    text = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.jinja"))
    tokenizer = byte_tokenizer(None)
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*SPECIAL.findall(text)})})
    return tokenizer


def expected(row, kind):
    """Texts of the supervised runs by the table."""
    earlier, last = row["ends"]
    before = row.get("before", "")
    thoughts = row.get("thoughts", [before, before])
    return {
        "one": [f"{before}say1 x{last}"],
        "two": [f"{before}say1 x{earlier}", f"{before}say2 y{last}"],
        "open": [],
        "system": [f"{before}say1 x{last}"],
        "parts": [f"{before}say1 x{last}"],
        "weight": [f"{before}say2 y{last}"],
        "reasoning": [f"{thoughts[0]}say1 x{earlier}", f"{thoughts[1]}say2 y{last}"],
    }[kind]


def test_the_table_has_every_template():
    assert sorted(TABLE) == NAMES
    assert len(NAMES) == 72


@pytest.mark.parametrize("name", NAMES)
def test_outcomes(name, tokenizer):
    row = TABLE[name]
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate.of(tokenizer, TemplateChoice(name, text=source))
    ends = {tokenizer.convert_tokens_to_ids(end[end.rindex("<") :]) for end in row["ends"] if end}
    for kind, messages in CONVERSATIONS.items():
        if kind in row.get("refuses", []):
            with pytest.raises(Skipped, match=f"^refused by chat template {name}"):
                tokenise(template, check_messages(messages), frozenset(ends))
            continue
        found = tokenise(template, check_messages(messages), frozenset(ends))
        assert supervised(tokenizer, found) == expected(row, kind), kind
        check_by_words(tokenizer, template, found, messages)
        unended = sum(text.endswith(("x", "y")) for text in expected(row, kind))
        assert found.notes[f"answers without an end token in {template.name}"] == unended


def check_by_words(tokenizer, template, found, messages):
    """What transformers itself renders is tokenised whole, and only the answers' words of it and
    thoughts are supervised."""
    whole = [{**m, "content": words(m)} for m in messages]
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in whole]
    text = tokenizer.apply_chat_template(
        parts if template.reads_parts else whole,
        tokenize=False,
        chat_template=template.source,
        add_generation_prompt=messages[-1]["role"] == "user",
    )
    assert tokenizer.decode(found.input_ids) == text
    learned = "".join(supervised(tokenizer, found))
    for word in ("ask1", "ask2", "rule"):
        assert word not in learned
    left_out = 0
    for message in messages:
        is_learned = message.get("weight") != 0 and messages[-1]["role"] == "assistant"
        if message["role"] == "assistant" and is_learned:
            assert text.count(words(message)) == learned.count(words(message)) == 1
        if "reasoning_content" in message:
            assert text.count(message["reasoning_content"]) == learned.count(
                message["reasoning_content"]
            )
            left_out += message["reasoning_content"] not in text
    assert found.notes[f"reasoning that {template.name} leaves out"] == left_out


def words(message):
    content = message["content"]
    return content if isinstance(content, str) else content[0]["text"]
