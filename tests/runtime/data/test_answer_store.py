import fcntl
import hashlib
import json
import os
import random
import threading
from pathlib import Path

import pytest

from runtime.data.answer import Answer
from runtime.data.answer_store import AnswerStore
from runtime.errors import DatasetError

DIGEST = "5" * 64


def store(folder, digest=DIGEST, dtype="float32"):
    return AnswerStore(folder, digest, dtype, vocab_size=200)


def answer(count, ended):
    return Answer(token_ids=list(range(100, 100 + count)), ended=ended)


def test_an_answer_serves_every_limit_that_it_can(tmp_path):
    store(tmp_path / "new" / "folder").add([[1], [2]], [answer(5, True), answer(5, False)])
    kept = store(tmp_path / "new" / "folder")
    for limit in range(1, 9):
        found = kept.find([[1], [2], [3]], [limit] * 3)
        assert found[0] == (answer(5, True) if limit >= 5 else answer(limit, False))
        assert found.get(1) == (answer(limit, False) if limit <= 5 else None)
        assert 2 not in found


def test_a_longer_answer_takes_over(tmp_path):
    store(tmp_path).add([[1]], [answer(5, False)])
    assert not store(tmp_path).find([[1]], [9])
    store(tmp_path).add([[1]], [answer(7, True)])
    assert store(tmp_path).find([[1]], [9]) == {0: answer(7, True)}
    assert store(tmp_path).find([[1]], [4]) == {0: answer(4, False)}


def test_each_target_and_dtype_has_its_own(tmp_path):
    store(tmp_path).add([[1]], [answer(3, True)])
    for other in (store(tmp_path, "6" * 64), store(tmp_path, dtype="bfloat16")):
        assert not other.find([[1]], [9])
        # Not even under the other's name.
        other.path.write_bytes(store(tmp_path).path.read_bytes())
        assert not other.find([[1]], [9])


def test_what_is_asked_twice_is_found_twice(tmp_path):
    store(tmp_path).add([[1, 2]], [answer(3, True)])
    assert store(tmp_path).find([[1, 2], [12], [1, 2]], [3, 3, 2]) == {
        0: answer(3, True),
        2: answer(2, False),
    }


def test_a_stop_at_any_byte_costs_its_own_batch_alone(tmp_path, capsys):
    kept = store(tmp_path)
    kept.add([[1], [2]], [answer(3, True), answer(2, False)])
    first = kept.path.read_bytes()
    kept.add([[3]], [answer(4, True)])
    whole = kept.path.read_bytes()
    for cut in range(len(first), len(whole)):
        kept.path.write_bytes(whole[:cut])
        found = kept.find([[1], [2], [3]], [2] * 3)
        # The line feed alone may be missing.
        assert sorted(found) == ([0, 1, 2] if cut == len(whole) - 1 else [0, 1])
        kept.add([[4]], [answer(1, True)])
        assert {0, 1} <= kept.find([[1], [4]], [2] * 2).keys()
    assert f"{kept.path}: 1 lines cannot be used, the first is line 2 (damaged)" in (
        capsys.readouterr().err
    )


