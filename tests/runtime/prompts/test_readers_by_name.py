"""Every format that is known by its first bytes, what is said of it, and the borders between."""

import gzip
import json
import struct

import pytest

from runtime.prompts import readers
from runtime.prompts.readers import UnreadableError, find_reader

ROWS = "write its rows as JSON Lines"
UNPACK = "unpack it first, or use gzip"
NAME = "unpack it and name the files in it"
TEXT = "name a file of text"
PARQUET = f'{ROWS} (pandas: to_json(F, orient="records", lines=True))'
TAR = bytes(257) + b"ustar\x0000"


@pytest.mark.parametrize(
    ("start", "name", "advice"),
    [
        (b"PAR1", "Parquet, which is not read", PARQUET),
        (b"ARROW1\0\0", "an Arrow file, which is not read", ROWS),
        (b"\xff\xff\xff\xff\x10\0\0\0", "an Arrow file, which is not read", ROWS),
        (b"Obj\x01", "Avro, which is not read", ROWS),
        (b"ORC", "ORC, which is not read", ROWS),
        (b"SQLite format 3\0", "an SQLite database, which is not read", ROWS),
        (b"\x89HDF\r\n\x1a\n", "HDF5, which is not read", ROWS),
        (b"\x93NUMPY\x01\0", "a NumPy array, which is not read", ROWS),
        (b"\x28\xb5\x2f\xfd", "zstd, which is not read", UNPACK),
        (b"\x50*M\x18", "zstd, which is not read", UNPACK),
        (b"\x5f*M\x18", "zstd, which is not read", UNPACK),
        (b"BZh9", "bzip2, which is not read", UNPACK),
        (b"\xfd7zXZ\0", "xz, which is not read", UNPACK),
        (b"\x04\x22\x4d\x18", "lz4, which is not read", UNPACK),
        (b"\x1f\x9d\x90", "compress (.Z), which is not read", UNPACK),
        (b"PK\x03\x04", "a zip archive, which is not read", NAME),
        (b"PK\x05\x06", "a zip archive, which is not read", NAME),
        (b"7z\xbc\xaf\x27\x1c", "a 7z archive, which is not read", NAME),
        (TAR, "a tar archive, which is not read", NAME),
        (b"%PDF-1.4", "a PDF, which is not read", "extract its text"),
        (b"{\\rtf1", "an RTF document, which is not read", "save it as plain text"),
        (b"\x89PNG", "a picture, which is not read", TEXT),
        (b"\xff\xd8\xff\xe0", "a picture, which is not read", TEXT),
        (b"GIF89a", "a picture, which is not read", TEXT),
        (b"GGUF", "model weights (GGUF), which is not read", TEXT),
        (
            struct.pack("<Q", 70) + b'{"a":',
            "model weights (safetensors), which are not read",
            TEXT,
        ),
        *((b"\x80" + bytes([n]), "a Python pickle, which is not read", ROWS) for n in (2, 3, 4, 5)),
        (b"\x7fELF", "a program, which is not read", TEXT),
        (b"MZ\x90", "a program, which is not read", TEXT),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "a git-lfs pointer, which is not read",
            "fetch the file itself: git lfs pull",
        ),
        *(
            (
                start,
                "an HTML or XML page, which is not read",
                "extract its text; a failed download looks like this too",
            )
            for start in (b"<!doctype html>", b" \n<HTML>", b"<?xml version", b"<head>")
        ),
        (b"a,text\n1,b\n", "a table (CSV or TSV), which is not read", ROWS),
        (
            b"\x00\x01\x02",
            "neither UTF-8 text nor a format that is known",
            "save text as UTF-8, or write JSON Lines",
        ),
    ],
)
def test_formats_that_are_not_read(start, name, advice):
    for content in (start + b"\n" * 8, gzip.compress(start + b"\n" * 8)):
        with pytest.raises(UnreadableError) as caught:
            find_reader(content)
        assert str(caught.value) == f"found {name}; {advice}"


