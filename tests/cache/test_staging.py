"""Where versions are made before they are seen, and what of it stays."""

import errno
import os
import time
from pathlib import Path

import pytest

from cache import atomic
from cache.atomic import (
    create_file,
    discard,
    move_folder,
    own_folder,
    replace_file,
    set_aside,
    staging_folder,
    sync_folder,
    write_synced,
)
from cache.place import followed, prefix_of, stage, staged


def test_who_works_touches_his_folder_long_before_it_is_stale():
    assert atomic.STALE_S == 3600
    assert atomic.TOUCH_S == 60


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def refusing(monkeypatch, owner, name, number, when=lambda *args: True):
    """Let the system refuse a call where ``when`` says so."""
    function = getattr(owner, name)

    def act(*args, **kwargs):
        if when(*args):
            raise OSError(number, os.strerror(number))
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, act)


def test_links_are_followed_to_their_end(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("real")
    (tmp_path / "dangling").symlink_to("absent/deep")
    for name, wanted in (
        ("one", "real"),
        ("two", "real"),
        ("dangling", "absent/deep"),
        ("real", "real"),
        ("absent", "absent"),
        # Only the last part is followed: the rest is the system's.
        ("one/below", "one/below"),
    ):
        assert followed(tmp_path / name) == tmp_path / wanted
    assert followed(Path("relative")) == Path("relative")


@pytest.mark.parametrize("label", ["", "pull-"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_version_is_made_beside_its_store(tmp_path, label, is_there):
    store = tmp_path / "m.zarr"
    if is_there:
        store.mkdir()
    with stage(store, label) as staging:
        assert staging.parent == tmp_path
        assert staging.name.startswith(f".m.zarr.tmp-{label}")
        assert names(tmp_path) == sorted([staging.name, *(["m.zarr"] if is_there else [])])
        assert not is_there or names(store) == []
        assert staging.stat().st_mode & 0o777 == 0o700
        (staging / "file").write_bytes(b"x")
    assert names(tmp_path) == (["m.zarr"] if is_there else [])


NOT_FROM_BESIDE = [errno.EXDEV, errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS]


@pytest.mark.parametrize("number", NOT_FROM_BESIDE)
@pytest.mark.parametrize("call", ["rename", "mkdtemp"])
def test_where_nothing_comes_in_from_beside_it_is_made_inside(tmp_path, monkeypatch, number, call):
    store = tmp_path / "m.zarr"
    store.mkdir()
    if call == "rename":
        refusing(monkeypatch, os, "rename", number)
    else:
        refusing(monkeypatch, os, "mkdir", number, lambda path, *_: Path(path).parent == tmp_path)
    with stage(store, "pull-") as staging:
        assert staging.parent == store
        assert staging.name.startswith(".tmp-pull-")
        # What was made beside is gone already.
        assert names(tmp_path) == ["m.zarr"]
        assert names(store) == [staging.name]
    assert names(store) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ENOTDIR])
@pytest.mark.parametrize("call", ["rename", "mkdir"])
def test_what_else_is_refused_is_raised_and_leaves_nothing(tmp_path, monkeypatch, number, call):
    store = tmp_path / "m.zarr"
    store.mkdir()
    refusing(monkeypatch, os, call, number)
    with pytest.raises(OSError, match=os.strerror(number)) as caught, stage(store):
        pass
    assert caught.value.errno == number
    if call == "rename":
        assert caught.value.filename == str(store)
    assert names(tmp_path) == ["m.zarr"]
    assert names(store) == []


@pytest.mark.parametrize("number", NOT_FROM_BESIDE)
def test_a_store_that_is_not_there_is_not_made_inside_itself(tmp_path, monkeypatch, number):
    refusing(monkeypatch, os, "mkdir", number)
    with pytest.raises(OSError, match=os.strerror(number)), stage(tmp_path / "m.zarr"):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt("x")])
def test_what_is_made_stays_after_an_error_where_that_is_asked_for(
    tmp_path, monkeypatch, inside, error
):
    store = tmp_path / "m.zarr"
    store.mkdir()
    if inside:
        refusing(monkeypatch, os, "rename", errno.EXDEV)
    seen = []

    def is_left(found):
        seen.append(found)
        return isinstance(found, ValueError)

    with pytest.raises(type(error), match="x"), stage(store, "", is_left) as staging:
        raise error
    assert seen == [error]
    assert staging.exists() == isinstance(error, ValueError)


