"""A data folder is replaced within itself: links, mount points, two writers, later releases."""

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from runtime.data import folder as data_folder
from runtime.data.dataset import Dataset, open_splits, write_dataset
from runtime.data.folder import (
    check_replaceable,
    check_writable,
    read_meta,
    replace_data,
    state_of,
)
from runtime.errors import DatasetError, LaterFormatError
from tests.runtime.test_formats import META, samples

KEYED = {**META, "key": "k", "split": {"seed": 1}}


def write(folder, lengths, meta=META, seen=None):
    splits = {"train": samples(lengths, 0), "heldout": samples([6], 1)}
    return write_dataset(folder, splits, meta, seen)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "data", [5, 9, 4])
    return tmp_path / "data"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_every_bit_of_meta_is_seen(folder):
    meta = folder / "meta.json"
    data, expected = meta.read_bytes(), read_meta(folder)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        meta.write_bytes(flipped)
        said = ""
        try:
            found = read_meta(folder)
        except (DatasetError, LaterFormatError) as error:
            said = str(error)
        assert said.startswith(f"{meta} ") or found == expected


def test_data_of_a_later_release_are_neither_read_nor_replaced(folder):
    (folder / "meta.json").write_text(json.dumps({"format": 3, "files": []}))
    before = names(folder)
    for refused in (
        lambda: Dataset.open(folder, "train"),
        lambda: write(folder, [7]),
        lambda: check_replaceable(folder),
        lambda: check_writable(folder),
    ):
        with pytest.raises(LaterFormatError, match=r"is of format 3, .*another \[data\]"):
            refused()
    assert names(folder) == before


@pytest.mark.parametrize("kind", ["link", "dangling link", "mount point"])
def test_a_folder_that_cannot_be_renamed(tmp_path, monkeypatch, kind):
    """A volume of a container has content of its own; renaming a mount point is EBUSY."""
    folder = tmp_path / "data"
    if kind == "link":
        (tmp_path / "disk").mkdir()
    if "link" in kind:
        folder.symlink_to(tmp_path / "disk")
    else:
        (folder / "lost+found").mkdir(parents=True)
    real = {name: getattr(os, name) for name in ("rename", "replace", "rmdir")}

    def refusing(name):
        def move(source, *rest, **options):
            if folder in (Path(str(source)), *(Path(str(item)) for item in rest)):
                raise OSError(errno.EBUSY, "Device or resource busy")
            return real[name](source, *rest, **options)

        return move

    for name in real:
        monkeypatch.setattr(os, name, refusing(name))
    for lengths in ([5], [7, 8]):
        check_writable(folder)
        write(folder, lengths)
        assert Dataset.open(folder, "train").lengths == lengths
    assert folder.is_symlink() == ("link" in kind)
    assert len([name for name in names(folder) if name != "lost+found"]) == 5
    assert len(names(tmp_path)) == 1 + ("link" in kind)


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("/proc/data")
    for place in (tmp_path / "file" / "data", tmp_path / "link"):
        with pytest.raises(DatasetError, match=rf"{place} must take prepared data: .*; "):
            check_writable(place)
    check_writable(tmp_path / "a" / "b")
    assert names(tmp_path) == ["file", "link"]
    write(tmp_path / "data", [5])

    def refuse(*_arguments, **_options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(DatasetError, match=r"must take .*: Read-only file system; choose"):
        check_writable(tmp_path / "data")


def test_what_others_left_in_a_volume_does_not_matter_and_stays(tmp_path):
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".nfs0000001").touch()
    write(tmp_path, [5])
    write(tmp_path, [6])
    assert {"lost+found", ".nfs0000001"} < set(names(tmp_path))
    assert len(names(tmp_path)) == 7


def test_a_killed_writer_leaves_a_folder_that_can_be_written(tmp_path):
    folder = tmp_path / "data"
    write(folder, [5])
    # Before its meta.json, with its staging folder beside the files.
    (folder / "meta.json").unlink()
    (folder / ".meta.json.tmp-abc").mkdir()
    (folder / ".meta.json.tmp-abc" / "train.safetensors").touch()
    with pytest.raises(DatasetError, match="holds no prepared data"):
        Dataset.open(folder, "train")
    check_writable(folder)
    write(folder, [7])
    assert len(names(folder)) == 5


