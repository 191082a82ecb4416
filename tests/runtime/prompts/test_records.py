import gzip
import hashlib
import json
import os

import pytest

from runtime.errors import ConfigError
from runtime.prompts.counts import Counts
from runtime.prompts.records import open_prompts, read_records

DEEP = b"[" * 100_000


def read(tmp_path, content, name="prompts.jsonl"):
    path = tmp_path / name
    path.write_bytes(content)
    counts = Counts()
    return read_records(open_prompts([path]), counts), counts, path


def asked(records):
    return [record.messages[0]["content"] for record in records]


def test_byte_order_mark_crlf_blank_and_torn_line(tmp_path):
    content = b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\r\n\n{"prompt": "c'
    records, counts, path = read(tmp_path, content)
    assert asked(records) == ["a", "b"]
    assert [record.source for record in records] == [f"{path}:1", f"{path}:2"]
    assert counts.dropped == {"blank line": 1, "line not JSON": 1}
    assert counts.places["blank line"] == [f"{path}:3"]
    (torn,) = counts.places["line not JSON"]
    assert torn.startswith(f"{path}:4 (Unterminated string")


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_line_ends(tmp_path, end):
    lines = [b'{"prompt": "a"}', b"{torn", b'{"prompt": "b"}', b'{"prompt": "c"}', b""]
    records, counts, path = read(tmp_path, end.join(lines))
    assert asked(records) == ["a", "b", "c"]
    assert records[2].source == f"{path}:4"
    assert counts.places["line not JSON"][0].startswith(f"{path}:2 (")


def test_nothing_else_ends_a_line(tmp_path):
    text = "one\u2028two\u0085three\x7ffour"
    content = json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\n"
    records, counts, _ = read(tmp_path, content)
    assert asked(records) == [text]
    assert not counts.dropped


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"}', "neither messages nor prompt"),
        (b"[1, 2]", "neither messages nor prompt"),
        (b'"a"', "neither messages nor prompt"),
        (b"{}", "neither messages nor prompt"),
        (b'{"prompt": ""}', "empty prompt"),
        (b'{"prompt": " \\n"}', "empty prompt"),
        (b'{"prompt": null}', "empty prompt"),
        (b'{"prompt": []}', "empty prompt"),
        (b'{"prompt": 7}', "prompt is neither text nor messages"),
        (b'{"prompt": NaN}', "prompt is neither text nor messages"),
        (b'{"prompt": 1e999}', "prompt is neither text nor messages"),
        (b'{"prompt": {"a": 1}}', "prompt is neither text nor messages"),
        (b'{"prompt": "a", "response": "  "}', "empty answer"),
        (b'{"prompt": "a", "response": false}', "answer is neither text nor messages"),
        (b'{"prompt": "a", "response": "b", "answer": "c"}', "more than one answer"),
        (b'{"prompt": "\xff"}', "line not UTF-8"),
        (b'{"prompt": "\xed\xa0\x80"}', "line not UTF-8"),
        (b"{'prompt': 'a'}", "line not JSON"),
        (b'{"prompt": "a"} {"prompt": "b"}', "line not JSON"),
        (b'{"prompt": "a\x00b"}', "line not JSON"),
        (b'{"prompt": "a\x01"}', "line not JSON"),
        (b"\x00\x01\x02", "line not JSON"),
        (b"  \t\r", "blank line"),
        (DEEP, "nested too deeply"),
        (b'{"a":' * 90_000, "nested too deeply"),
        (b'{"messages": ' + b"[" * 50 + b"]" * 50 + b"}", "nested too deeply"),
        (b'{"prompt": "\\ud800"}', "text not UTF-8"),
        (b'{"messages": [{"role": "user", "content": "x\\udfff"}]}', "text not UTF-8"),
        (b'{"messages": [{"\\ud83d": 1}]}', "text not UTF-8"),
        (b'{"prompt": "a", "answer": "\\udc00b"}', "text not UTF-8"),
        (b'{"prompt": "a", "prompt": "b"}', "key given twice"),
        (b'{"messages": [{"role": "user", "role": "user", "content": "a"}]}', "key given twice"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "number too long"),
        (b'{"prompt": "' + b"a" * (17 << 20) + b'"}', "longer than 16 MiB"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_unusable_lines_are_counted_with_their_place(tmp_path, line, reason, first):
    good = b'{"prompt": "good"}'
    lines = [line, good, good] if first else [good, good, line]
    records, counts, path = read(tmp_path, b"\n".join(lines) + b"\n")
    assert asked(records) == ["good", "good"]
    assert counts.dropped == {reason: 1}
    (place,) = counts.places[reason]
    assert place.partition(" (")[0] == f"{path}:{1 if first else 3}"


def test_only_the_first_places_are_named(tmp_path):
    records, counts, path = read(tmp_path, b'{"prompt": "a"}\n{\n{"id": 1}\n' * 40)
    assert len(records) == 40
    assert counts.dropped == {"line not JSON": 40, "neither messages nor prompt": 40}
    found = counts.places["neither messages nor prompt"]
    assert found == [f"{path}:{3 * i} (found keys id)" for i in range(1, 6)]


def test_harmless_oddities_are_read(tmp_path):
    mark = b"\xef\xbb\xbf"
    lines = [b' {"prompt": "a\\u0000b", "score": NaN}', mark + b'{"prompt": "\\ud83d\\ude00"}']
    records, counts, _ = read(tmp_path, mark + b"\n".join(lines))
    assert asked(records) == ["a\0b", "\U0001f600"]
    assert not counts.dropped


def test_messages_are_passed_on_unchecked(tmp_path):
    records, counts, _ = read(tmp_path, b'{"messages": [], "id": 7}\n')
    assert records[0].messages == []
    assert records[0].text is None
    assert counts.noted == {"key not read: id": 1}


@pytest.mark.parametrize("key", ["completion", "response", "answer"])
@pytest.mark.parametrize("as_messages", [False, True])
def test_a_given_answer_is_kept(tmp_path, key, as_messages):
    talk = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]
    record = {"prompt": talk[:1], key: talk[1:]} if as_messages else {"prompt": "why?", key: "so"}
    records, counts, _ = read(tmp_path, json.dumps(record).encode())
    assert records[0].messages == talk
    assert not counts.dropped
    assert not counts.noted


def test_prompts_that_are_messages_are_asked(tmp_path):
    talk = [{"role": "system", "content": "be calm"}, {"role": "user", "content": "why?"}]
    line = json.dumps({"prompt": talk, "answer": None}).encode()
    records, counts, _ = read(tmp_path, line)
    assert records[0].messages == talk
    assert not counts.dropped


def test_keys_that_nothing_reads_are_noted(tmp_path):
    odd = {f"key{i}": 0 for i in range(12)}
    lines = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "d", "chosen": "e", **odd}]
    records, counts, _ = read(tmp_path, "\n".join(map(json.dumps, lines)).encode())
    assert len(records) == 2
    assert counts.noted["key not read: chosen"] == 2
    assert counts.noted["key not read: rejected"] == 1
    assert counts.noted["key not read: other keys"] == 6