def test_what_is_staged_is_found_beside_and_inside(tmp_path):
    store = tmp_path / "m.zarr"
    store.mkdir()
    beside = [tmp_path / f".m.zarr.tmp-{name}" for name in ("pull-b", "a", "pull-c")]
    inside = [store / f".tmp-{name}" for name in ("pull-a", "z")]
    for path in (*beside, *inside):
        path.mkdir()
    for other in (tmp_path / ".n.zarr.tmp-a", tmp_path / "m.zarr.tmp-a", store / ("0" * 64)):
        other.mkdir()
    assert staged(store) == sorted([*beside, *inside])
    assert staged(store, "pull-") == sorted([beside[0], beside[2], inside[0]])
    assert staged(store, "none") == []
    assert [prefix_of(path, store) for path in beside] == [".m.zarr.tmp-"] * 3
    assert [prefix_of(path, store) for path in inside] == [".tmp-"] * 2
    # A store that is not there, or is a file, has nothing inside.
    assert staged(tmp_path / "n.zarr") == [tmp_path / ".n.zarr.tmp-a"]
    (tmp_path / "n.zarr").write_bytes(b"")
    assert staged(tmp_path / "n.zarr") == [tmp_path / ".n.zarr.tmp-a"]
    with pytest.raises(FileNotFoundError):
        staged(tmp_path / "absent" / "m.zarr")


def test_what_is_set_aside_gets_another_name_once(tmp_path):
    folder = tmp_path / ".m.zarr.tmp-abc"
    folder.mkdir()
    aside = set_aside(folder, ".m.zarr.tmp-")
    assert aside == tmp_path / ".m.zarr.tmp-gone-abc"
    assert names(tmp_path) == [aside.name]
    assert set_aside(aside, ".m.zarr.tmp-") == aside
    assert names(tmp_path) == [aside.name]
    with pytest.raises(FileNotFoundError):
        set_aside(folder, ".m.zarr.tmp-")


def test_what_is_discarded_is_renamed_first_and_then_removed(tmp_path, monkeypatch):
    folder = tmp_path / ".m.zarr.tmp-abc"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_bytes(b"x")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path, ignore_errors: None)
        discard(folder, ".m.zarr.tmp-")
    assert names(tmp_path) == [".m.zarr.tmp-gone-abc"]
    discard(tmp_path / ".m.zarr.tmp-gone-abc", ".m.zarr.tmp-")
    assert names(tmp_path) == []
    # What is gone, or may not be moved, is nobody's trouble.
    discard(folder, ".m.zarr.tmp-")
    folder.mkdir()
    refusing(monkeypatch, os, "rename", errno.EACCES)
    discard(folder, ".m.zarr.tmp-")
    assert folder.exists()


@pytest.mark.parametrize(("age", "stays"), [(3500, True), (3700, False), (-100, True)])
def test_a_leftover_of_an_hour_is_removed(tmp_path, age, stays):
    left = tmp_path / ".m.zip.tmp-left"
    left.mkdir()
    os.utime(left, (time.time() - age,) * 2)
    with staging_folder(tmp_path / "m.zip") as staging:
        assert left.exists() == stays
        assert staging.parent == tmp_path
    assert names(tmp_path) == [left.name] * stays


def test_each_maker_has_a_folder_of_its_own(tmp_path):
    with own_folder(tmp_path, "a-") as one, own_folder(tmp_path, "a-") as two:
        assert one != two
        assert one.parent == two.parent == tmp_path
        assert one.name.startswith("a-")
    assert names(tmp_path) == []
    with pytest.raises(FileNotFoundError), own_folder(tmp_path / "absent", "a-"):
        pass


def test_what_is_replaced_is_named_when_that_fails(tmp_path, monkeypatch):
    target = tmp_path / "zarr.json"
    target.write_bytes(b"old")
    for owner, call in ((os, "fsync"), (os, "replace")):
        with staging_folder(target) as staging, monkeypatch.context() as patch:
            refusing(patch, owner, call, errno.EIO)
            with pytest.raises(OSError, match="Input/output error") as caught:
                replace_file(target, b"new", staging)
        assert caught.value.filename == str(target)
        assert target.read_bytes() == b"old"
        assert names(tmp_path) == ["zarr.json"]


