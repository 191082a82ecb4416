"""Files of answers that are handed on: what is taken from them, and what is not."""

import hashlib
import json
import lzma
import os
import random

import pytest

from runtime.data.answer import Answer
from runtime.data.shipped_answers import (
    ShippedAnswers,
    check_packable,
    check_shipped,
    pack_answers,
)
from runtime.errors import ConfigError, DatasetError

DIGEST = "5" * 64
HEADER = {"target": DIGEST, "dtype": "float32", "max_new_tokens": 5, "made_by": "a command"}
PROMPTS = [[1, 2], [3], [4, 5, 6]]
ANSWERS = [
    Answer(token_ids=[7, 8, 9], ended=True),
    Answer(token_ids=[7, 8, 9, 7, 8], ended=False),
    Answer(token_ids=[9], ended=True),
]


def decode(tokens):
    return " ".join(f"t{token}" for token in tokens)


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "new" / "answers.jsonl.xz"
    assert pack_answers(path, HEADER, PROMPTS, ANSWERS, decode) == path.stat().st_size
    return path


def shipped(path, digest=DIGEST, dtype="float32"):
    return ShippedAnswers(path, digest, dtype, vocab_size=10)


def test_the_file_as_its_page_has_it(packed):
    """Read by hand, without the reader."""
    head, body = lzma.decompress(packed.read_bytes()).split(b"\n", 1)
    header = json.loads(head)
    seal = header.pop("document_sha256")
    plain = json.dumps(header, sort_keys=True, separators=(",", ":"))
    assert seal == hashlib.sha256(plain.encode()).hexdigest()
    body_digest = hashlib.sha256(body).hexdigest()
    assert header == {**HEADER, "format": 1, "answers": 3, "sha256": body_digest}
    lines = [json.loads(line) for line in body.splitlines()]
    assert lines[1] == {
        "prompt": hashlib.sha256(b"[3]").hexdigest(),
        "question": "t3",
        "text": "t7 t8 t9 t7 t8",
        "tokens": [7, 8, 9, 7, 8],
        "ended": False,
    }
    assert [line["question"] for line in lines] == ["t1 t2", "t3", "t4 t5 t6"]


def test_answers_serve_the_limits_that_they_can(packed):
    assert shipped(packed).find([[3], [9], [1, 2]], [5, 5, 5]) == {0: ANSWERS[1], 2: ANSWERS[0]}
    assert shipped(packed).find([[1, 2], [3]], [9, 9]) == {0: ANSWERS[0]}
    cut = Answer(token_ids=[7, 8], ended=False)
    assert shipped(packed).find([[1, 2], [3]], [2, 2]) == {0: cut, 1: cut}


def test_the_same_answers_make_the_same_file(packed, tmp_path):
    again = tmp_path / "again.xz"
    pack_answers(again, HEADER, PROMPTS, ANSWERS, decode)
    assert again.read_bytes() == packed.read_bytes()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"digest": "6" * 64}, "its answers are of target 555555555555, the run's is 666666666666"),
        ({"dtype": "bfloat16"}, "its answers are of dtype float32, the run's is bfloat16"),
    ],
)
def test_those_of_another_target_are_not_taken(packed, capsys, other, said):
    assert shipped(packed, **other).find(PROMPTS, [5] * 3) == {}
    assert capsys.readouterr().err == f"{packed} is not used: {said}\n"


def test_damage_is_told_in_one_line_and_nothing_is_taken(packed, capsys):
    whole = packed.read_bytes()
    draw = random.Random(1)
    for _ in range(60):
        place, bit = draw.randrange(len(whole)), 1 << draw.randrange(8)
        packed.write_bytes(
            whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :]
            if draw.random() < 0.6
            else whole[: draw.randrange(len(whole))]
        )
        assert shipped(packed).find(PROMPTS, [5] * 3) in ({}, dict(enumerate(ANSWERS)))
        said = capsys.readouterr().err
        assert said in (
            f"{packed} is not used: it is damaged; fetch it again, or make it anew with "
            "--pack-answers\n",
            "",
        )
    packed.write_bytes(whole)
    assert shipped(packed).find(PROMPTS, [5] * 3) == dict(enumerate(ANSWERS))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"tokens": [9]', b'"tokens": [8]'),
        (b'"a command"', b'"b command"'),
        (b'"ended": true', b'"ended": null'),
        (b'"answers": 3', b'"answers": 2'),
    ],
)
def test_what_was_written_by_another_hand_is_damage(packed, capsys, old, new):
    text = lzma.decompress(packed.read_bytes())
    assert old in text
    packed.write_bytes(lzma.compress(text.replace(old, new, 1)))
    assert shipped(packed).find(PROMPTS, [5] * 3) == {}
    assert "it is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{}\n", lzma.compress(b""), lzma.compress(b"[]\n{}\n")])
def test_other_files_are_damage(tmp_path, capsys, content):
    path = tmp_path / "f"
    path.write_bytes(content)
    assert shipped(path).find(PROMPTS, [5] * 3) == {}
    assert "it is damaged" in capsys.readouterr().err


def sealed(lines):
    """A file of another packer's: whatever its lines are, its digests are right."""
    body = b"".join(line + b"\n" for line in lines)
    header = {**HEADER, "format": 1, "answers": len(lines)}
    header["sha256"] = hashlib.sha256(body).hexdigest()
    plain = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    header["document_sha256"] = hashlib.sha256(plain).hexdigest()
    return lzma.compress(json.dumps(header).encode() + b"\n" + body)