def test_damage_is_never_taken(tmp_path):
    kept = store(tmp_path)
    for prompt in range(4):
        kept.add([[prompt]], [answer(3 + prompt, True)])
    whole = kept.path.read_bytes()
    draw = random.Random(1)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        kept.path.write_bytes(damaged)
        found = kept.find([[prompt] for prompt in range(4)], [9] * 4)
        assert len(found) >= 2
        assert all(found[row] == answer(3 + row, True) for row in found)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"format": 2, "batches": []}', "of format 2, not 1"),
        (b"[]", "damaged"),
        (b"7", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"[" * 100_000, "damaged"),
        (json.dumps({"format": 1, "sha256": "0" * 64, "answers": []}).encode(), "damaged, or of"),
        (b'{"format": 1, "answers": [{"prompt": [], "tokens": "a"}]}', "damaged"),
    ],
)
def test_lines_that_cannot_be_used_are_told_of(tmp_path, capsys, line, why):
    kept = store(tmp_path)
    kept.path.write_bytes(line)
    kept.add([[1]], [answer(3, True)])
    assert kept.find([[1]], [3]) == {0: answer(3, True)}
    told = capsys.readouterr().err
    assert f"the first is line 1 ({why}" in told
    assert "are answered again" not in told
    assert "what they kept is answered again" in told


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"tokens": "7"}, "found tokens = '7', expected a list of token ids"),
        (
            {"tokens": [7, 200]},
            "found tokens[1] = 200, expected a token id of the target, 0 to 199",
        ),
        ({"ended": 0}, "found ended = 0, expected true or false"),
        ({"prompt": ["a"]}, "found prompt = ['a'], expected a SHA-256 in small hex digits"),
    ],
)
def test_a_sealed_line_of_bad_records_is_passed_over(tmp_path, capsys, bad, why):
    """Whoever wrote it; the lines around it are taken."""
    kept = store(tmp_path)
    kept.add([[1]], [answer(3, True)])
    good = {"prompt": hashlib.sha256(b"[2]").hexdigest(), "tokens": [199], "ended": True}
    answers = [good, good | bad]
    whole = json.dumps([DIGEST, "float32", answers], sort_keys=True, separators=(",", ":"))
    line = {"format": 1, "sha256": hashlib.sha256(whole.encode()).hexdigest(), "answers": answers}
    with kept.path.open("a") as stream:
        stream.write(json.dumps(line) + "\n")
    kept.add([[3]], [answer(2, True)])
    assert kept.find([[1], [2], [3]], [5] * 3) == {0: answer(3, True), 2: answer(2, True)}
    assert f"the first is line 2 (record 2: {why});" in capsys.readouterr().err


def test_a_folder_that_takes_nothing_is_refused_before_answering(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "within", "/proc/answers"):
        with pytest.raises(DatasetError, match=r"must take the answers .*set \[data\] answers to"):
            store(folder).check_writable()
    store(tmp_path / "good").check_writable()
    assert store(tmp_path / "good").find([[1]], [1]) == {}


def test_a_store_that_cannot_be_read_is_refused(tmp_path):
    store(tmp_path).path.mkdir()
    with pytest.raises(DatasetError, match=r"cannot be read .*another folder"):
        store(tmp_path).find([[1]], [1])


