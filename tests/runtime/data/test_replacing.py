"""Which folders data may take the place of, what goes, what stays and what is said."""

import json
import os
from pathlib import Path

import pytest

from runtime.data.dataset import Dataset, write_dataset
from runtime.data.folder import (
    check_replaceable,
    check_writable,
    checked_path,
    path_of,
    read_meta,
    replace_data,
    state_of,
)
from runtime.errors import DatasetError
from runtime.files.sealed import seal
from tests.runtime.test_formats import META, samples

HEX = "0123456789abcdef"
PREPARE = "run: python -m runtime.prepare --config FILE"


def write(folder, lengths, meta=META):
    return write_dataset(folder, {"train": samples(lengths, 0), "heldout": samples([6], 1)}, meta)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "found",
    [
        [],
        ["lost+found", ".snapshot", ".DS_Store", ".nfs000000000abc"],
        [".meta.json.tmp-abc"],
        [f"train.{HEX}.safetensors"],
        [f"heldout.{HEX}.safetensors", f"train.features.{HEX}.safetensors"],
        [f"train.features.{HEX}.safetensors", "lost+found"],
        ["meta.json", "train.safetensors", "heldout.safetensors"],
        ["meta.json", "train.safetensors", "train.features.safetensors", ".DS_Store"],
        ["meta.json", f"train.{HEX}.safetensors", "heldout.features.safetensors"],
    ],
)
def test_what_may_be_replaced(tmp_path, found):
    for name in found:
        (tmp_path / name).touch()
    check_replaceable(tmp_path)
    assert names(tmp_path) == sorted(found)


@pytest.mark.parametrize(
    "found",
    [
        ["meta.json"],
        ["meta.json", "lost+found"],
        ["train.safetensors", f"heldout.{HEX}.safetensors"],
        [f"train.{HEX}.safetensors", "thesis.txt"],
        ["meta.json", f"train.{HEX}.safetensors", "thesis.txt"],
        ["meta.json", f"test.{HEX}.safetensors"],
        ["meta.json", f"train.{HEX.upper()}.safetensors"],
        [f"train.{HEX[:-1]}.safetensors"],
        [f"train.{HEX}0.safetensors"],
        [f"train.{HEX}.features.safetensors"],
        [f"my-train.{HEX}.safetensors"],
        [f"train.{HEX}.safetensors.bak"],
        [f"trainx{HEX}.safetensors"],
        [".hidden"],
        ["meta.json.tmp-abc"],
    ],
)
def test_what_may_not_be_replaced(tmp_path, found):
    for name in found:
        (tmp_path / name).touch()
    for refused in (check_replaceable, check_writable, lambda folder: write(folder, [5])):
        with pytest.raises(DatasetError) as caught:
            refused(tmp_path)
        assert str(caught.value) == (
            f"{tmp_path} must be empty or hold prepared data, found other files; choose another "
            "[data] folder"
        )
    assert names(tmp_path) == sorted(found)


