"""Stores that are links, mount points or something else; staging folders that are taken away."""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

import cache
from cache import place
from cache.atomic import own_folder, temp_prefix
from cache.errors import StoreNotFoundError, StoreReadError, StoreWriteError
from cache.place import stage
from tests.cache.samples import entries, files_of, published, truth_of


class Disks:
    """Folders that stand on disks of their own: nothing is renamed into or out of one."""

    def __init__(self, monkeypatch, number=errno.EXDEV):
        self.folders = []
        self.refused = []
        for name in ("rename", "replace", "link"):
            monkeypatch.setattr(os, name, self._refusing(getattr(os, name), number))

    def of(self, path):
        path = Path(path).absolute()
        return next((disk for disk in self.folders if disk in path.parents), None)

    def _refusing(self, function, number):
        def act(source, target, *args, **kwargs):
            if self.of(source) != self.of(target):
                self.refused.append((source, target))
                raise OSError(number, os.strerror(number), str(source), None, str(target))
            return function(source, target, *args, **kwargs)

        return act


@pytest.fixture
def far(tmp_path):
    """A cache on the first disk, also packed."""
    store = published(tmp_path / "far" / "f.zarr", entries(2, scale=30))
    cache.pack(store, tmp_path / "far" / "f.zip")
    return store


WRITES = {
    "publish": lambda near, far: cache.open_store(near, writable=True).publish(entries(2)),
    "pull": lambda near, far: cache.pull(str(far / "f.zarr"), near).version,
    "unpack": lambda near, far: cache.unpack(far / "f.zip", near).version,
    "push": lambda near, far: cache.push(cache.open_store(far / "f.zarr"), str(near)).version,
}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("number", [errno.EXDEV, errno.EBUSY, errno.EACCES])
@pytest.mark.parametrize("begun", [False, True])
def test_a_mount_point_is_written_from_within(tmp_path, far, monkeypatch, write, number, begun):
    near = tmp_path / "near" / "m.zarr"
    near.mkdir(parents=True)
    if begun:
        published(near, entries(1, scale=4))
    disks = Disks(monkeypatch, number)
    disks.folders.append(near)
    version = WRITES[write](near, tmp_path / "far")
    store = cache.open_store(near, writable=True)
    assert store.current == version
    assert store.verify() == []
    assert store.strangers() == []
    assert names(tmp_path / "near") == ["m.zarr"]
    assert {refused[1].parent for refused in disks.refused} == {near}
    if begun:
        first = next(line.id for line in store.versions() if line.id != version)
        store.use(first)
        if number == errno.EACCES:
            # So looks what is another user's.
            assert store.gc(1, min_age_s=-1).left == (f"{near / version} stays: Permission denied",)
            return
        assert store.gc(1, min_age_s=-1).removed == (version,)
        assert store.verify() == []
        assert names(near) == sorted([first, "zarr.json"])


@pytest.mark.parametrize("write", WRITES)
def test_a_mount_point_in_a_folder_that_may_not_be_written(tmp_path, far, monkeypatch, write):
    near = tmp_path / "near" / "m.zarr"
    near.mkdir(parents=True)
    make = place.own_folder

    def refuse(parent, *args):
        if parent == near.parent:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(parent))
        return make(parent, *args)

    monkeypatch.setattr(place, "own_folder", refuse)
    version = WRITES[write](near, tmp_path / "far")
    assert cache.open_store(near).current == version
    assert names(near) == sorted([version, "zarr.json"])


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("begun", [False, True])
def test_a_link_is_followed(tmp_path, far, monkeypatch, write, begun):
    disk, near = tmp_path / "disk", tmp_path / "near" / "m.zarr"
    disk.mkdir()
    near.parent.mkdir()
    if begun:
        published(disk / "real.zarr", entries(1, scale=4))
    near.symlink_to(disk / "real.zarr")
    Disks(monkeypatch).folders.append(disk)
    version = WRITES[write](near, tmp_path / "far")
    assert near.is_symlink()
    assert names(near.parent) == ["m.zarr"]
    assert names(disk) == ["real.zarr"]
    store = cache.open_store(near, writable=True)
    assert (store.current, store.location, store.verify()) == (version, str(near), [])
    assert truth_of(store) == truth_of(cache.open_store(disk / "real.zarr"))
    assert store.sidecar_dir(version) == disk / "sidecars" / version


def test_a_zip_is_packed_where_its_link_leads(tmp_path, far, monkeypatch):
    disk, near = tmp_path / "disk", tmp_path / "near"
    disk.mkdir()
    near.mkdir()
    (near / "m.zip").symlink_to(disk / "real.zip")
    Disks(monkeypatch).folders.append(disk)
    for _ in range(2):
        cache.pack(far, near / "m.zip")
        assert (near / "m.zip").is_symlink()
        assert names(disk) == ["real.zip"]
    assert cache.open_store(near / "m.zip").current == far.current


