import enum
import hashlib
import json

import pytest

from cache.digest import (
    MAX_DEPTH,
    canonical_json,
    check_canonical,
    check_json,
    parse_json,
    sha256_hex,
)


def parse_canonical(data):
    """What a reader of a manifest does."""
    value = parse_json(data)
    check_canonical(value, data)
    return value


def test_canonical_json_is_sorted_tight_and_ascii():
    value = {"b": [1, -2, (3,)], "a": {"z": True, "y": "\N{SNOWMAN}"}, "Z": ""}
    expected = b'{"Z":"","a":{"y":"\\u2603","z":true},"b":[1,-2,[3]]}'
    assert canonical_json(value) == expected


def test_canonical_json_reads_back_as_itself():
    value = {"n": 10**18 - 1, "m": -(10**18 - 1), "s": 'a "b" \\ [{ \n', "e": [], "d": {}}
    assert parse_canonical(canonical_json(value)) == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": 1.0}, r"value\.a is 1\.0 of type float"),
        ([None], r"value\[0\] is None of type NoneType"),
        ({1: 2}, "has the key 1; keys must be strings"),
        (b"x", "of type bytes"),
        ({"a": [0, {"b": float("nan")}]}, r"value\.a\[1\]\.b is nan"),
    ],
)
def test_other_types_are_refused_with_their_path(value, message):
    with pytest.raises(TypeError, match=message):
        canonical_json(value)


def test_long_integers_and_deep_values_are_refused():
    with pytest.raises(ValueError, match="18 digits"):
        canonical_json([10**18])
    with pytest.raises(ValueError, match="18 digits"):
        canonical_json({"a": -(10**18)})
    deep = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    with pytest.raises(ValueError, match=f"deeper than {MAX_DEPTH}"):
        canonical_json(deep)
    assert canonical_json(deep[0]) == b"[" * MAX_DEPTH + b"]" * MAX_DEPTH


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1}',
        b'{"b":1,"a":2}',
        b'{"a":1,"a":1}',
        b'{"a":"\xe2\x98\x83"}',
        b"01",
        b"1 ",
        b"1.0",
        b"1e3",
        b"NaN",
        b"-Infinity",
        b"[",
        b"",
        b"\xff",
        b'"abc',
        b'"\\',
        b"[" * 100_000,
        "[1]".encode("utf-16"),
    ],
)
def test_only_canonical_json_is_read(text):
    with pytest.raises(ValueError, match=r"."):
        parse_canonical(text)


@pytest.mark.parametrize(
    "text", [b"null", b"[null]", b"1234567890123456789", b'{"a":[-1234567890123456789]}',
             b"[" * 33 + b"]" * 33, b'{"a":' * 33 + b"1" + b"}" * 33]
)  # fmt: skip
def test_what_parses_but_is_not_allowed_is_found_by_check_json(text):
    value = parse_canonical(text)
    with pytest.raises((TypeError, ValueError), match=r"None|18 digits|deeper than 32"):
        check_json(value, "value")


def test_brackets_in_strings_do_not_count_as_depth():
    value = ["[" * 100, "{" * 100, '\\"[', "null 1234567890123456789012"]
    assert parse_canonical(canonical_json(value)) == value
    assert parse_json(b' { "b" : [ 1 ] , "a" : "]" } ') == {"a": "]", "b": [1]}


def test_sha256_hex_is_hashlib():
    assert sha256_hex(b"abc") == hashlib.sha256(b"abc").hexdigest()
    assert sha256_hex(memoryview(b"")) == hashlib.sha256().hexdigest()


def test_canonical_json_equals_the_standard_library_on_plain_values():
    value = {"k": [1, "x", False], "a": {"n": 2}}
    assert canonical_json(value).decode() == json.dumps(
        value, sort_keys=True, separators=(",", ":")
    )


class Text(str):
    """Equal to a plain text, and none."""

    __slots__ = ()


class Number(enum.IntEnum):
    ONE = 1


