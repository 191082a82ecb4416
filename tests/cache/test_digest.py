import hashlib
import json

import pytest

from cache.digest import (
    MAX_DEPTH,
    canonical_json,
    check_json,
    parse_canonical,
    parse_json,
    sha256_hex,
)


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