def nothing(path):
    path.symlink_to(path.parent / "not-mounted" / "m.zarr")


def a_file(path):
    path.write_bytes(b"")


def link_to_a_file(path):
    (path.parent / "aside").mkdir()
    (path.parent / "aside" / "file").write_bytes(b"")
    path.symlink_to(path.parent / "aside" / "file")


def loop(path):
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("made", "written", "read"),
    [
        (nothing, r"is a link to .*not-mounted/m\.zarr, and .* is no folder: mount", "no cache at"),
        (
            a_file,
            "Not a directory; .*see what stands there",
            r"m\.zarr is a file; a cache is a fold",
        ),
        (link_to_a_file, "file: Not a directory; .*see what stands there", "is a file; a cache is"),
        (loop, "Too many levels .*mend the links", "Too many levels .*mend the links"),
    ],
)
def test_what_is_no_store_is_told_before_the_work(tmp_path, far, monkeypatch, made, written, read):
    near = tmp_path / "near" / "m.zarr"
    near.parent.mkdir()
    made(near)
    before = sorted(near.parent.rglob("*"))
    chunks = []
    for module in ("unpublished.encode_chunk", "receive.sound_chunk"):
        monkeypatch.setattr(f"cache.{module}", lambda *args: chunks.append(args))
    for write in WRITES.values():
        with pytest.raises((StoreWriteError, StoreReadError), match=written) as caught:
            write(near, tmp_path / "far")
        assert "\n" not in str(caught.value)
    with pytest.raises((StoreNotFoundError, StoreReadError), match=read):
        cache.open_store(near)
    assert chunks == []
    assert sorted(near.parent.rglob("*")) == before


def test_check_writable_leaves_no_trace(tmp_path):
    cache.open_store(tmp_path / "deep" / "down" / "m.zarr", writable=True).check_writable()
    assert list(tmp_path.iterdir()) == []
    store = published(tmp_path / "m.zarr")
    before = files_of(store)
    store.check_writable()
    assert files_of(store) == before
    assert names(tmp_path) == ["m.zarr"]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreWriteError, match="Not a directory"):
        cache.open_store(tmp_path / "file" / "deep" / "m.zarr", writable=True).check_writable()


def test_a_folder_is_touched_as_long_as_it_is_worked_in(tmp_path, monkeypatch):
    monkeypatch.setattr("cache.atomic.TOUCH_S", 0.01)
    with own_folder(tmp_path, ".m.zarr.tmp-") as folder:
        os.utime(folder, (1, 1))
        waited = threading.Event()
        while folder.stat().st_mtime == 1:
            waited.wait(0.01)
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "cache-touch"]


@pytest.mark.parametrize("error", [KeyboardInterrupt("x"), OSError("x")])
def test_a_folder_is_left_where_that_is_asked_for(tmp_path, error):
    with (
        pytest.raises(type(error), match="x"),
        own_folder(tmp_path, "a", lambda found: isinstance(found, KeyboardInterrupt)),
    ):
        raise error
    assert len(list(tmp_path.iterdir())) == isinstance(error, KeyboardInterrupt)


@pytest.mark.parametrize("write", ["publish", "pull", "unpack"])
@pytest.mark.parametrize("step", range(1, 14))
def test_work_whose_folder_is_taken_away_is_done_again(tmp_path, far, monkeypatch, write, step):
    """As by a gc, or by another pull that was first, before any file is forced to the disk."""
    near = tmp_path / "near" / "m.zarr"
    near.parent.mkdir()
    fsync, count = os.fsync, []

    def taking(descriptor):
        count.append(descriptor)
        if len(count) == step:
            for path in near.parent.glob(temp_prefix(near) + "*"):
                shutil.move(path, tmp_path / "taken")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", taking)
    version = WRITES[write](near, tmp_path / "far")
    assert len(count) >= step
    store = cache.open_store(near)
    assert (store.current, store.verify()) == (version, [])
    assert names(near.parent) == ["m.zarr"]


def test_what_is_always_taken_away_ends_in_one_line(tmp_path, monkeypatch):
    with stage(tmp_path / "m.zarr") as staging:
        assert staging.parent == tmp_path

    def taking(new, folder):
        shutil.rmtree(folder)
        raise FileNotFoundError(errno.ENOENT, "gone", str(folder))

    monkeypatch.setattr("cache.writer.write_version", taking)
    with pytest.raises(StoreWriteError, match="what is made there vanishes; stop what removes it"):
        published(tmp_path / "m.zarr")
    assert list(tmp_path.iterdir()) == []
