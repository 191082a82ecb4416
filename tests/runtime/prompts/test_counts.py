"""Counts by reason, the first places, and how pieces of somebody's data are shown."""

import pytest

from runtime.prompts.counts import NAMED_KEYS, PLACES, Counts, ordered, shown


def test_each_reason_has_its_count_and_its_first_places():
    counts = Counts()
    for i in range(PLACES + 2):
        counts.drop("a", f"p:{i}", "why" if i == 1 else "")
    counts.drop("b", "q")
    assert counts.dropped == {"a": 7, "b": 1}
    assert counts.places == {"a": ["p:0", "p:1 (why)", "p:2", "p:3", "p:4"], "b": ["q"]}
    assert not counts.noted
    assert not Counts().places, "each has its own"


def test_keys_are_named_until_there_are_too_many_and_each_of_those_stays_named():
    counts = Counts()
    counts.note_unread([f"key{i}" for i in range(NAMED_KEYS)])
    counts.note_unread(["more", "key7", "key0", "still more"])
    expected = {f"key not read: key{i}": 1 for i in range(NAMED_KEYS)}
    expected |= {"key not read: key0": 2, "key not read: key7": 2, "key not read: other keys": 2}
    assert counts.noted == expected
    counts = Counts()
    counts.note_unread(["two\nlines", "x" * 50])
    assert set(counts.noted) == {r"key not read: two\nlines", f"key not read: {'x' * 37}..."}


@pytest.mark.parametrize(
    ("text", "longest", "line"),
    [
        ("plain 'text'", 40, "plain 'text'"),
        ("a" * 40, 40, "a" * 40),
        ("a" * 41, 40, "a" * 37 + "..."),
        ("a" * 9, 8, "aaaaa..."),
        ("tw\u00f6", 40, r"tw\xf6"),
        ("one\ntwo\x1b[0m", 40, r"one\ntwo\x1b[0m"),
        ("\u2028", 40, r"\u2028"),
        ("\u00f6" * 3, 12, r"\xf6\xf6\xf6"),
        ("\u00f6" * 3, 11, r"\xf6\xf6..."),
        ("", 40, ""),
    ],
)
def test_what_is_shown_is_one_printable_line_of_so_many_characters(text, longest, line):
    assert shown(text, longest) == line
    if longest == 40:
        assert shown(text) == line


def test_what_was_counted_is_ordered_by_name_without_zeros():
    found = ordered({"b": 2, "a": 0, "c": 1, "B": 3})
    assert list(found.items()) == [("B", 3), ("b", 2), ("c", 1)]
