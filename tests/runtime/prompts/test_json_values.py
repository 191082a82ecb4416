"""JSON in prompt files, value by value: lines, places, details and limits."""

import json

import pytest

from runtime.prompts import json_values
from runtime.prompts.json_values import is_json, is_json_lines, read_json, read_json_lines


def told(pieces):
    """Each piece as (line, value) or (line, reason, detail)."""
    return [
        (piece.line, piece.value)
        if piece.reason is None
        else (piece.line, piece.reason, piece.detail)
        for piece in pieces
    ]


def test_each_line_is_a_value_with_its_number():
    content = b'{"a": 1}\r\n\n  [2, "x"] \r"three"\n7\nnull\n'
    assert told(read_json_lines(content)) == [
        (1, {"a": 1}),
        (2, "blank line", ""),
        (3, [2, "x"]),
        (4, "three"),
        (5, 7),
        (6, None),
    ]


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"a": }', "line not JSON", "Expecting value, column 7"),
        (b'  {"a" 1}', "line not JSON", "Expecting ':' delimiter, column 6"),
        (b'{"a": 1} x', "line not JSON", "Extra data, column 10"),
        (b'{"a": "\xc3("}', "line not UTF-8", "byte 8"),
        (b"\xff", "line not UTF-8", "byte 1"),
        (b'{"a": 1, "b": 2, "b": 3, "a": 4}', "key given twice", "a"),
        (b'[{"c": {"x": 1, "x": 2}}]', "key given twice", "x"),
        (b'{"two\\nlines": 1, "two\\nlines": 2}', "key given twice", r"two\nlines"),
        (b"[" * 100_000, "nested too deeply", ""),
        (b"9" * 5000, "number too long", ""),
    ],
)
def test_what_is_wrong_with_a_line_is_told(line, reason, detail):
    content = b'{"a": 1}\n' + line + b'\n{"a": 2}\n'
    assert told(read_json_lines(content)) == [(1, {"a": 1}), (2, reason, detail), (3, {"a": 2})]


def test_each_line_may_have_a_mark_of_its_own():
    mark = b"\xef\xbb\xbf"
    assert told(read_json_lines(mark + b"1\n" + mark + b"\n" + mark + b"2")) == [
        (1, 1), (2, "blank line", ""), (3, 2)
    ]  # fmt: skip


@pytest.mark.parametrize("extra", [0, 1])
def test_a_value_may_be_so_long_and_no_longer(monkeypatch, extra):
    monkeypatch.setattr(json_values, "LONGEST", 3 << 20)
    value = "x" * ((3 << 20) - 2 + extra)
    text = json.dumps(value).encode()
    expected = [(1, "longer than 3 MiB", "3 MiB")] if extra else [(1, value)]
    assert told(read_json_lines(text)) == told(read_json(text)) == expected
    found = told(read_json(b"[" + text + b",\n7]"))
    assert found == [*expected, (2, 7)]


def test_the_length_of_a_long_line_is_told():
    line = b'"' + b"x" * (40 << 20) + b'"'
    assert told(read_json_lines(line)) == [(1, "longer than 16 MiB", "40 MiB")]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_values_of_a_document_begin_in_their_lines(end):
    text = end.join(['{"a":', ' "x\\ny"}', "", ' {"b": 2} {"c": 3},', "[4]", ""])
    assert told(read_json(text.encode())) == [
        (1, {"a": "x\ny"}), (4, {"b": 2}), (4, {"c": 3}), (5, [4])
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[]", []),
        ("[1]", [(1, 1)]),
        ("[1, 2,]", [(1, 1), (1, 2)]),
        ("[1\n2]", [(1, 1), (2, 2)]),
        ("\n\n[\n1\n]\n", [(4, 1)]),
        ("[1] [2]\n3", [(1, 1), (1, [2]), (2, 3)]),
        ("[[1], [2]]", [(1, [1]), (1, [2])]),
        ("[1, 2", [(1, 1), (1, 2), (1, "JSON array that does not end", "")]),
        ("[1,\n", [(1, 1), (2, "JSON array that does not end", "")]),
        ("[", [(1, "JSON array that does not end", "")]),
        ("[1]]", [(1, 1), (1, "value not JSON", "Expecting value, column 4")]),
        ("{}", [(1, {})]),
    ],
)
def test_arrays_and_what_stands_behind_them(text, found):
    assert told(read_json(text.encode())) == found


def test_reading_goes_on_at_the_next_object_that_is_indented_no_more_than_the_first():
    rows = [
        "[",
        "  {bad",
        '    {"within": 1}',
        '  {"a": 1},',
        '{"b": 2},',
        "  7,",
        "  oops",
        '  {"c": 3}',
        "]",
    ]
    found = told(read_json("\n".join(rows).encode()))
    assert found[0][:2] == (2, "value not JSON")
    assert found[1:4] == [(4, {"a": 1}), (5, {"b": 2}), (6, 7)]
    assert found[4][:2] == (7, "value not JSON")
    assert found[5:] == [(8, {"c": 3})]


def test_a_byte_that_is_no_utf_8_spoils_its_own_value_alone():
    found = [piece.value for piece in read_json(b'[{"a": "\xff"},\n{"b": "\xc3\xb6"}]')]
    assert found == [{"a": "\udcff"}, {"b": "\u00f6"}]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_so_many_bad_values_are_told_of_and_then_no_more(monkeypatch, count):
    monkeypatch.setattr(json_values, "MOST_FAILURES", 3)
    text = "[\n" + '{"a": x},\n' * count + '{"b": 1}\n]'
    found = told(read_json(text.encode()))
    assert [line for line, reason, *_ in found if reason == "value not JSON"] == (
        list(range(2, 2 + min(count, 3)))
    )
    assert found[-1] == (
        (2 + count, {"b": 1}) if count < 3 else (4, "all that follows so many bad values", "")
    )


@pytest.mark.parametrize(
    ("lines", "json_at_all", "by_line"),
    [
        ([b'{"a": 1}'], True, True),
        ([b"{"], True, False),
        ([b"{'a': 1}"], True, True),
        ([b"prose"], False, False),
        ([b'{"a": 1}', b"prose"], True, True),
        ([b'{"a": 1}', b"prose", b"prose"], False, False),
        ([b'{"a": 1}', b'{"a": 1}', b"prose", b"prose"], True, True),
        ([b"prose", b'{"a": 1}'], True, True),
        ([b"prose", b"prose", b'{"a": 1}'], False, False),
        ([b"[", b'"a",', b"]"], True, False),
        ([b"{", b'"a": 1', b"prose", b"prose"], True, False),
        ([b"1", b"2"], True, True),
        ([b"1", b"two"], False, True),
        ([b"true", b"null", b'"x"'], True, True),
        ([b"[1, 2]", b"[3, 4]"], True, False),
    ],
)
def test_what_lines_are(lines, json_at_all, by_line):
    assert is_json(lines) == json_at_all
    assert is_json_lines(lines) == by_line