def test_all_that_the_new_meta_does_not_name_goes_and_what_systems_added_stays(tmp_path):
    write(tmp_path, [5, 9])
    old = f"train.features.{HEX}.safetensors"
    for name in (old, "heldout.safetensors", ".DS_Store"):
        (tmp_path / name).touch()
    before = names(tmp_path)
    meta = write(tmp_path, [5, 7])
    now = {path_of(tmp_path, name, meta).name for name in meta["sha256"]}
    assert set(names(tmp_path)) == {*now, "meta.json", ".DS_Store"}
    assert len(now) == 4
    # The split that did not change keeps its files.
    assert len(now & set(before)) == 2
    # The same data once more change nothing.
    content = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert write(tmp_path, [5, 7]) == meta == read_meta(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == content


def test_a_file_is_named_by_its_digest_and_of_format_1_plainly(tmp_path):
    digest = "fedcba9876543210" + "0" * 48
    meta = {"format": 2, "sha256": {"train.features.safetensors": digest, "train.safetensors": 7}}
    name = "train.features.safetensors"
    assert path_of(tmp_path, name, meta) == (
        tmp_path / "train.features.fedcba9876543210.safetensors"
    )
    assert path_of(tmp_path, name, {**meta, "format": 1}) == tmp_path / name
    for unnamed in ("train.safetensors", "heldout.safetensors"):
        with pytest.raises(DatasetError) as caught:
            path_of(tmp_path, unnamed, meta)
        assert str(caught.value) == (
            f"{tmp_path}/meta.json is damaged: it must name {unnamed} by SHA-256; {PREPARE}"
        )


def test_every_byte_of_a_file_is_read_before_its_path_is_given(tmp_path):
    meta = write(tmp_path, [5])
    path = checked_path(tmp_path, "train.safetensors", meta)
    assert path == path_of(tmp_path, "train.safetensors", meta)
    content = path.read_bytes()
    for place in (0, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 0x80
        path.write_bytes(damaged)
        with pytest.raises(DatasetError) as caught:
            checked_path(tmp_path, "train.safetensors", meta)
        said = f"{path} is not the file that meta.json names by SHA-256; {PREPARE}"
        assert str(caught.value) == said
    # Sixteen digits of a digest stand in the name, and all of them count.
    path.write_bytes(content)
    digest = meta["sha256"]["train.safetensors"]
    meta["sha256"]["train.safetensors"] = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    with pytest.raises(DatasetError, match="is not the file"):
        checked_path(tmp_path, "train.safetensors", meta)
    path.unlink()
    with pytest.raises(DatasetError, match=rf"^{path} cannot be read \(.*; {PREPARE}$"):
        checked_path(tmp_path, "train.safetensors", meta)


def test_the_state_of_a_folder_is_the_digest_of_its_meta(tmp_path):
    assert state_of(tmp_path) == state_of(tmp_path / "none") == ""
    (tmp_path / "file").touch()
    assert state_of(tmp_path / "file") == ""
    write(tmp_path / "a", [5])
    first = state_of(tmp_path / "a")
    assert len(first) == 64
    write(tmp_path / "b", [5])
    assert state_of(tmp_path / "b") == first
    write(tmp_path / "a", [5], {**META, "context": 65})
    assert state_of(tmp_path / "a") != first


def test_a_meta_that_cannot_be_read_is_refused(tmp_path):
    assert read_meta(tmp_path) is None
    (tmp_path / "meta.json").mkdir()
    for refused in (state_of, read_meta):
        with pytest.raises(
            DatasetError, match=rf"^{tmp_path}/meta.json cannot be .*Is a directory.*; {PREPARE}$"
        ):
            refused(tmp_path)


def test_meta_says_what_it_was_given_and_its_own_format_and_digests(tmp_path):
    about = {**META, "format": 7, "sha256": {"x": "y"}, "counts": {"train": 1}, "more": [1]}
    files = {"train.safetensors": lambda path: path.write_bytes(b"abc")}
    meta = replace_data(tmp_path / "data", files, about)
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert meta == {
        **META,
        "format": 2,
        "sha256": {"train.safetensors": digest},
        "counts": {"train": 1},
        "more": [1],
    }
    assert read_meta(tmp_path / "data") == meta
    assert names(tmp_path / "data") == ["meta.json", f"train.{digest[:16]}.safetensors"]


def test_data_without_a_format_are_of_the_first(tmp_path):
    meta = {**META, "sha256": {}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert read_meta(tmp_path) == {"format": 1, **meta}
    (tmp_path / "meta.json").write_bytes(seal({**meta, "format": 2}))
    assert read_meta(tmp_path)["format"] == 2


def test_whole_numbers_may_stand_for_others_and_what_no_run_needs_may_lack(tmp_path):
    meta = {**META, "sha256": {}, "feature_scale": [1, 2]}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    assert read_meta(tmp_path)["feature_scale"] == [1, 2]
    optional = ("counts", "dropped", "noted", "places", "split", "settings", "template")
    for key in optional:
        (tmp_path / "meta.json").write_text(json.dumps({**meta, key: []}))
        with pytest.raises(
            DatasetError, match=rf"written: {key} is \[\], not like {{.*; {PREPARE}"
        ):
            read_meta(tmp_path)
    (tmp_path / "meta.json").write_text("{}")
    with pytest.raises(DatasetError, match="written: the document has no 'context'"):
        read_meta(tmp_path)


def test_trying_leaves_nothing_and_takes_away_only_what_it_made(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    check_writable(tmp_path / "there" / "a" / "b" / "c")
    assert names(tmp_path / "there") == []
    check_writable(tmp_path / "there")
    assert names(tmp_path) == ["there"]
    write(tmp_path / "data", [5])
    content = {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()}
    check_writable(tmp_path / "data")
    assert {path.name: path.read_bytes() for path in (tmp_path / "data").iterdir()} == content
    # Another process writes beside it by now.
    rmdir = Path.rmdir

    def late(path):
        (tmp_path / "new" / "other").mkdir(exist_ok=True)
        rmdir(path)

    monkeypatch.setattr(Path, "rmdir", late)
    check_writable(tmp_path / "new" / "data")
    assert names(tmp_path / "new") == ["other"]


def test_what_is_tried_is_a_rename_too(tmp_path, monkeypatch):
    """Some volumes take new files and no renames."""

    def refuse(*_arguments, **_options):
        raise OSError(1, "Operation not permitted")

    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(DatasetError, match=rf"^{tmp_path}/data must take prepared data: .*permit"):
        check_writable(tmp_path / "data")


def test_data_that_went_meanwhile_are_written_anew(tmp_path):
    folder = tmp_path / "data"
    write_dataset(folder, {"train": samples([4], 0), "heldout": []}, META)
    seen = state_of(folder)
    (folder / "meta.json").unlink()
    write_dataset(folder, {"train": samples([7], 0), "heldout": []}, META, seen)
    assert Dataset.open(folder, "train").lengths == [7]


def test_what_killed_writers_left_goes_be_it_a_file_or_a_folder(tmp_path):
    (tmp_path / ".meta.json.tmp-a").mkdir()
    (tmp_path / ".meta.json.tmp-a" / "train.safetensors").touch()
    (tmp_path / ".meta.json.tmp-b").touch()
    (tmp_path / ".nfs1").touch()
    check_writable(tmp_path)
    assert names(tmp_path) == [".nfs1"]
