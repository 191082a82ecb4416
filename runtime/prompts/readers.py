"""What a prompt file is, found from its first bytes, and the reader that takes it apart.

``READERS`` is asked in order; names and suffixes count for nothing. An entry reads, unwraps to
another file, or only knows its format, which is then refused by name. A format is added by adding
an entry.
"""

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from runtime.prompts.json_values import is_json, is_json_lines, read_json, read_json_lines
from runtime.prompts.pieces import BOM, Piece

HEAD = 1 << 20
"""Bytes of a file, less leading white space, that show its format."""
TABLE_ROWS = 50
CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a]")
"""Bytes that no text has; tab, line ends, form feed and escape are left out."""
COLUMNS = {
    "answer", "completion", "content", "conversations", "instruction", "input", "label", "messages",
    "output", "prompt", "question", "response", "target", "text",
}  # fmt: skip
"""Names that a table's header is known by."""


class UnreadableError(ValueError):
    """A file as a whole cannot be read: what was found, and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """One format."""

    name: str
    matches: Callable[[bytes], bool]
    """Whether a file with these first bytes is of the format."""
    read: Callable[[bytes], Iterable[Piece]] | None = None
    """Takes a whole file apart; whatever is in it, it raises nothing."""
    unwrap: Callable[[bytes], bytes] | None = None
    """Returns the file within; raises ``UnreadableError`` where it is damaged."""
    advice: str = ""
    """What to do with a format that is known and not read."""


def find_reader(content: bytes) -> tuple[Reader, bytes]:
    """The reader of a file, and the content that it reads.

    Args:
        content: The file's bytes.

    Raises:
        UnreadableError: Nothing here reads the file.
    """
    for _ in range(3):
        content = content.removeprefix(BOM)
        head = content[:HEAD]
        if head.isspace():
            head = content.lstrip()[:HEAD]
        reader = next(reader for reader in READERS if reader.matches(head))
        if reader.unwrap is None:
            break
        content = reader.unwrap(content)
    if reader.read is None:
        raise UnreadableError(f"found {reader.name}; {reader.advice}")
    return reader, content


def _lines(head: bytes) -> list[bytes]:
    """The first lines that are not blank; the last one only if it is whole or alone."""
    # Files that were put together keep each its own mark.
    lines = [line.removeprefix(BOM) for line in head.splitlines()]
    lines = [line for line in lines if line.strip()]
    cut = len(head) == HEAD and not head.endswith((b"\n", b"\r"))
    return lines[:-1] if cut and len(lines) > 1 else lines


def _begins(*starts: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(starts)


def _is_text(head: bytes) -> bool:
    lines = _lines(head)
    return 2 * sum(isinstance(_text_line(line), str) for line in lines) > len(lines)


def _text_line(line: bytes) -> str | Piece:
    if CONTROL.search(line):
        return Piece(reason="line holds control bytes")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:
        return Piece(reason="line not UTF-8")


def _read_text(content: bytes) -> Iterable[Piece]:
    """The whole file as one text, without the lines that are none."""
    kept = []
    for number, line in enumerate(content.splitlines(), start=1):
        text = _text_line(line)
        if isinstance(text, Piece):
            yield Piece(line=number, reason=text.reason)
        else:
            kept.append(text)
    end = "\n" if content.endswith((b"\n", b"\r")) else ""
    yield Piece(text="\n".join(kept) + end)


def _is_table(head: bytes) -> bool:
    return any(_has_columns(head, delimiter) for delimiter in ",;\t|")


def _has_columns(head: bytes, delimiter: str) -> bool:
    """Whether rows of one length, two cells or more, follow a header of names.

    Prose has a blank behind a comma, and lines of different numbers of commas.
    """
    lines = [line.decode("utf-8", "replace") for line in _lines(head)[:TABLE_ROWS]]
    try:
        rows = list(csv.reader(lines, delimiter=delimiter))
    except csv.Error:
        return False
    header = [cell.strip().lower() for cell in rows[0]]
    if COLUMNS.issuperset(header) and (len(header) > 1 or rows[0] == header):
        return True
    # The first column of a table may be an index without a name.
    named = all(header) or (all(header[1:]) and all(row[:1] > [""] for row in rows[1:]))
    if len(header) < 2 or not named or len(rows) < 2:
        return False
    alike = sum(len(row) == len(header) for row in rows)
    if COLUMNS.intersection(header) and 2 * alike >= len(rows):
        return True
    tight = all(cell == cell.strip() for row in rows for cell in row)
    return tight and alike == len(rows)


def _gunzip(content: bytes) -> bytes:
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableError(
            f"found gzip that cannot be unpacked ({error}); fetch or write the file again"
        ) from error


def _from_utf(encoding: str) -> Callable[[bytes], bytes]:
    def unwrap(content: bytes) -> bytes:
        try:
            return content.decode(encoding).encode("utf-8")
        except UnicodeError as error:
            raise UnreadableError(
                f"found {encoding.upper()} text that is damaged ({error}); save it as UTF-8"
            ) from error

    return unwrap


def _known(name: str, advice: str, *starts: bytes) -> Reader:
    return Reader(name=f"{name}, which is not read", matches=_begins(*starts), advice=advice)


AS_LINES = "write its rows as JSON Lines"
UNPACK = "unpack it first, or use gzip"
BINARY: Sequence[Reader] = (
    _known("Parquet", f'{AS_LINES} (pandas: to_json(F, orient="records", lines=True))', b"PAR1"),
    _known("an Arrow file", AS_LINES, b"ARROW1", b"\xff\xff\xff\xff"),
    _known("Avro", AS_LINES, b"Obj\x01"),
    _known("ORC", AS_LINES, b"ORC"),
    _known("an SQLite database", AS_LINES, b"SQLite format 3\0"),
    _known("HDF5", AS_LINES, b"\x89HDF"),
    _known("a NumPy array", AS_LINES, b"\x93NUMPY"),
    _known("zstd", UNPACK, b"\x28\xb5\x2f\xfd", *(bytes([n]) + b"*M\x18" for n in range(80, 96))),
    _known("bzip2", UNPACK, b"BZh"),
    _known("xz", UNPACK, b"\xfd7zXZ\0"),
    _known("lz4", UNPACK, b"\x04\x22\x4d\x18"),
    _known("compress (.Z)", UNPACK, b"\x1f\x9d"),
    _known("a zip archive", "unpack it and name the files in it", b"PK\x03\x04", b"PK\x05\x06"),
    _known("a 7z archive", "unpack it and name the files in it", b"7z\xbc\xaf\x27\x1c"),
    Reader(
        name="a tar archive, which is not read",
        matches=lambda head: head[257:262] == b"ustar",
        advice="unpack it and name the files in it",
    ),
    _known("a PDF", "extract its text", b"%PDF"),
    _known("an RTF document", "save it as plain text", b"{\\rtf"),
    _known("a picture", "name a file of text", b"\x89PNG", b"\xff\xd8\xff", b"GIF8"),
    _known("model weights (GGUF)", "name a file of text", b"GGUF"),
    Reader(
        name="model weights (safetensors), which are not read",
        matches=lambda head: head[8:10] == b'{"' and head[4:8] == b"\0\0\0\0",
        advice="name a file of text",
    ),
    _known("a Python pickle", AS_LINES, *(b"\x80" + bytes([n]) for n in range(2, 6))),
    _known("a program", "name a file of text", b"\x7fELF", b"MZ\x90"),
    _known(
        "a git-lfs pointer",
        "fetch the file itself: git lfs pull",
        b"version https://git-lfs.github.com/",
    ),
)

READERS: Sequence[Reader] = (
    Reader(
        name="an empty file",
        matches=lambda head: not head.strip(),
        read=lambda _content: (Piece(reason="empty file"),),
    ),
    Reader(
        name="gzip within gzip",
        matches=_begins(b"\x1f\x8b"),
        unwrap=_gunzip,
        advice="unpack it first",
    ),
    Reader(
        name="UTF-32 text",
        matches=_begins(b"\xff\xfe\0\0", b"\0\0\xfe\xff"),
        unwrap=_from_utf("utf-32"),
    ),
    Reader(
        name="UTF-16 text", matches=_begins(b"\xff\xfe", b"\xfe\xff"), unwrap=_from_utf("utf-16")
    ),
    *BINARY,
    Reader(
        name="an HTML or XML page, which is not read",
        matches=lambda head: bool(re.match(rb"(?i)\s*<(!doctype|html|\?xml|head)\b", head)),
        advice="extract its text; a failed download looks like this too",
    ),
    Reader(
        name="JSON Lines",
        matches=lambda head: is_json(_lines(head)) and is_json_lines(_lines(head)),
        read=read_json_lines,
    ),
    Reader(name="JSON", matches=lambda head: is_json(_lines(head)), read=read_json),
    Reader(
        name="a table (CSV or TSV), which is not read",
        matches=_is_table,
        advice=AS_LINES,
    ),
    Reader(name="plain text", matches=_is_text, read=_read_text),
    Reader(
        name="neither UTF-8 text nor a format that is known",
        matches=lambda _head: True,
        advice="save text as UTF-8, or write JSON Lines",
    ),
)
"""Every format, asked in this order."""