def test_what_was_made_or_was_there_is_told_apart(tmp_path, monkeypatch):
    """With links and without them; nothing stays in the staging folder."""
    for has_links in (True, False):
        target = tmp_path / f"{has_links}.json"
        with staging_folder(target) as staging, monkeypatch.context() as patch:
            if not has_links:
                refusing(patch, os, "link", errno.EPERM)
            assert create_file(target, b"one", staging) is True
            assert names(staging) == []
            assert create_file(target, b"two", staging) is False
            assert names(staging) == []
        assert target.read_bytes() == b"one"


@pytest.mark.parametrize("has_links", [True, False])
def test_what_was_made_is_on_the_disk_and_its_name_after_it(tmp_path, monkeypatch, has_links):
    if not has_links:
        refusing(monkeypatch, os, "link", errno.EPERM)
    target, fsync, synced = tmp_path / "zarr.json", os.fsync, []

    def noting(descriptor):
        found = os.fstat(descriptor)
        synced.append((found.st_ino, found.st_size if target.exists() else None))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    with staging_folder(target) as staging:
        create_file(target, b"bytes", staging)
    inode, folder = target.stat().st_ino, tmp_path.stat().st_ino
    assert (inode, None if has_links else 5) in synced
    assert synced[-1][0] == folder
    synced.clear()
    with staging_folder(target) as staging:
        replace_file(target, b"other", staging)
    # The file before it has its name, the folder's names after it.
    assert [found[0] for found in synced] == [target.stat().st_ino, folder]


def test_a_file_that_another_one_put_there_meanwhile_is_not_taken_away(tmp_path, monkeypatch):
    target = tmp_path / "zarr.json"
    refusing(monkeypatch, os, "link", errno.EPERM)
    fsync, calls = os.fsync, []

    def replaced(descriptor):
        calls.append(descriptor)
        if len(calls) == 2:
            (tmp_path / "other").write_bytes(b"other")
            (tmp_path / "other").rename(target)
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", replaced)
    with staging_folder(target) as staging, pytest.raises(OSError, match="No space left"):
        create_file(target, b"one", staging)
    assert target.read_bytes() == b"other"


@pytest.mark.parametrize(
    ("number", "is_there"),
    [(errno.ENOTEMPTY, True), (errno.EEXIST, True), (errno.EXDEV, False), (errno.EACCES, False)],
)
def test_a_folder_that_is_in_the_way_is_no_error(tmp_path, monkeypatch, number, is_there):
    (tmp_path / "one").mkdir()
    refusing(monkeypatch, os, "rename", number)
    if is_there:
        assert move_folder(tmp_path / "one", tmp_path / "two") is False
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            move_folder(tmp_path / "one", tmp_path / "two")
    assert names(tmp_path) == ["one"]


CANNOT_SYNC = ["EINVAL", "EBADF", "ENOTSUP", "EOPNOTSUPP", "ENOSYS"]


@pytest.mark.parametrize("name", [*CANNOT_SYNC, "EIO", "ENOSPC", "EDQUOT", "EROFS"])
def test_a_folder_that_cannot_be_synced_is_an_error_where_the_disk_fails(
    tmp_path, monkeypatch, name
):
    before = open_files()
    with monkeypatch.context() as patch:
        refusing(patch, os, "fsync", getattr(errno, name))
        if name in CANNOT_SYNC:
            sync_folder(tmp_path)
        else:
            with pytest.raises(OSError, match=r".") as caught:
                sync_folder(tmp_path)
            assert caught.value.errno == getattr(errno, name)
    sync_folder(tmp_path)
    assert open_files() == before
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "absent")


def test_a_file_whose_sync_fails_is_told_and_closed(tmp_path, monkeypatch):
    before = open_files()
    # Of a file nothing is forgiven, unlike of a folder.
    for number in (errno.EIO, errno.EINVAL):
        with monkeypatch.context() as patch:
            refusing(patch, os, "fsync", number)
            with pytest.raises(OSError, match=os.strerror(number)):
                write_synced(tmp_path / str(number), b"x")
    write_synced(tmp_path / "file", b"bytes")
    assert (tmp_path / "file").read_bytes() == b"bytes"
    assert open_files() == before
