import json
import random

import pytest

from runtime.data.answer_store import AnswerStore
from runtime.data.answers import Answer
from runtime.errors import DatasetError

DIGEST = "5" * 64


def store(folder, digest=DIGEST, dtype="float32"):
    return AnswerStore(folder, digest, dtype)


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