@pytest.mark.parametrize(
    "text", ["<hello>", "<header> of a letter", "PAR", "OR C", "<htmlx>", "Version https://git-lfs"]
)
def test_what_only_looks_like_one_is_text(text):
    assert find_reader(text.encode())[0].name == "plain text"


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_files_are_unwrapped_twice(depth):
    content = packed = b'{"prompt": "a"}\n'
    for _ in range(depth):
        packed = gzip.compress(packed)
    if depth < 3:
        reader, found = find_reader(packed)
        assert (reader.name, found) == ("JSON Lines", content)
        return
    with pytest.raises(UnreadableError) as caught:
        find_reader(packed)
    assert str(caught.value) == "found gzip within gzip; unpack it first"


def test_a_packed_file_of_another_encoding_is_read():
    text = '{"prompt": "tw\u00f6"}\n'
    for encoding in ("utf-16", "utf-32"):
        reader, found = find_reader(gzip.compress(text.encode(encoding)))
        assert (reader.name, found) == ("JSON Lines", text.encode())
    assert find_reader("\ufeffprose".encode())[1] == b"prose"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe\0\0\0", "found UTF-32 text that is damaged ("),
        (b"\0\0\xfe\xff\xff\xff\xff\xff", "found UTF-32 text that is damaged ("),
        (b"\xfe\xff\xd8\0", "found UTF-16 text that is damaged ("),
    ],
)
def test_text_of_another_encoding_that_is_damaged(content, said):
    with pytest.raises(UnreadableError) as caught:
        find_reader(content)
    assert str(caught.value).startswith(said)
    assert str(caught.value).endswith("); save it as UTF-8")


def spoilt(content, kind):
    data = bytearray(content)
    if kind == "checksum":
        data[-8] ^= 1
    elif kind == "length":
        data[-1] ^= 1
    elif kind == "deflate":
        data[12] ^= 0xFF
    elif kind == "method":
        data[2] = 7
    else:
        data = data[: int(kind)]
    return bytes(data)


@pytest.mark.parametrize("kind", ["checksum", "length", "deflate", "method", "-1", "-8", "10", "3"])
def test_a_spoilt_gzip_file_is_refused(kind):
    whole = gzip.compress(b"".join(b'{"prompt": "%d"}\n' % i for i in range(99)))
    with pytest.raises(UnreadableError) as caught:
        find_reader(spoilt(whole, kind))
    said = str(caught.value)
    assert said.startswith("found gzip that cannot be unpacked (")
    assert said.endswith("); fetch or write the file again")


def test_members_of_a_gzip_file_are_all_read():
    first, second = b'{"prompt": "a"}\n', b'{"prompt": "b"}\n'
    packed = gzip.compress(first) + gzip.compress(second)
    assert find_reader(packed)[1] == first + second
    with pytest.raises(UnreadableError):
        find_reader(packed[:-1])


def test_an_empty_file_is_read_as_one():
    for content in (b"", b" \n\t", gzip.compress(b""), gzip.compress(b"\n\n")):
        reader, _ = find_reader(content)
        assert reader.name == "an empty file"
        (piece,) = reader.read(content)
        assert (piece.reason, piece.line) == ("empty file", None)


def test_only_the_head_decides(monkeypatch):
    monkeypatch.setattr(readers, "HEAD", 64)
    line = b'{"prompt": "a"}\n'
    # The line that the head cuts says nothing, and what comes behind it neither.
    for content in (line * 3 + b'{"prompt": "' + b"x" * 99 + b'"}\n', line * 4 + b"prose\n" * 99):
        assert find_reader(content)[0].name == "JSON Lines"
    assert find_reader(b"prose, it is.\n" * 5 + line * 99)[0].name == "plain text"
    # A head of blanks alone is passed over.
    assert find_reader(b"\n" * 200 + line)[0].name == "JSON Lines"
    # A line longer than the head stands for itself.
    assert find_reader(b'{"prompt": "' + b"x" * 99 + b'"}\n')[0].name == "JSON"