BAD = [
    (1.5, "is 1.5 of type float"),
    (None, "is None of type NoneType"),
    (b"x", "is b'x' of type bytes"),
    ({1}, "is {1} of type set"),
    (Number.ONE, "is <Number.ONE: 1> of type Number"),
    (Text("a"), "is 'a' of type Text"),
    (10**18, "must have 18 digits at most"),
    (-(10**18), "must have 18 digits at most"),
    ({2: 1}, "has the key 2; keys must be strings"),
    ({None: 1}, "has the key None; keys must be strings"),
    ({Text("a"): 1}, "has the key 'a'; keys must be strings"),
]


@pytest.mark.parametrize(("bad", "told"), BAD)
@pytest.mark.parametrize(
    ("around", "path"),
    [
        (lambda bad: bad, "value"),
        (lambda bad: [bad], "value[0]"),
        (lambda bad: [1, "a", bad], "value[2]"),
        (lambda bad: [bad, 1], "value[0]"),
        (lambda bad: (1, bad), "value[1]"),
        (lambda bad: {"a": 1, "b": bad}, "value.b"),
        (lambda bad: {"b": bad, "a": True}, "value.b"),
        (lambda bad: {"a": [], "b": {"c": [[], {"d": bad}]}}, "value.b.c[1].d"),
        (lambda bad: [[1], [2], [3, bad]], "value[2][1]"),
    ],
)
def test_what_is_refused_is_told_by_its_path(bad, told, around, path):
    with pytest.raises((TypeError, ValueError)) as caught:
        canonical_json(around(bad))
    assert str(caught.value).startswith(f"{path} {told}")
    assert isinstance(caught.value, ValueError if "digits" in told else TypeError)
    with pytest.raises(type(caught.value)) as checked:
        check_json(around(bad), "value")
    assert str(checked.value) == str(caught.value)


def test_a_long_value_is_told_by_its_beginning():
    with pytest.raises(TypeError) as caught:
        canonical_json({"a": b"x" * 100})
    assert str(caught.value) == (
        f"value.a is b'{'x' * 58} of type bytes; canonical JSON holds integers, strings, booleans, "
        "lists and dicts only"
    )


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize(("depth", "around", "is_taken"), [
    (32, 0, True), (33, 0, False), (29, 3, True), (30, 3, False), (1, 31, True), (1, 32, False),
])  # fmt: skip
def test_levels_count_with_those_around(opening, depth, around, is_taken):
    closing = {"[": "]", '{"a":': "}"}[opening]
    value = json.loads(opening * depth + "1" + closing * depth)
    if is_taken:
        check_json(value, "value", around)
    else:
        with pytest.raises(ValueError, match=r"^JSON is nested deeper than 32 levels$"):
            check_json(value, "value", around)


@pytest.mark.parametrize("at", range(3))
def test_the_deepest_of_several_counts(at):
    value = [json.loads("[" * n + "]" * n) for n in (1, 2, 3)]
    value[at] = json.loads("[" * 31 + "]" * 31)
    canonical_json(value)
    value[at] = [value[at]]
    with pytest.raises(ValueError, match="deeper than 32"):
        canonical_json(value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"[1.25]", "JSON holds '1.25'; integers only"),
        (b"[1e5]", "JSON holds '1e5'; integers only"),
        (b"[NaN]", "JSON holds 'NaN'; integers only"),
        (b"[Infinity]", "JSON holds 'Infinity'; integers only"),
        (b"[-Infinity]", "JSON holds '-Infinity'; integers only"),
        (b"[0." + b"1" * 40 + b"]", f"JSON holds '0.{'1' * 30}'; integers only"),
        (b"[" * 100_000, "JSON is nested deeper than 32 levels"),
    ],
)
def test_what_is_no_json_of_ours_is_told(text, told):
    for read in (parse_json, parse_canonical):
        with pytest.raises(ValueError, match=r".") as caught:
            read(text)
        assert str(caught.value) == told


def test_another_form_is_told():
    with pytest.raises(ValueError, match=r".") as caught:
        parse_canonical(b"[1 ]")
    assert str(caught.value) == (
        "JSON is not in the canonical form (sorted keys, no spaces, ASCII, no doubled key)"
    )
    assert parse_json(b"[1 ]") == [1]
