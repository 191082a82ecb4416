from collections import Counter

import pytest

from runtime.errors import ConfigError
from runtime.text import read_records


def read(tmp_path, content, name="prompts.jsonl"):
    path = tmp_path / name
    path.write_bytes(content)
    dropped = Counter()
    return read_records([path], dropped), dropped, path


def test_byte_order_mark_crlf_blank_and_torn_line(tmp_path):
    content = b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\r\n\n{"prompt": "c'
    records, dropped, path = read(tmp_path, content)
    assert [record.messages[0]["content"] for record in records] == ["a", "b"]
    assert [record.source for record in records] == [f"{path}:1", f"{path}:2"]
    assert dropped == {"blank line": 1, "line not JSON": 1}


def test_only_line_feed_ends_a_line(tmp_path):
    content = '{"prompt": "one\u2028two\u0085three"}\n'.encode()
    records, dropped, _ = read(tmp_path, content)
    assert records[0].messages[0]["content"] == "one\u2028two\u0085three"
    assert not dropped


def test_last_line_without_line_feed_counts(tmp_path):
    records, dropped, _ = read(tmp_path, b'{"prompt": "a"}\n{"prompt": "b"}')
    assert len(records) == 2
    assert not dropped


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"}', "neither messages nor prompt"),
        (b"[1, 2]", "neither messages nor prompt"),
        (b'"a"', "neither messages nor prompt"),
        (b'{"prompt": ""}', "empty prompt"),
        (b'{"prompt": null}', "empty prompt"),
        (b'{"prompt": "\xff"}', "line not UTF-8"),
        (b"{'prompt': 'a'}", "line not JSON"),
        (b"  \t\r", "blank line"),
    ],
)
def test_unusable_lines_are_counted_and_the_rest_is_read(tmp_path, line, reason):
    records, dropped, _ = read(tmp_path, line + b'\n{"prompt": "good"}\n')
    assert len(records) == 1
    assert dropped == {reason: 1}


def test_messages_are_passed_on_unchecked(tmp_path):
    records, _, _ = read(tmp_path, b'{"messages": [], "id": 7}\n')
    assert records[0].messages == []
    assert records[0].text is None


def test_plain_text_is_one_record(tmp_path):
    records, dropped, path = read(tmp_path, b"\xef\xbb\xbfone\r\ntwo\n", "book.txt")
    assert records[0].text == "one\ntwo\n"
    assert records[0].source == str(path)
    assert records[0].messages is None
    assert not dropped


@pytest.mark.parametrize(
    ("content", "reason"), [(b"\xff\xfe", "file not UTF-8"), (b" \n", "empty file")]
)
def test_unusable_text_files_are_counted(tmp_path, content, reason):
    records, dropped, _ = read(tmp_path, content, "book.txt")
    assert not records
    assert dropped == {reason: 1}


def test_empty_jsonl_gives_no_record(tmp_path):
    records, dropped, _ = read(tmp_path, b"")
    assert not records
    assert dropped == {"blank line": 1}


def test_files_are_read_in_the_order_given(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "{name}"}}\n')
    paths = [tmp_path / "b.jsonl", tmp_path / "a.jsonl"]
    records = read_records(paths, Counter())
    assert [record.messages[0]["content"] for record in records] == ["b", "a"]


def test_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.prompts.*none\.jsonl.*No such file") as caught:
        read_records([tmp_path / "none.jsonl"], Counter())
    assert caught.value.field == "data.prompts"