@pytest.mark.parametrize(
    ("bad", "good", "is_text"),
    [(0, 1, True), (1, 2, True), (2, 2, False), (2, 3, True), (1, 0, False)],
)
@pytest.mark.parametrize("line", [b"na\xefve", b"a\0b"])
def test_text_has_more_lines_of_text_than_others(bad, good, is_text, line):
    content = b"\n".join([line] * bad + [b"Some prose."] * good)
    if not is_text:
        with pytest.raises(UnreadableError, match="neither UTF-8 text nor a format"):
            find_reader(content)
        return
    reader, _ = find_reader(content)
    *left_out, whole = reader.read(content)
    assert whole.text == "\n".join(["Some prose."] * good)
    reason = "line not UTF-8" if line == b"na\xefve" else "line holds control bytes"
    assert [(piece.line, piece.reason) for piece in left_out] == (
        [(i + 1, reason) for i in range(bad)]
    )


@pytest.mark.parametrize("code", range(32))
def test_control_bytes_that_no_text_has(code):
    line = b"some prose " + bytes([code]) + b" and more"
    if code in (0x09, 0x0A, 0x0B, 0x0C, 0x0D) or code >= 0x1B:
        assert find_reader(line)[0].name == "plain text"
    else:
        with pytest.raises(UnreadableError):
            find_reader(line)


@pytest.mark.parametrize("text", ["one\ntwo", "one\r\ntwo\r\n", "one\rtwo\r", "\none\n\n\ntwo\n"])
def test_a_text_keeps_its_lines_and_its_end(text):
    reader, content = find_reader(text.encode())
    (piece,) = reader.read(content)
    assert piece.text == text.replace("\r\n", "\n").replace("\r", "\n")
    assert piece.line is None


@pytest.mark.parametrize(
    "column",
    ["answer", "completion", "content", "conversations", "instruction", "input", "label",
     "messages", "output", "prompt", "question", "response", "target", "text"],
)  # fmt: skip
def test_a_column_of_that_name_alone_is_a_table(column):
    content = f"{column}\nSome prose, and more.\nYes.\n".encode()
    with pytest.raises(UnreadableError, match="a table"):
        find_reader(content)
    upper = f"id,{column.upper()}\n1,a b\n2,c d\n3,e, f\n".encode()
    with pytest.raises(UnreadableError, match="a table"):
        find_reader(upper)


@pytest.mark.parametrize(
    ("text", "is_table"),
    [
        ("one,two\n1,2\n", True),
        ("one,two\n", False),
        ("one\n1\n2\n", False),
        ("one, two\n1, 2\n", False),
        ("one,two\n1,2\n1,2,3\n", False),
        ("one,\n1,2\n", False),
        (",two\n0,2\n1,3\n", True),
        (",two\n,2\n1,3\n", False),
        ("id,prompt\n1,2\n1,2,3\n3\n", True),
        ("id,prompt\n1,2,3\n1,2,3\n3\n", False),
        ("prompt,answer\n", True),
        ("Prompt\nwhy?\n", False),
        ("a|b\n1|2\n", True),
        ("a;b\n1;2\n", True),
        ("a\tb\n1\t2\n", True),
    ],
)
def test_what_is_a_table(text, is_table):
    if is_table:
        with pytest.raises(UnreadableError, match="a table"):
            find_reader(text.encode())
    else:
        assert find_reader(text.encode())[0].name == "plain text"


def test_a_json_document_and_json_lines_are_told_apart():
    record = {"prompt": "a", "more": [1, {"b": 2}]}
    line = json.dumps(record).encode()
    assert find_reader(line + b"\n" + line)[0].name == "JSON Lines"
    for document in (b"[" + line + b"]", json.dumps([record], indent=1).encode()):
        assert find_reader(document)[0].name == "JSON"
