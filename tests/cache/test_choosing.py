"""Choosing a version and looking at one that stands: what is written, returned and undone."""

import errno
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

import cache
from cache import writer
from cache.errors import (
    DamagedEntryError,
    StoreReadError,
    StoreWriteError,
    VersionNotFoundError,
)
from cache.format import root_document
from tests.cache.samples import entries, files_of, published, written_by_hand


@pytest.fixture
def store(tmp_path):
    """Two versions; the second is current."""
    store = published(tmp_path / "m.zarr", entries(1))
    store.publish(entries(2, scale=2))
    return store


@pytest.fixture
def ids(store):
    second = store.current
    return next(line.id for line in store.versions() if line.id != second), second


def root_of(store):
    path = Path(store.location, "zarr.json")
    return path.read_bytes() if path.exists() else None


def aged(store, version):
    os.utime(Path(store.location, version), (1, 1))


def age(store, version):
    return time.time() - Path(store.location, version).stat().st_mtime


def no_staging(monkeypatch):
    def refuse(**_options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)


def test_what_is_current_already_is_chosen_without_a_write(store, ids, monkeypatch):
    first, second = ids
    before = Path(store.location, "zarr.json").stat()
    no_staging(monkeypatch)
    aged(store, second)
    assert store.writer().finish(second) == 0
    assert age(store, second) < 60
    aged(store, first)
    assert store.writer().finish(first, make_current=False) == 0
    assert age(store, first) < 60
    assert store.use(second) == second
    assert Path(store.location, "zarr.json").stat() == before
    with pytest.raises(StoreWriteError, match="Read-only file system"):
        store.writer().finish(first)
    assert cache.open_store(store.location).current == second


def test_how_much_of_the_root_was_written_is_returned(store, ids):
    first, second = ids
    assert store.writer().finish(first) == len(root_document(first))
    assert root_of(store) == root_document(first)
    assert store.writer().finish(first) == 0
    assert store.writer().finish(second, make_current=False) == 0
    assert root_of(store) == root_document(first)
    Path(store.location, "zarr.json").unlink()
    assert store.writer().finish(second, make_current=False) == len(root_document(None))
    assert root_of(store) == root_document(None)
    assert store.writer().finish(second, make_current=False) == 0
    assert store.writer().finish(second) == len(root_document(second))


@pytest.mark.parametrize("make_current", [True, False])
@pytest.mark.parametrize("has_root", [True, False])
def test_a_version_that_is_not_there_is_not_chosen(store, ids, make_current, has_root):
    if not has_root:
        Path(store.location, "zarr.json").unlink()
    before = root_of(store)
    absent = "0" * 64
    for version in (absent, ids[0]):
        shutil.rmtree(Path(store.location, version), ignore_errors=True)
        with pytest.raises(VersionNotFoundError) as caught:
            store.writer().finish(version, make_current=make_current)
        assert str(caught.value) == f"version {version} was removed by a gc"
        assert caught.value.version == version
        assert root_of(store) == before
    # A folder without its document is no version either.
    Path(store.location, absent).mkdir()
    with pytest.raises(VersionNotFoundError):
        store.writer().finish(absent)
    assert root_of(store) in (before, root_document(None))


def taken_as_the_root_is_written(monkeypatch, store, version, after=lambda: None):
    """A gc without locks takes the version then, and ``after`` is called once it is written."""
    replace, calls = writer.replace_file, []

    def racing(path, data, staging):
        calls.append(data)
        if len(calls) == 1:
            shutil.rmtree(Path(store.location, version))
        replace(path, data, staging)
        if len(calls) == 1:
            after()

    monkeypatch.setattr(writer, "replace_file", racing)
    return calls


def test_a_choice_of_what_goes_meanwhile_is_undone(store, ids, monkeypatch):
    first, second = ids
    calls = taken_as_the_root_is_written(monkeypatch, store, first)
    with pytest.raises(VersionNotFoundError, match="was removed by a gc"):
        store.use(first)
    assert root_of(store) == root_document(second)
    assert calls == [root_document(first), root_document(second)]
    assert store.current == second


def test_the_first_choice_of_what_goes_meanwhile_leaves_none_current(store, ids, monkeypatch):
    first, _ = ids
    Path(store.location, "zarr.json").unlink()
    taken_as_the_root_is_written(monkeypatch, store, first)
    with pytest.raises(VersionNotFoundError, match="was removed by a gc"):
        store.writer().finish(first)
    assert root_of(store) == root_document(None)