def test_keys_within_messages_that_nothing_reads_are_noted(tmp_path):
    said = {"role": "assistant", "content": "so", "weight": 0, "thinking": "hm"}
    talk = [{"role": "user", "content": "why?", "name": "Ann"}, {**said, "train": False}]
    lines = [{"messages": talk * 2}, {"prompt": talk[:1], "answer": "so"}, {"messages": "why?"}]
    records, counts, _ = read(tmp_path, "\n".join(map(json.dumps, lines)).encode())
    assert len(records) == 3
    assert counts.noted == {"key not read: messages.name": 2, "key not read: messages.train": 1}


def test_files_with_marks_that_were_put_together(tmp_path):
    mark = b"\xef\xbb\xbf"
    lines = [mark + b'{"prompt": "question %d"}\n' % i for i in range(3)]
    records, counts, _ = read(tmp_path, b"".join(lines))
    assert asked(records) == [f"question {i}" for i in range(3)]
    assert not counts.dropped


def test_plain_text_is_one_record(tmp_path):
    records, counts, path = read(tmp_path, b"\xef\xbb\xbfone\r\ntwo\rthree\n", "book.txt")
    assert records[0].text == "one\ntwo\nthree\n"
    assert records[0].source == str(path)
    assert records[0].messages is None
    assert not counts.dropped


