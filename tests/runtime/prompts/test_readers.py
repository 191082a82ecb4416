"""What files are, told from what they hold, under names that say nothing or something else."""

import gzip
import io
import json
import pickle
import random
import struct
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from runtime.errors import ConfigError
from runtime.prompts.counts import Counts
from runtime.prompts.records import open_prompts, read_records

TALK = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so, and\nso"}]
RECORDS = [{"prompt": "one"}, {"messages": TALK}, {"prompt": "tw\u00f6, [2]"}]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()
ARRAY = json.dumps(RECORDS, ensure_ascii=False).encode()
ROWS = b"[\n" + b",\n".join(LINES.splitlines()) + b"\n]\n"
INDENTED = json.dumps(RECORDS, indent=2).encode()
VALUES = b"\n".join(json.dumps(record, indent=4).encode() for record in RECORDS)
NAMES = ["data.csv", "data.jsonl.bak", "DATA.JSONL", "data.txt", "data", "data.gz", "data.parquet"]


def read(tmp_path, content, name="data"):
    path = tmp_path / name
    path.write_bytes(content)
    counts = Counts()
    records = read_records(open_prompts([path]), counts)
    return records, counts, path


def refused(tmp_path, content, name="data.jsonl"):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, content, name)
    assert caught.value.field == "data.prompts"
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    "content", [LINES, ARRAY, ROWS, INDENTED, VALUES, LINES[:-1], b" \n" + ROWS, ARRAY + b"\n"]
)
def test_json_is_told_whatever_its_name(tmp_path, name, pack, content):
    records, counts, _ = read(tmp_path, pack(content), name)
    assert [record.messages for record in records] == [
        [{"role": "user", "content": "one"}],
        TALK,
        [{"role": "user", "content": "tw\u00f6, [2]"}],
    ]
    assert +counts.dropped in ({}, {"blank line": 1})


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig", "utf-16-le", "utf-16-be"])
def test_other_encodings_with_a_mark_are_read(tmp_path, encoding, pack):
    mark = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}.get(encoding, b"")
    records, counts, _ = read(tmp_path, pack(mark + LINES.decode().encode(encoding)))
    assert records[2].messages[0]["content"] == "tw\u00f6, [2]"
    assert not counts.dropped


@pytest.mark.parametrize("torn", [b'{"prompt": "b\'},', b"{'prompt': 'b'},", b"what is this"])
def test_a_bad_row_of_an_array_costs_itself(tmp_path, torn):
    rows = [b'{"prompt": "a"},', torn, b'{"prompt": "c"},', b'{"prompt": "d"}']
    records, counts, path = read(tmp_path, b"[\n" + b"\n".join(rows) + b"\n]")
    assert [record.source for record in records] == [f"{path}:2", f"{path}:4", f"{path}:5"]
    assert counts.dropped == {"value not JSON": 1}
    assert counts.places["value not JSON"][0].startswith(f"{path}:3 (")


def test_a_bad_value_of_an_indented_array_costs_itself(tmp_path):
    whole = json.dumps([{"messages": TALK}, {"prompt": "b"}, {"prompt": "c"}], indent=2)
    records, counts, path = read(tmp_path, whole.replace('"so,', "so,").encode())
    assert [record.messages[0]["content"] for record in records] == ["b", "c"]
    assert counts.dropped == {"value not JSON": 1}
    assert counts.places["value not JSON"][0].startswith(f"{path}:2 (")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b'{"prompt": "a", "prompt": "b"}', "key given twice"),
        (b'{"prompt": ' + b"[" * 99_999, "nested too deeply"),
        (b'{"prompt": "\xfe"}', "text not UTF-8"),
        (b'{"prompt": "\\udead"}', "text not UTF-8"),
        (b'{"question": "b"}', "neither messages nor prompt"),
        (b"3", "neither messages nor prompt"),
        (b"null", "neither messages nor prompt"),
    ],
)
def test_unusable_values_of_an_array(tmp_path, value, reason):
    rows = [b'{"prompt": "a"}', value, b'{"prompt": "c"}']
    records, counts, path = read(tmp_path, b"[" + b",\n ".join(rows) + b"]")
    assert [record.messages[0]["content"] for record in records] == ["a", "c"]
    assert counts.dropped == {reason: 1}
    assert counts.places[reason][0].partition(" (")[0] == f"{path}:2"