def test_a_choice_that_another_one_has_replaced_is_not_undone(store, ids, monkeypatch):
    first, _ = ids
    third = store.publish(entries(3, scale=3), make_current=False)
    path = Path(store.location, "zarr.json")
    taken_as_the_root_is_written(
        monkeypatch, store, first, lambda: path.write_bytes(root_document(third))
    )
    with pytest.raises(VersionNotFoundError, match="was removed by a gc"):
        store.use(first)
    assert root_of(store) == root_document(third)


def test_what_stands_is_sound_and_made_young(store, ids):
    first, second = ids
    aged(store, first)
    aged(store, second)
    assert store.writer().stands(first)
    assert age(store, first) < 60
    assert age(store, second) > 60
    for absent in ("0" * 64, "1" * 64):
        assert not store.writer().stands(absent)
        Path(store.location, "1" * 64).mkdir(exist_ok=True)


def test_what_stands_damaged_is_refused_unless_it_may_be_replaced(store, ids):
    first, second = ids
    chunk = Path(store.location, first, "spans", "c", "0")
    whole = Path(store.location, second, "spans", "c", "0").read_bytes()
    chunk.write_bytes(whole)
    aged(store, first)
    place = Path(store.location, first)
    with pytest.raises(DamagedEntryError) as caught:
        store.writer().stands(first)
    assert caught.value.file == str(chunk)
    assert str(caught.value).endswith(
        f"; it is not used. Delete the folder {place}, then build, pull or unpack it again"
    )
    assert not store.writer().stands(first, replaceable=True)
    # What is damaged is not made young.
    assert age(store, first) > 60
    assert store.writer().stands(second, replaceable=True)
    chunk.unlink()
    chunk.symlink_to(chunk.name)
    with pytest.raises(StoreReadError, match="Too many levels of symbolic links"):
        store.writer().stands(first)
    assert not store.writer().stands(first, replaceable=True)


def test_the_entry_at_fault_is_told(store, ids):
    second = ids[1]
    other = published(Path(store.location).parent / "n.zarr", entries(2, scale=6))
    key = f"{second}/spans/c/0"
    swapped = files_of(other)[key.replace(second, other.current)]
    Path(store.location, key).write_bytes(swapped)
    with pytest.raises(DamagedEntryError) as caught:
        store.publish(entries(2, scale=2))
    assert caught.value.entry == "causal/q4"
    seen = []
    store.publish(entries(2, scale=2), on_damage=seen.append)
    assert [error.entry for error in seen] == ["causal/q4"]


def test_a_version_is_installed_once_and_found_there_again(tmp_path):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    version = written_by_hand(tmp_path / "one", entries())
    written_by_hand(tmp_path / "two", entries())
    store.writer().install(tmp_path / "one" / version, version)
    place = tmp_path / "m.zarr" / version
    inode = place.stat().st_ino
    os.utime(place, (1, 1))
    store.writer().install(tmp_path / "two" / version, version)
    # The first one stays, and is young again.
    assert place.stat().st_ino == inode
    assert age(store, version) < 60
    assert (tmp_path / "two" / version / "zarr.json").exists()
    assert not (tmp_path / "one" / version).exists()


def test_what_vanishes_again_and_again_is_tried_ten_times(tmp_path):
    store, calls = cache.open_store(tmp_path / "m.zarr", writable=True), []
    with pytest.raises(StoreWriteError) as caught:
        store.writer().attempt(calls.append)
    assert len(calls) == len(set(calls)) == 10
    assert str(caught.value) == (
        f"cannot write {tmp_path}/m.zarr: what is made there vanishes; stop what removes it, such "
        "as a gc"
    )
    assert caught.value.file == f"{tmp_path}/m.zarr"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("done", [0, "", False])
def test_work_that_is_done_is_done_once_whatever_it_returns(tmp_path, done):
    store, calls = cache.open_store(tmp_path / "m.zarr", writable=True), []

    def work(staging):
        calls.append(staging)
        return done

    assert store.writer().attempt(work) == done
    assert len(calls) == 1