def test_a_line_is_as_documented(tmp_path):
    kept = store(tmp_path, "ab" * 32, "bfloat16")
    kept.add([[1, 2], []], [answer(2, True), answer(0, False)])
    assert kept.path == tmp_path / f"{'ab' * 32}-bfloat16.jsonl"
    (line,) = kept.path.read_bytes().splitlines(keepends=True)
    assert line.endswith(b"\n")
    found = json.loads(line)
    prompts = [hashlib.sha256(text).hexdigest() for text in (b"[1, 2]", b"[]")]
    answers = [
        {"prompt": prompts[0], "tokens": [100, 101], "ended": True},
        {"prompt": prompts[1], "tokens": [], "ended": False},
    ]
    whole = json.dumps(["ab" * 32, "bfloat16", answers], sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(whole.encode()).hexdigest()
    assert found == {"format": 1, "sha256": digest, "answers": answers}


def test_of_two_answers_that_serve_the_first_kept_is_taken(tmp_path):
    """So that what is found does not depend on who asked meanwhile."""
    kept = store(tmp_path)
    for tokens in ([1, 2, 3], [4, 5, 6]):
        kept.add([[7]], [Answer(token_ids=tokens, ended=True)])
    assert kept.find([[7]], [3])[0].token_ids == [1, 2, 3]


def test_all_answers_of_a_batch_and_of_all_batches_are_found(tmp_path):
    kept = store(tmp_path)
    for first in (0, 3, 6):
        prompts = [[first + i] for i in range(3)]
        kept.add(prompts, [answer(first + i + 1, True) for i in range(3)])
    found = kept.find([[8 - i] for i in range(9)], [9] * 9)
    assert found == {i: answer(9 - i, True) for i in range(9)}
    with pytest.raises(ValueError, match="zip"):
        kept.add([[1], [2]], [answer(1, True)])


def test_a_line_is_added_with_the_lock_in_one_write_and_is_on_the_disk(tmp_path, monkeypatch):
    kept, done = store(tmp_path), []
    real = {"flock": fcntl.flock, "write": os.write, "fsync": os.fsync}

    def flock(stream, kind):
        done.append(("flock", kind))
        real["flock"](stream, kind)

    def write(descriptor, data):
        done.append(("write", len(data)))
        return real["write"](descriptor, data)

    def fsync(descriptor):
        done.append(("fsync", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        real["fsync"](descriptor)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "fsync", fsync)
    sizes = [0]
    for prompt in range(2):
        kept.add([[prompt]], [answer(3, True)])
        sizes.append(kept.path.stat().st_size)
    expected = [
        ("flock", fcntl.LOCK_EX),
        ("write", sizes[1]),
        ("fsync", str(kept.path)),
        ("fsync", str(tmp_path)),
        ("flock", fcntl.LOCK_EX),
        ("write", sizes[2] - sizes[1]),
        ("fsync", str(kept.path)),
    ]
    assert done == expected, "the name once, the content each time"


def test_writers_wait_for_each_other(tmp_path):
    kept = store(tmp_path)
    kept.add([[0]], [answer(1, True)])
    with kept.path.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        adding = threading.Thread(target=kept.add, args=([[1]], [answer(1, True)]), daemon=True)
        adding.start()
        adding.join(0.2)
        assert adding.is_alive()
    adding.join(10)
    assert len(kept.find([[0], [1]], [1, 1])) == 2


def test_without_locks_answers_are_kept_all_the_same(tmp_path, monkeypatch):
    def refuse(*_arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    store(tmp_path).add([[1]], [answer(2, True)])
    assert store(tmp_path).find([[1]], [2])


def test_what_a_write_left_out_is_written_again_as_a_line_of_its_own(tmp_path, monkeypatch, capsys):
    kept, write, sizes = store(tmp_path), os.write, iter([10, 20])
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: next(sizes, None)]))
    kept.add([[1]], [answer(3, True)])
    monkeypatch.undo()
    kept.add([[2]], [answer(2, True)])
    assert kept.find([[1], [2]], [3, 3]) == {0: answer(3, True), 1: answer(2, True)}
    assert (
        f"{kept.path}: 2 lines cannot be used, the first is line 1 (damaged); what they kept"
        in (capsys.readouterr().err)
    )


def test_blank_lines_are_none_and_lines_are_numbered_with_them(tmp_path, capsys):
    kept = store(tmp_path)
    kept.add([[1]], [answer(3, True)])
    kept.path.write_bytes(b"\n \n" + kept.path.read_bytes() + b"\n")
    assert len(kept.find([[1]], [3])) == 1
    assert capsys.readouterr().err == ""
    kept.path.write_bytes(kept.path.read_bytes() + b'{"format": 2}\ntorn\n')
    assert len(kept.find([[1]], [3])) == 1
    assert capsys.readouterr().err == (
        f"{kept.path}: 2 lines cannot be used, the first is line 5 (of format 2, not 1); what they "
        "kept is answered again\n"
    )


def test_trying_writes_nothing_and_torn_lines_stay_as_they_are(tmp_path):
    kept = store(tmp_path / "new")
    kept.check_writable()
    assert kept.path.read_bytes() == b""
    kept.path.write_bytes(b"torn")
    kept.check_writable()
    assert kept.path.read_bytes() == b"torn"


def test_no_file_stays_open(tmp_path):
    kept = store(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        kept.add([[1]], [answer(3, True)])
        kept.find([[1]], [3])
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_was_said_and_what_helps(tmp_path):
    (tmp_path / "file").write_text("")
    refused = store(tmp_path / "file")
    for call in (refused.check_writable, lambda: refused.add([[1]], [answer(1, True)])):
        with pytest.raises(DatasetError) as caught:
            call()
        assert str(caught.value) == (
            f"{refused.path} must take the answers (File exists); make room, or set [data] answers "
            "to a folder that can be written"
        )
    store(tmp_path).path.mkdir()
    with pytest.raises(DatasetError) as caught:
        store(tmp_path).find([[1]], [1])
    assert str(caught.value) == (
        f"{store(tmp_path).path} cannot be read (Is a directory); set [data] answers to another "
        "folder"
    )