def record(**changes):
    """A line for the prompt [3]; None takes a key out."""
    good = {"prompt": hashlib.sha256(b"[3]").hexdigest(), "tokens": [0, 9], "ended": True}
    return {key: value for key, value in (good | changes).items() if value is not None}


IDS = "expected a token id of the target, 0 to 9"
BAD = [
    (record(tokens="12"), "found tokens = '12', expected a list of token ids"),
    (record(tokens={"0": 1}), "found tokens = {'0': 1}, expected a list of token ids"),
    (record(tokens=None), "found no 'tokens', expected one"),
    (record(tokens=[1, 10]), f"found tokens[1] = 10, {IDS}"),
    (record(tokens=[-1]), f"found tokens[0] = -1, {IDS}"),
    (record(tokens=[2, 3, True]), f"found tokens[2] = True, {IDS}"),
    (record(tokens=[4.0]), f"found tokens[0] = 4.0, {IDS}"),
    (record(tokens=["4"]), f"found tokens[0] = '4', {IDS}"),
    (record(tokens=[[4]]), f"found tokens[0] = [4], {IDS}"),
    (record(ended=None), "found no 'ended', expected one"),
    (record(ended=1), "found ended = 1, expected true or false"),
    (record(ended="no"), "found ended = 'no', expected true or false"),
    (record(prompt=None), "found no 'prompt', expected one"),
    (record(prompt=[3]), "found prompt = [3], expected a SHA-256 in small hex digits"),
    (record(prompt="abc"), "found prompt = 'abc', expected a SHA-256 in small hex digits"),
    ([1, 2], "found [1, 2], expected an object"),
    ("text", "found 'text', expected an object"),
]


@pytest.mark.parametrize(("bad", "said"), BAD)
def test_what_another_packer_sealed_wrongly_is_not_used(tmp_path, capsys, bad, said):
    """Of all its records none, the good ones neither: who wrote one wrongly may have others."""
    path = tmp_path / "f.xz"
    path.write_bytes(sealed([json.dumps(one).encode() for one in (record(), bad)]))
    assert shipped(path).find([[3]], [5]) == {}
    assert capsys.readouterr().err == f"{path} is not used: record 2: {said}\n"


@pytest.mark.parametrize("line", [b"", b"{", b"\xff"])
def test_a_sealed_line_that_is_no_json_is_not_used(tmp_path, capsys, line):
    path = tmp_path / "f.xz"
    path.write_bytes(sealed([line]))
    assert shipped(path).find([[3]], [5]) == {}
    said = capsys.readouterr().err
    assert said.startswith(f"{path} is not used: record 1: found ")
    assert said.endswith(", expected an object\n")


def test_another_packers_good_records_are_used(tmp_path):
    path = tmp_path / "f.xz"
    path.write_bytes(sealed([json.dumps(record(more=1)).encode()]))
    assert shipped(path).find([[3]], [5]) == {0: Answer(token_ids=[0, 9], ended=True)}


def test_a_later_format_is_named(packed, capsys):
    header = {"format": 2, "target": DIGEST, "dtype": "float32"}
    plain = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    header["document_sha256"] = hashlib.sha256(plain).hexdigest()
    packed.write_bytes(lzma.compress(json.dumps(header).encode() + b"\n"))
    assert shipped(packed).find(PROMPTS, [5] * 3) == {}
    assert capsys.readouterr().err == f"{packed} is not used: its format is 2, not 1\n"


def test_a_file_that_is_not_there_is_refused(packed, tmp_path):
    check_shipped([str(packed)])
    with pytest.raises(ConfigError, match=r"data\.shipped = .*must name files that are there"):
        check_shipped([str(packed), str(tmp_path / "missing.xz")])


PLACES = [
    check_packable,
    (lambda path: pack_answers(path, HEADER, PROMPTS, ANSWERS, decode)),
]


@pytest.mark.parametrize("packing", PLACES)
@pytest.mark.parametrize("place", ["file/a", "file/deep/down/a.xz", "/proc/a.xz", "x" * 300])
def test_a_place_that_takes_nothing_is_named(tmp_path, place, packing):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"must take the answers .*choose another file"):
        packing(tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


OTHER_FILES = [
    b"",
    b"a text\n",
    b'{"prompt": "a question"}\n',
    lzma.compress(b'{"prompt": "a question"}\n'),
    lzma.compress(b"[1]\n"),
    b"\xfd7zXZ\x00 and then no more",
]


@pytest.mark.parametrize("packing", PLACES)
@pytest.mark.parametrize("content", OTHER_FILES)
def test_a_file_that_holds_something_else_stays(tmp_path, content, packing):
    path = tmp_path / "mine"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"must be a new file or .*found a file that holds no"):
        packing(path)
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("packing", PLACES)
@pytest.mark.parametrize(("place", "found"), [(".", "a folder"), ("pipe", "a file that")])
def test_what_is_no_file_stays(tmp_path, place, found, packing):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=f"found {found}"):
        packing(tmp_path / place)
    assert (tmp_path / "pipe").is_fifo()
    assert len(list(tmp_path.iterdir())) == 1


def test_answers_that_are_damaged_behind_their_header_may_be_packed_anew(packed):
    whole = packed.read_bytes()
    packed.write_bytes(whole[: len(whole) * 2 // 3] + b"harm")
    pack_answers(packed, HEADER, PROMPTS, ANSWERS, decode)
    assert packed.read_bytes() == whole


def test_trying_a_place_makes_nothing(tmp_path, packed):
    before = sorted(tmp_path.rglob("*"))
    check_packable(packed)
    check_packable(tmp_path / "some" / "deep" / "file.xz")
    assert sorted(tmp_path.rglob("*")) == before