def test_siblings_of_the_folder_are_left_alone(folder):
    for name in ("data.old", "data.new"):
        (folder.parent / name).mkdir()
        (folder.parent / name / "mine").touch()
    write(folder, [7])
    assert names(folder.parent) == ["data", "data.new", "data.old"]


def test_the_same_data_of_another_process_are_taken_for_ones_own(tmp_path):
    folder = tmp_path / "data"
    seen = state_of(folder)
    first = write(folder, [5], KEYED, seen)
    stamp = (folder / "meta.json").stat().st_ino
    assert write(folder, [5], KEYED, seen) == first == read_meta(folder)
    assert (folder / "meta.json").stat().st_ino == stamp


@pytest.mark.parametrize("other", [{"key": "other"}, {"split": {"seed": 2}}])
def test_other_data_of_another_process_are_not_replaced_silently(tmp_path, other):
    folder = tmp_path / "data"
    write(folder, [4], KEYED)
    seen = state_of(folder)
    write(folder, [5], {**KEYED, **other})
    with pytest.raises(DatasetError, match=r"another prepare wrote other data .* run it again"):
        write(folder, [6], KEYED, seen)
    assert Dataset.open(folder, "train").lengths == [5]
    # Nothing came in between.
    write(folder, [6], KEYED, state_of(folder))
    assert Dataset.open(folder, "train").lengths == [6]


def test_a_reader_finds_one_dataset_while_others_write(tmp_path):
    folder = tmp_path / "data"
    ended = threading.Event()

    def write_one(length):
        splits = {"train": samples([length], 0), "heldout": samples([length, 2], 1)}
        write_dataset(folder, splits, META)

    def write_on():
        while not ended.is_set():
            for length in (6, 7, 8):
                write_one(length)

    write_one(5)

    writers = [threading.Thread(target=write_on) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(60):
            train, heldout = open_splits(folder)
            assert heldout.lengths == [*train.lengths, 2]
            assert train.sample(0).features.shape == (train.lengths[0], 16)
    finally:
        ended.set()
        for writer in writers:
            writer.join()
    assert len(names(folder)) == 5


def test_a_folder_that_never_stays_is_refused(folder, monkeypatch):
    """A reader does not look forever."""
    states = iter(range(1000))
    monkeypatch.setattr("runtime.data.dataset.state_of", lambda _: str(next(states)))
    (folder / "meta.json").write_text("")
    with pytest.raises(DatasetError, match="does not stay as it is"):
        Dataset.open(folder, "train")


def test_a_disk_that_refuses_leaves_the_old_data(folder, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    before = names(folder)
    with pytest.raises(DatasetError, match=rf"{folder} must take .*: No space left .*; make room"):
        replace_data(folder, {"train.safetensors": full}, META)
    assert names(folder) == before
    assert Dataset.open(folder, "train").lengths == [5, 9, 4]


def test_without_locks_another_writers_staging_is_left_alone(folder, monkeypatch):
    def refuse(*_arguments):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    staging = folder / f"{data_folder.STAGING}other"
    staging.mkdir()
    write(folder, [7])
    assert staging.exists()
    monkeypatch.undo()
    write(folder, [8])
    assert not staging.exists()


@pytest.mark.parametrize("times", [1, 1000])
def test_a_lock_on_a_folder_that_its_holder_removed_is_none(tmp_path, monkeypatch, times):
    """As of a prepare that only tried whether it may write there."""
    left = iter(range(times))

    def remove(*_arguments):
        if next(left, None) is not None:
            (tmp_path / "data").rmdir()

    monkeypatch.setattr("fcntl.flock", remove)
    if times == 1:
        write(tmp_path / "data", [5])
        assert Dataset.open(tmp_path / "data", "train").lengths == [5]
        return
    with pytest.raises(DatasetError, match="it is removed again and again"):
        write(tmp_path / "data", [5])
