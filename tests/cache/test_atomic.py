import errno
import os

import pytest

from cache.atomic import (
    create_file,
    move_folder,
    replace_file,
    staging_folder,
    sync_folder,
    temp_prefix,
    write_synced,
)


def test_a_staging_folder_stands_beside_and_is_taken_away(tmp_path):
    target = tmp_path / "m.zarr"
    with staging_folder(target) as staging:
        assert staging.parent == tmp_path
        assert staging.name.startswith(temp_prefix(target))
        (staging / "file").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_staging_folder_is_taken_away_after_an_error(tmp_path):
    with pytest.raises(KeyboardInterrupt, match="stop"), staging_folder(tmp_path / "m.zarr"):
        raise KeyboardInterrupt("stop")
    assert list(tmp_path.iterdir()) == []


def test_what_killed_ones_left_of_the_same_target_is_removed(tmp_path):
    target = tmp_path / "m.zip"
    for name, age in ((".m.zip.tmp-a", 3700), (".m.zip.tmp-b", 3500), (".n.zip.tmp-c", 3700)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_bytes(b"x")
        when = (tmp_path / name).stat().st_mtime - age
        os.utime(tmp_path / name, (when, when))
    with staging_folder(target):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {".m.zip.tmp-b", ".n.zip.tmp-c"}


def test_replace_file_swaps_the_content(tmp_path):
    target = tmp_path / "zarr.json"
    with staging_folder(target) as staging:
        replace_file(target, b"one", staging)
        replace_file(target, b"two", staging)
    assert target.read_bytes() == b"two"


def test_create_file_leaves_what_is_there(tmp_path):
    target = tmp_path / "zarr.json"
    with staging_folder(target) as staging:
        assert create_file(target, b"one", staging)
        assert not create_file(target, b"two", staging)
    assert target.read_bytes() == b"one"


def test_move_folder_leaves_the_winner(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_synced(tmp_path / name / "file", name.encode())
    assert move_folder(tmp_path / "one", tmp_path / "target")
    assert not move_folder(tmp_path / "two", tmp_path / "target")
    assert (tmp_path / "target" / "file").read_bytes() == b"one"
    assert (tmp_path / "two" / "file").exists()


def test_move_folder_passes_other_errors_on(tmp_path):
    (tmp_path / "one").mkdir()
    with pytest.raises(FileNotFoundError, match="absent"):
        move_folder(tmp_path / "one", tmp_path / "absent" / "target")


def test_write_synced_overwrites_nothing(tmp_path):
    write_synced(tmp_path / "file", b"x")
    with pytest.raises(FileExistsError, match="file"):
        write_synced(tmp_path / "file", b"y")


@pytest.mark.parametrize("number", ["EPERM", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EMLINK", "EACCES"])
def test_create_file_works_without_hard_links(tmp_path, monkeypatch, number):
    def refuse(*_arguments, **_options):
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    monkeypatch.setattr(os, "link", refuse)
    target = tmp_path / "zarr.json"
    with staging_folder(target) as staging:
        assert create_file(target, b"one", staging)
        assert not create_file(target, b"two", staging)
    assert target.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [target]


def test_what_create_file_cannot_write_is_taken_away_again(tmp_path, monkeypatch):
    def refuse(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", refuse)
    target = tmp_path / "zarr.json"
    with staging_folder(target) as staging:
        sync, synced = os.fsync, []

        def full(descriptor):
            synced.append(descriptor)
            if len(synced) == 2:
                refuse()
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            create_file(target, b"one", staging)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "raises"), [("EINVAL", False), ("EBADF", False), ("EIO", True)])
def test_a_folder_that_cannot_be_synced_is_left_unless_the_disk_fails(
    tmp_path, monkeypatch, number, raises
):
    def refuse(_descriptor):
        raise OSError(getattr(errno, number), "refused")

    monkeypatch.setattr(os, "fsync", refuse)
    if raises:
        with pytest.raises(OSError, match="refused"):
            sync_folder(tmp_path)
    else:
        sync_folder(tmp_path)