@pytest.mark.parametrize(
    ("line", "reason"),
    [(b"na\xefve", "line not UTF-8"), (b"a\0b", "line holds control bytes")],
)
def test_a_bad_line_of_text_is_left_out(tmp_path, line, reason):
    records, counts, path = read(tmp_path, b"one two.\nthree.\n" + line + b"\nfour\n")
    assert records[0].text == "one two.\nthree.\nfour\n"
    assert counts.places == {reason: [f"{path}:3"]}


@pytest.mark.parametrize("content", [b"", b" \n", b"\xef\xbb\xbf", b"\r\r\n\t", b"\n" * (2 << 20)])
def test_an_empty_file_is_counted(tmp_path, content):
    records, counts, path = read(tmp_path, content)
    assert not records
    assert counts.dropped == {"empty file": 1}
    assert counts.places == {"empty file": [str(path)]}


def test_files_are_read_in_the_order_given(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "{name}"}}\n')
    paths = [tmp_path / "b.jsonl", tmp_path / "a.jsonl"]
    records = read_records(open_prompts(paths), Counts())
    assert asked(records) == ["b", "a"]
    assert [record.file for record in records] == [0, 1]


def test_a_name_that_is_no_utf_8(tmp_path):
    _, counts, _ = read(tmp_path, b"{}\n", "caf\udce9.jsonl")
    (place,) = counts.places["neither messages nor prompt"]
    assert place.encode().startswith(f"{tmp_path}/caf\\udce9.jsonl:1 (".encode())


def test_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.prompts.*none\.jsonl.*No such file") as caught:
        open_prompts([tmp_path / "none.jsonl"])
    assert caught.value.field == "data.prompts"


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, found in (
        (tmp_path, "is a folder"),
        (tmp_path / "pipe", "is a pipe or device"),
        ("/dev/zero", "is a pipe or device"),
        (tmp_path / "loop", "must be a readable file"),
        (tmp_path / "prompts.jsonl" / "x", "must be a readable file"),
        ("nul\0byte", "must be a readable file"),
        ("n" * 5000, "must be a readable file"),
    ):
        with pytest.raises(ConfigError, match=found):
            open_prompts([name])


def test_a_file_that_cannot_be_read_is_told_before_any_is_taken_apart(tmp_path):
    (tmp_path / "good.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "data.parquet").write_bytes(b"PAR1\x15\x04\x15")
    counts = Counts()
    files = open_prompts([tmp_path / "good.jsonl", tmp_path / "data.parquet"])
    with pytest.raises(ConfigError, match=r"data\.parquet.*found Parquet.*JSON Lines \(pandas"):
        read_records(files, counts)
    assert not counts.dropped


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        (b'{"text": "a", "id": 1}', "found keys text, id"),
        (b"{}", "found no keys"),
        (b"[1]", "found a list"),
        (b'"a"', "found a text"),
        (b"true", "found true or false"),
        (b"null", "found null"),
        (b"3.5", "found a number"),
        (b'{"prompt": 7}', "found a number"),
        (b'{"prompt": {"a": 1, "b": 2}}', "found keys a, b"),
        (b'{"prompt": "a", "answer": {}}', "found no keys"),
        (b'{"prompt": "a", "completion": "b", "response": "c", "answer": "d"}',
         "found completion and response and answer"),
        (b'{"prompt": "a", "response": "b", "answer": "c"}', "found response and answer"),
        (b'{"' + b"k" * 60 + b'": 1}', "found keys " + "k" * 37 + "..."),
        (b'{"prompt": "\\ud800"}', "half a surrogate pair"),
    ],
)  # fmt: skip
def test_what_was_found_in_place_of_a_record_is_told(tmp_path, line, detail):
    _, counts, path = read(tmp_path, line + b'\n{"prompt": "a"}\n')
    ((place,),) = counts.places.values()
    assert place == f"{path}:1 ({detail})"


@pytest.mark.parametrize("deep", [32, 33])
def test_messages_may_be_so_deep_and_no_deeper(tmp_path, deep):
    """``messages`` itself is level 0."""
    value = b'{"messages": ' + b"[" * deep + b"1" + b"]" * deep + b"}"
    records, counts, _ = read(tmp_path, value)
    assert len(records) == (deep == 32)
    assert counts.dropped == ({} if deep == 32 else {"nested too deeply": 1})


