"""What a run renames into place is on the disk before, and its new name after."""

import os

import pytest

from runtime.data.answer import Answer
from runtime.data.answer_store import AnswerStore
from runtime.files.sealed import write_sealed
from runtime.training.metrics import MetricsLog
from tests.cache.test_durability import Disk
from tests.runtime.crash_cases import CASES


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_data_and_then_their_meta(tmp_path, disk, monkeypatch):
    case = CASES["data"]
    rename, before = os.replace, []

    def recorded(source, target, *args, **kwargs):
        if os.fspath(target).endswith("/meta.json"):
            before.append(disk.synced_at(tmp_path / "data")[0] > disk.moves[-1][1])
        rename(source, target, *args, **kwargs)

    monkeypatch.setattr(os, "replace", recorded)
    for length in (10, 20):
        disk.moves.clear()
        case.write(tmp_path / "data", length)
        names = [target.name for target, _, _ in disk.moves]
        stems = [name.partition(".")[0] for name in names]
        assert stems == ["train", "train", "heldout", "heldout", "meta"]
        disk.check(*names)
    # The names of the files are on the disk before the document that names them.
    assert before == [True, True]


def test_old_data_go_after_the_new_meta_is_on_the_disk(tmp_path, disk, monkeypatch):
    case = CASES["data"]
    case.write(tmp_path / "data", 10)
    disk.moves.clear()
    unlink, gone = os.unlink, []

    def recorded(path, *args, **kwargs):
        synced = disk.synced_at(tmp_path / "data")[0]
        gone.append([target.name for target, at, _ in disk.moves if at < synced])
        unlink(path, *args, **kwargs)

    monkeypatch.setattr(os, "unlink", recorded)
    case.write(tmp_path / "data", 20)
    old = [done for done in gone if done]
    assert len(old) >= 4
    assert all(done[-1] == "meta.json" for done in old)


def test_a_checkpoint_in_anothers_place(tmp_path, disk):
    case = CASES["checkpoint in another's place"]
    case.make(tmp_path)
    disk.moves.clear()
    case.act(tmp_path, 0)
    disk.moves = [move for move in disk.moves if move[0].parent.name == "checkpoints"]
    disk.check("step-00000020")


def test_a_drafter_and_then_its_config(tmp_path, disk):
    for value in (1, 2):
        disk.moves.clear()
        CASES["drafter"].write(tmp_path, value)
        names = [target.name for target, _, _ in disk.moves]
        assert sorted(names[:2]) == ["model.safetensors", "target.json"]
        disk.check(*names[:2], "config.json")


def test_a_document_and_the_rows_of_a_log(tmp_path, disk):
    write_sealed(tmp_path / "run.json", {"format": 2})
    MetricsLog(tmp_path / "metrics.jsonl", first_step=0, total_steps=1, shown={}).close()
    disk.check("run.json", "metrics.jsonl")


def test_a_copy_of_a_target(tmp_path, disk):
    CASES["unpacked copy"].make(tmp_path)
    copy = CASES["unpacked copy"].copy(tmp_path)
    disk.moves = [move for move in disk.moves if move[0].parent.name == "targets"]
    disk.check(copy.name)


def test_answers_when_they_are_added(tmp_path, disk):
    store = AnswerStore(tmp_path, "5" * 64, "float32", vocab_size=200)
    for prompt in (1, 2):
        store.add([[prompt]], [Answer(token_ids=[1], ended=True)])
        assert disk.synced_at(store.path)[1] == store.path.stat().st_mtime_ns
    # Its name, too.
    assert disk.synced_at(tmp_path)[0] > 0