def test_work_that_fails_in_its_folder_is_not_tried_again(tmp_path):
    calls = []

    def work(staging):
        calls.append(staging)
        raise OSError(errno.ENOSPC, "No room", str(staging / "file"))

    with pytest.raises(StoreWriteError, match="No room"):
        cache.open_store(tmp_path / "m.zarr", writable=True).writer().attempt(work)
    assert len(calls) == 1


def test_a_root_that_cannot_be_read_is_a_read_that_failed(tmp_path):
    store = published(tmp_path / "m.zarr", entries(1))
    root = tmp_path / "m.zarr" / "zarr.json"
    whole = root.read_bytes()
    root.unlink()
    root.symlink_to("zarr.json")
    with pytest.raises(StoreReadError) as caught:
        store.publish(entries(2))
    assert caught.value.file == str(root)
    root.unlink()
    root.write_bytes(whole)
    assert store.verify() == []


def test_what_could_not_be_written_is_named_and_no_staging_folder(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    monkeypatch.setattr("cache.unpublished.write_synced", full)
    with pytest.raises(StoreWriteError) as caught:
        store.publish(entries(1))
    assert str(caught.value) == (
        f"cannot write {tmp_path}/m.zarr: No space left on device; nothing was changed; make room "
        "or choose another folder, then run it again"
    )
    assert caught.value.file == f"{tmp_path}/m.zarr"
    assert caught.value.errno == errno.ENOSPC


def test_a_store_is_made_with_the_folders_around_it_or_not_at_all(tmp_path, monkeypatch):
    store = cache.open_store(tmp_path / "a" / "b" / "m.zarr", writable=True)
    assert store.publish(entries(1)) == cache.open_store(store.location).current
    link = tmp_path / "n.zarr"
    link.symlink_to(tmp_path / "unmounted" / "n.zarr")
    linked = cache.open_store(link, writable=True)
    for write in (lambda: linked.publish(entries(1)), linked.check_writable):
        with pytest.raises(StoreWriteError) as caught:
            write()
        assert str(caught.value) == (
            f"{link} is a link to {tmp_path}/unmounted/n.zarr, and {tmp_path}/unmounted is no "
            "folder: mount its disk or make the folder, then run it again"
        )
        assert (caught.value.file, caught.value.errno) == (str(link), errno.ENOENT)
    assert not (tmp_path / "unmounted").exists()
    (tmp_path / "unmounted").mkdir()
    cache.open_store(link, writable=True).check_writable()
    assert list((tmp_path / "unmounted").iterdir()) == []


def test_what_goes_as_it_is_looked_at_does_not_stand(store, ids, monkeypatch):
    first, second = ids
    findings = writer.findings_of

    def removing(source, version):
        shutil.rmtree(Path(store.location, first), ignore_errors=True)
        return findings(source, version)

    monkeypatch.setattr(writer, "findings_of", removing)
    assert not store.writer().stands(first)
    assert store.writer().stands(second)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.EROFS])
def test_a_version_that_cannot_be_made_young_stands_all_the_same(store, ids, monkeypatch, number):
    """It may be another user's."""

    def refuse(path, *_arguments, **_options):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "utime", refuse)
    for version in ids:
        assert store.writer().stands(version)
        assert store.use(version) == version
        assert cache.open_store(store.location).current == version


def test_a_root_that_cannot_be_written_is_named(store, ids, monkeypatch):
    root = f"{store.location}/zarr.json"

    def refuse(*_arguments, **_options):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StoreWriteError) as caught:
        store.use(ids[0])
    assert str(caught.value) == (
        f"cannot write {root}: Input/output error; nothing was changed; see that its disk or mount "
        "is sound, then run it again"
    )
    assert (caught.value.file, caught.value.errno) == (root, errno.EIO)
    assert isinstance(caught.value.__cause__, OSError)


def test_what_is_current_now_is_read_from_the_disk(store, ids):
    first, second = ids
    writing = store.writer()
    for current in (first, second, None):
        Path(store.location, "zarr.json").write_bytes(root_document(current))
        assert writing.stored_current() == current
    Path(store.location, "zarr.json").write_bytes(b"{")
    with pytest.raises(DamagedEntryError) as caught:
        writing.stored_current()
    assert caught.value.file == f"{store.location}/zarr.json"
    Path(store.location, "zarr.json").unlink()
    assert writing.stored_current() is None