def test_depth_counts_objects_too_and_other_keys_do_not_matter(tmp_path):
    value = b'{"id": ' + b"[" * 60 + b"]" * 60 + b', "prompt": "a"}'
    assert len(read(tmp_path, value)[0]) == 1
    value = b'{"messages": ' + b'{"a": ' * 33 + b"1" + b"}" * 34
    assert read(tmp_path, value)[1].dropped == {"nested too deeply": 1}


def test_messages_win_over_a_prompt_beside_them(tmp_path):
    talk = [{"role": "user", "content": "why?"}]
    line = json.dumps({"prompt": "other", "messages": talk, "answer": "no"}).encode()
    records, counts, _ = read(tmp_path, line)
    assert records[0].messages == talk
    assert counts.noted == {"key not read: prompt": 1, "key not read: answer": 1}


@pytest.mark.parametrize("key", ["completion", "response", "answer"])
def test_an_answer_that_is_null_is_asked_for_and_an_empty_one_is_none(tmp_path, key):
    records, counts, _ = read(tmp_path, json.dumps({"prompt": "a", key: None}).encode())
    assert records[0].messages == [{"role": "user", "content": "a"}]
    assert not counts.noted
    for empty in ("", " ", []):
        records, counts, _ = read(tmp_path, json.dumps({"prompt": "a", key: empty}).encode())
        assert counts.dropped == {"empty answer": 1}


def test_texts_are_kept_with_their_blanks(tmp_path):
    records, _, _ = read(tmp_path, json.dumps({"prompt": " a\n", "answer": "\tb "}).encode())
    assert [message["content"] for message in records[0].messages] == [" a\n", "\tb "]


def test_a_prompt_of_several_turns_and_an_answer_of_several(tmp_path):
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    more = [{"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    records, _, _ = read(tmp_path, json.dumps({"prompt": turns, "completion": more}).encode())
    assert records[0].messages == [*turns, *more]


def test_files_keep_their_bytes_their_digest_and_their_place(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for i, path in enumerate(paths):
        path.write_bytes(gzip.compress(b'{"prompt": "%d"}\n{"prompt": ""}\n' % i))
    files = open_prompts(map(str, paths))
    assert [file.path for file in files] == paths
    assert [file.content for file in files] == [path.read_bytes() for path in paths]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert [file.sha256 for file in files] == digests
    counts = Counts()
    records = read_records(files, counts)
    assert [(record.file, record.source) for record in records] == [
        (i, f"{path}:1") for i, path in enumerate(paths)
    ]
    assert counts.places == {"empty prompt": [f"{path}:2" for path in paths]}


def test_what_is_said_of_files_that_cannot_be_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "data").write_bytes(b"PAR1")
    (tmp_path / "good").write_bytes(b'{"prompt": "a"}\n')
    for name, rule in (
        (".", "is a folder; name the files in it"),
        ("pipe", "is a pipe or device; write it to a file"),
        ("none", "must be a readable file (No such file or directory)"),
        ("x" * 300, "must be a readable file (File name too long)"),
    ):
        path = tmp_path / name
        with pytest.raises(ConfigError) as caught:
            open_prompts([tmp_path / "good", path])
        assert str(caught.value) == f"data.prompts = {str(path)!r}: {rule}"
    files = open_prompts([tmp_path / "good", tmp_path / "data"])
    with pytest.raises(ConfigError) as caught:
        read_records(files, Counts())
    assert str(caught.value).startswith(
        f"data.prompts = {str(tmp_path / 'data')!r}: must be JSON Lines, a JSON array or plain "
        "text, each as it is or gzipped, found Parquet, which is not read; write its rows as JSON"
    )
    assert (caught.value.field, caught.value.value) == ("data.prompts", str(tmp_path / "data"))


def test_a_text_of_blanks_alone_is_an_empty_file(tmp_path):
    _, counts, path = read(tmp_path, "\u2003\n\u3000\n".encode(), "book")
    assert counts.places == {"empty file": [str(path)]}