def test_an_array_that_was_cut(tmp_path):
    records, counts, _ = read(tmp_path, ROWS[:-3])
    assert len(records) == 3
    assert counts.dropped == {"JSON array that does not end": 1}
    records, counts, path = read(tmp_path, ROWS[:-8])
    assert len(records) == 2
    assert counts.places["value not JSON"][0].startswith(f"{path}:4 (")


def test_a_document_of_nothing_but_faults_ends(tmp_path):
    records, counts, _ = read(tmp_path, b'[\n{"prompt": "a"},\n' + b"{'prompt': 'b'},\n" * 3000)
    assert len(records) == 1
    assert counts.dropped["value not JSON"] == 1000
    assert counts.dropped["all that follows so many bad values"] == 1


@pytest.mark.parametrize(
    "content",
    [
        b"{'prompt': 'a'}\n{'prompt': 'b'}\n",
        b'{"conversations": [{"from": "human", "value": "hi"}]}\n',
        b'[{"instruction": "a", "output": "b"}]',
        b'{"data": [\n  {"prompt": "a"}\n]}\n',
        b'"one"\n"two"\n',
        b"1\n2\n3\n",
        b"[1, 2]\n[3, 4]\n",
        b'{"prompt": "torn',
    ],
)
def test_json_is_never_taken_for_prose(tmp_path, content):
    records, counts, _ = read(tmp_path, content, "data.txt")
    assert not records
    assert +counts.dropped


@pytest.mark.parametrize(
    "text",
    [
        "Roses are red,\nViolets are blue,\nSugar is sweet,\nAnd so are you.\n",
        "Hello, world.\nGoodbye, world.\n",
        '"Come in," she said. "Sit down."\n"Why?"\nHe did not, and she did.\n',
        '# Title\n\nSome `{"json": 1}` in prose:\n\n{"a": 1}\n\nand more, of it.\n',
        "[1] A. Author, A Title, 1999.\n[2] B. Author, Another, Title, 2001.\n",
        "{{Infobox}}\n'''Prose''' in [[wiki]] marks.\n",
        "def f(a,b):\n\treturn a\n\nprint(f(1,2))\n",
        "\tone\n\ttwo\n\tthree\n",
        "one line only, with a comma",
        "| a | b |\n|---|---|\n| 1 | 2 |\n",
        "| prompt | answer |\n|---|---|\n| 1 | 2 |\n",
        "<b>Bold</b> beginnings are prose.\n",
        "\u4f60\u597d\uff0c\u4e16\u754c\n\u518d\u89c1\n",
        "Contents\n1\nIntroduction\n7\n",
    ],
)
def test_prose_is_plain_text(tmp_path, text):
    records, counts, _ = read(tmp_path, text.encode(), "book.jsonl")
    assert [record.text for record in records] == [text]
    assert not counts.dropped


