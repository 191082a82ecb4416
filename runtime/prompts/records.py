"""Prompt files into records: conversations, prompts, and plain text.

A file that cannot be read is refused by name. Within one that can, a line or value that is no
record is counted with its place and its reason, and left out; it never stops a run.
"""

import hashlib
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError
from runtime.prompts.conversation import MESSAGE_KEYS
from runtime.prompts.counts import Counts, shown
from runtime.prompts.pieces import Piece
from runtime.prompts.readers import UnreadableError, find_reader

FORMS = "must be JSON Lines, a JSON array or plain text, each as it is or gzipped"
ANSWERS = ("completion", "response", "answer")
"""Keys of an answer that is given beside a prompt."""
DEEPEST = 32
"""Levels of lists and objects within the messages of a record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFile:
    """A file as it was read, once."""

    path: Path
    content: bytes
    sha256: str
    """Of the content, in hex."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A conversation to learn from or to answer, or a whole plain text: one of the two."""

    source: str
    """``path:line`` or ``path``, for messages."""
    file: int = 0
    """Which of the files it is from."""
    messages: Any = None
    """The value of ``messages``, unchecked but for depth and encoding; a ``prompt``, and the answer
    given with it, become messages."""
    text: str | None = None
    """A whole plain text, lines ended by LF."""


def open_prompts(paths: Sequence[str | Path]) -> list[PromptFile]:
    """Read prompt files whole, in the order given.

    Raises:
        ConfigError: One is not there, no file, or may not be read.
    """
    return [_open(Path(path)) for path in paths]


def read_records(files: Sequence[PromptFile], counts: Counts) -> list[Record]:
    """Take prompt files apart, whatever their names are.

    Args:
        files: From ``open_prompts``.
        counts: What is left out is added to it.

    Raises:
        ConfigError: A file is of a format that is not read; raised before any is taken apart.
    """
    opened = []
    for file in files:
        try:
            opened.append(find_reader(file.content))
        except UnreadableError as error:
            raise ConfigError("data.prompts", str(file.path), f"{FORMS}, {error}") from error
    records = []
    for index, (file, (reader, content)) in enumerate(zip(files, opened, strict=True)):
        assert reader.read is not None, "find_reader refuses others"
        # A name may have bytes that are no UTF-8, and the places are printed.
        name = str(file.path).encode("utf-8", "backslashreplace").decode()
        for piece in reader.read(content):
            source = name if piece.line is None else f"{name}:{piece.line}"
            try:
                records.append(_record(piece, source, index, counts))
            except _LeftOutError as error:
                counts.drop(error.reason, source, error.detail)
    return records


class _LeftOutError(Exception):
    """A piece is no record."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


def _open(path: Path) -> PromptFile:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ConfigError("data.prompts", str(path), "is a folder; name the files in it")
        # Reading a pipe waits for its writer, and a device may never end.
        if not stat.S_ISREG(mode):
            raise ConfigError("data.prompts", str(path), "is a pipe or device; write it to a file")
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        found = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            "data.prompts", str(path), f"must be a readable file ({found})"
        ) from error
    return PromptFile(path=path, content=content, sha256=hashlib.sha256(content).hexdigest())


def _record(piece: Piece, source: str, file: int, counts: Counts) -> Record:
    if piece.reason is not None:
        raise _LeftOutError(piece.reason, piece.detail)
    if piece.text is not None:
        if not piece.text.strip():
            raise _LeftOutError("empty file")
        return Record(source=source, file=file, text=piece.text)
    value = piece.value
    if not isinstance(value, dict) or not ("messages" in value or "prompt" in value):
        raise _LeftOutError("neither messages nor prompt", f"found {_described(value)}")
    read, messages = _messages(value)
    _check(messages)
    within = {
        f"messages.{key}": None
        for message in (messages if isinstance(messages, list) else [])
        if isinstance(message, dict)
        for key in message
        if key not in MESSAGE_KEYS
    }
    counts.note_unread([*(key for key in value if key not in read), *within])
    return Record(source=source, file=file, messages=messages)


def _messages(value: Mapping[str, Any]) -> tuple[set[str], Any]:
    """The keys that are read, and the conversation that they hold."""
    if "messages" in value:
        return {"messages"}, value["messages"]
    messages = _turns(value["prompt"], "user", "prompt")
    given = [key for key in ANSWERS if value.get(key) is not None]
    if len(given) > 1:
        raise _LeftOutError("more than one answer", f"found {' and '.join(given)}")
    for key in given:
        messages = messages + _turns(value[key], "assistant", "answer")
    # A key that is null asks for an answer.
    return {"prompt", *ANSWERS}, messages


def _turns(value: Any, role: str, what: str) -> list[Any]:
    """Messages as they are, or a text as one message."""
    if isinstance(value, list) and value:
        return value
    if isinstance(value, str) and value.strip():
        return [{"role": role, "content": value}]
    if value is None or value in ("", []) or isinstance(value, str):
        raise _LeftOutError(f"empty {what}")
    raise _LeftOutError(f"{what} is neither text nor messages", f"found {_described(value)}")


def _check(value: Any, depth: int = 0) -> None:
    """Refuse what would break later on: half a surrogate pair, lists in lists without end."""
    if depth > DEEPEST:
        raise _LeftOutError("nested too deeply")
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise _LeftOutError("text not UTF-8", "half a surrogate pair") from error
    elif isinstance(value, list):
        for item in value:
            _check(item, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check(key, depth)
            _check(item, depth + 1)


def _described(value: Any) -> str:
    if isinstance(value, dict):
        return f"keys {shown(', '.join(map(str, value)))}" if value else "no keys"
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