@pytest.mark.parametrize(
    "content",
    [
        "prompt,response\nwhy?,so\n",
        "prompt\nwhy?\nhow?\n",
        'id,prompt,response\n1,"why, then?","so, ""then"""\n2,how?,thus\n',
        ",prompt,score\n0,why?,1\n1,how?,2\n",
        "question; answer\nwhy?; so\nhow?; thus\n",
        "a\tb\nwhy is it?\tso it is.\nhow?\tthus\n",
        "name,age\nann,3\nbob,4\n",
        "id|prompt\n1|why is it?\n2|how?\n",
        "\ufeffprompt,completion\r\nwhy?,so\r\n",
        'text,label\n"two\nlines, here",1\nthree,0\n',
        # A row in three is torn, or holds a comma that was not quoted.
        "id,prompt,answer\n1,why?,so\n2,how?\n3,who, me?,yes\n4,when?,now\n5,where?,here\n",
    ],
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_tables_are_not_taken_for_prose(tmp_path, content, pack):
    message = refused(tmp_path, pack(content.encode()), "prose.txt")
    assert "a table (CSV or TSV), which is not read; write its rows as JSON Lines" in message


def archive(kind):
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w") as file:
            file.writestr("a.jsonl", LINES)
    elif kind == "tar":
        with tarfile.open(fileobj=buffer, mode="w") as file:
            info = tarfile.TarInfo("a.jsonl")
            info.size = len(LINES)
            file.addfile(info, io.BytesIO(LINES))
    elif kind == "torch":
        torch.save([1], buffer)
    else:
        np.save(buffer, np.arange(3))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"PAR1\x15\x04\x15\x1e", "Parquet"),
        (b"ARROW1\0\0", "an Arrow file"),
        (bytes.fromhex("28b52ffd2458"), "zstd"),
        (b"BZh91AY&SY", "bzip2"),
        (b"\xfd7zXZ\0\0\4", "xz"),
        (archive("zip"), "a zip archive"),
        (archive("tar"), "a tar archive"),
        (gzip.compress(archive("tar")), "a tar archive"),
        (gzip.compress(b"PAR1\x15\x04"), "Parquet"),
        (archive("torch"), "a zip archive"),
        (archive("numpy"), "a NumPy array"),
        (pickle.dumps([1, 2]), "a Python pickle"),
        (save({"a": np.zeros(3, np.float32)}), "model weights (safetensors)"),
        (b"GGUF" + struct.pack("<I", 3), "model weights (GGUF)"),
        (b"%PDF-1.7\n", "a PDF"),
        (b"{\\rtf1\\ansi hello}", "an RTF document"),
        (b"\x89PNG\r\n\x1a\n", "a picture"),
        (b"\n<!DOCTYPE html>\n<html></html>", "an HTML or XML page"),
        (b"<?xml version='1.0'?>", "an HTML or XML page"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n",
            "a git-lfs pointer",
        ),
        (bytes(range(256)) * 40, "neither UTF-8 text nor a format that is known"),
        (LINES.decode().encode("utf-16-le"), "neither UTF-8 text nor a format that is known"),
        ("Ein Gr\u00fc\u00dfen\n".encode("latin-1") * 9, "neither UTF-8 text nor a format"),
        (gzip.compress(LINES)[:-20], "gzip that cannot be unpacked"),
        (b"\x1f\x8bnothing", "gzip that cannot be unpacked"),
        (gzip.compress(gzip.compress(gzip.compress(LINES))), "gzip within gzip"),
        (b"\xff\xfe\x00\xd8", "UTF-16 text that is damaged"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, content, name):
    message = refused(tmp_path, content)
    assert f"found {name}" in message
    assert "; " in message.partition("found")[2], "it says what to do"


def mutated(draw, content):
    """A few bytes changed, taken out, put in, or repeated."""
    found = bytearray(content)
    odd = [
        b"\0",
        b"\xff",
        b"\n",
        b"\r",
        b"[",
        b"{",
        b"}",
        b"]",
        b'"',
        b",",
        b"\\ud800",
        b"1e9",
        b"NaN",
    ]
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(len(found) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            found[at : at + 1] = draw.choice(odd)
        elif kind == 1:
            del found[at : at + draw.randrange(30)]
        elif kind == 2:
            found[at:at] = draw.choice(odd) * draw.choice([1, 1, 2, 2000])
        else:
            found[at:at] = found[at : at + draw.randrange(80)]
    return bytes(found)


@pytest.mark.parametrize(
    "content", [LINES * 3, ARRAY, ROWS, INDENTED, VALUES, gzip.compress(LINES)]
)
def test_no_damage_does_more_than_cost_records(tmp_path, content):
    draw = random.Random(content)
    for _ in range(400):
        damaged = mutated(draw, content)
        try:
            records, counts, _ = read(tmp_path, damaged)
        except ConfigError:
            continue
        assert records or +counts.dropped
        for record in records:
            json.dumps([record.messages, record.text], ensure_ascii=False).encode()
        assert counts.places.keys() == (+counts.dropped).keys()
