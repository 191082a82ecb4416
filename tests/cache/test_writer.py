"""Publishing under trouble: other writers, kills, full disks, and gc."""

import errno
import os
import resource
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest

import cache
from cache import writer
from cache.errors import DamagedEntryError, StoreWriteError, VersionNotFoundError
from tests.cache import crash
from tests.cache.samples import entries, files_of, published

ROOT = Path(__file__).parents[2]


def test_kill_9_leaves_the_old_state_or_the_new_one(tmp_path):
    assert crash.kills(tmp_path / "kill", 12) == {"right": 12}


def test_processes_publish_at_once_without_loss(tmp_path):
    assert crash.writers(tmp_path / "race", 8) == {"right": 8}


def test_threads_publish_at_once_without_loss(tmp_path):
    ids = []

    def publish(scale):
        store = cache.open_store(tmp_path / "m.zarr", writable=True)
        ids.append(store.publish(entries(2, scale=scale)))

    threads = [threading.Thread(target=publish, args=(1 + i // 2,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = cache.open_store(tmp_path / "m.zarr")
    assert {line.id for line in store.versions()} == set(ids)
    assert len(set(ids)) == 4
    assert store.verify() == []
    assert store.current in ids


@pytest.mark.parametrize(
    ("number", "step"),
    [*((errno.ENOSPC, step) for step in range(6)), (errno.EACCES, 0), (errno.EROFS, 3)],
)
def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path, monkeypatch, number, step):
    store = published(tmp_path / "m.zarr")
    before, current = files_of(store), store.current
    calls = []
    write = writer.write_synced

    def refuse(path, data):
        calls.append(path)
        if len(calls) > step:
            raise OSError(number, os.strerror(number), str(path))
        write(path, data)

    monkeypatch.setattr(writer, "write_synced", refuse)
    monkeypatch.setattr("cache.atomic.write_synced", refuse)
    with pytest.raises(StoreWriteError, match=os.strerror(number)) as caught:
        store.publish(entries(4, scale=50))
    assert caught.value.errno == number
    assert isinstance(caught.value, OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["m.zarr"]
    assert cache.open_store(store.location).current == current
    kept = {key: data for key, data in files_of(store).items() if key in before}
    assert kept == before
    assert store.verify() == []


def test_a_full_disk_during_the_first_publish_leaves_no_store(tmp_path, monkeypatch):
    def refuse(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("cache.atomic.write_synced", refuse)
    monkeypatch.setattr(writer, "replace_file", refuse)
    with pytest.raises(StoreWriteError, match="No space left"):
        published(tmp_path / "m.zarr")
    left = list(tmp_path.rglob("zarr.json"))
    assert all(path.parent != tmp_path / "m.zarr" for path in left)
    assert not list(tmp_path.glob(".m.zarr.tmp-*"))


def run_python(code, *arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
        **options,
    )


def test_a_real_file_size_limit_is_typed_and_leaves_nothing(tmp_path):
    code = """
        import signal, sys, cache, resource
        from tests.cache.samples import layouts
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        store = cache.open_store(sys.argv[1], writable=True)
        try:
            store.publish(layouts(8))
        except cache.errors.StoreWriteError as error:
            print("typed", error.errno)
    """
    done = run_python(code, tmp_path / "m.zarr")
    assert done.stdout.split() == ["typed", str(errno.EFBIG)], done.stderr
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE) != (4096, 4096)


def test_a_folder_that_may_not_be_written_is_typed_and_left_alone():
    code = """
        import os, sys, cache
        from tests.cache.samples import entries
        folder = sys.argv[1]
        if os.geteuid() == 0:
            os.setegid(65534)
            os.seteuid(65534)
        store = cache.open_store(folder + "/m.zarr", writable=True)
        try:
            store.publish(entries(2, scale=70))
        except cache.errors.StoreWriteError as error:
            print("typed", error.errno)
        print(store.verify())
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        published(folder / "m.zarr")
        before = sorted(folder.rglob("*"))
        folder.chmod(0o555)
        done = run_python(code, folder)
        assert done.stdout.split() == ["typed", str(errno.EACCES), "[]"], done.stderr
        assert sorted(folder.rglob("*")) == before
        folder.chmod(0o755)


def test_a_version_that_is_there_but_damaged_is_not_built_over(tmp_path):
    store = published(tmp_path / "m.zarr")
    chunk = tmp_path / "m.zarr" / store.current / "tables" / "c" / "0"
    chunk.unlink()
    with pytest.raises(DamagedEntryError, match="the file is missing") as caught:
        store.publish(entries())
    assert caught.value.file == str(chunk)
    assert f"Delete the folder {tmp_path / 'm.zarr' / store.current}, then" in str(caught.value)
    assert not chunk.exists()


def remove_a_chunk(folder):
    (folder / "tables" / "c" / "0").unlink()


def empty_the_manifest(folder):
    (folder / "zarr.json").write_bytes(b"{}")


def add_a_file(folder):
    (folder / "notes.txt").write_bytes(b"hello")


def loop_a_chunk(folder):
    """A link to itself: the system refuses to read it."""
    remove_a_chunk(folder)
    (folder / "tables" / "c" / "0").symlink_to("0")


@pytest.mark.parametrize("damage", [remove_a_chunk, empty_the_manifest, add_a_file, loop_a_chunk])
def test_a_damaged_version_is_replaced_when_that_is_asked_for(tmp_path, damage):
    store = published(tmp_path / "m.zarr")
    before, version = files_of(store), store.current
    store.load("causal/q4")
    damage(tmp_path / "m.zarr" / version)
    seen = []
    assert store.publish(entries(), on_damage=seen.append) == version
    assert len(seen) == 1
    assert str(tmp_path / "m.zarr" / version) in str(seen[0])
    assert files_of(store) == before
    assert store.verify() == []
    assert [path.name for path in tmp_path.iterdir()] == ["m.zarr"]
    store.publish(entries(), on_damage=seen.append)
    assert len(seen) == 1


def test_a_full_disk_leaves_the_damaged_version_where_it_is(tmp_path, monkeypatch):
    store = published(tmp_path / "m.zarr")
    remove_a_chunk(tmp_path / "m.zarr" / store.current)
    before = files_of(store)

    def refuse(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, "write_synced", refuse)
    with pytest.raises(StoreWriteError, match="No space left"):
        store.publish(entries(), on_damage=lambda error: None)
    assert files_of(store) == before
    assert [path.name for path in tmp_path.iterdir()] == ["m.zarr"]


def test_a_reader_that_held_a_swapped_chunk_reads_the_new_one(tmp_path):
    """Its CRC-32C is right, so the chunk was decoded and kept."""
    store = published(tmp_path / "m.zarr")
    other = published(tmp_path / "n.zarr", entries(scale=6))
    key = f"{store.current}/spans/c/0"
    swapped = (tmp_path / "n.zarr" / other.current / "spans" / "c" / "0").read_bytes()
    (tmp_path / "m.zarr" / key).write_bytes(swapped)
    with pytest.raises(DamagedEntryError, match="SHA-256 of its values"):
        store.load("causal/q4")
    store.publish(entries(), on_damage=lambda error: None)
    assert store.load("causal/q4").arrays["starts"].tolist() == [[[list(range(12))]]]


def test_a_copy_that_was_cut_off_is_replaced(tmp_path):
    """Without its document a folder is no version, so a publish may take its place."""
    store = published(tmp_path / "m.zarr")
    before = files_of(store)
    (tmp_path / "m.zarr" / store.current / "zarr.json").unlink()
    assert cache.open_store(store.location, writable=True).versions() == []
    cache.open_store(store.location, writable=True).publish(entries())
    assert files_of(store) == before
    assert [path.name for path in tmp_path.iterdir()] == ["m.zarr"]


def aged(store, version, seconds):
    folder = Path(store.location) / version
    when = folder.stat().st_mtime - seconds
    os.utime(folder, (when, when))


@pytest.fixture
def five(tmp_path):
    """A store of five versions, each an hour older than the next; the last is current."""
    store = published(tmp_path / "m.zarr", entries(1, scale=1))
    ids = [store.current, *(store.publish(entries(1, scale=s)) for s in (2, 3, 4, 5))]
    for position, version in enumerate(ids):
        aged(store, version, 7200 + 3600 * (5 - position))
    return store, ids


def test_gc_keeps_the_newest_and_the_current(five):
    store, ids = five
    report = store.gc(keep=2)
    assert set(report.removed) == set(ids[:3])
    assert report.freed_bytes > 0
    assert [line.id for line in store.versions()] == [ids[4], ids[3]]
    with pytest.raises(VersionNotFoundError, match="holds no version"):
        store.load("causal/q4", ids[0])
    assert store.verify() == []


def test_gc_never_removes_the_current_version(five):
    store, ids = five
    store.use(ids[0])
    assert set(store.gc(keep=1).removed) == set(ids[1:])
    assert store.load("causal/q4").version == ids[0]


def test_gc_reads_current_anew(five):
    store, ids = five
    other = cache.open_store(store.location, writable=True)
    other.use(ids[1])
    store.gc(keep=1)
    assert cache.open_store(store.location).load("causal/q4").version == ids[1]


def test_gc_leaves_young_versions(five):
    store, ids = five
    os.utime(Path(store.location) / ids[1])
    assert set(store.gc(keep=1).removed) == {ids[0], ids[2], ids[3]}


def test_publishing_again_makes_a_version_young(five):
    store, ids = five
    assert store.publish(entries(1, scale=1), make_current=False) == ids[0]
    assert ids[0] not in store.gc(keep=1).removed


def test_gc_sweeps_old_leftovers_only(five, tmp_path):
    store, _ = five
    for name in (".m.zarr.tmp-old", ".m.zarr.tmp-young", ".other.zarr.tmp-old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_bytes(b"x" * 100)
    for name in (".m.zarr.tmp-old", ".other.zarr.tmp-old"):
        os.utime(tmp_path / name, (1, 1))
    report = store.gc(keep=100)
    assert report.swept == (str(tmp_path / ".m.zarr.tmp-old"),)
    assert report.removed == ()
    assert report.freed_bytes == 100
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"m.zarr", ".m.zarr.tmp-young", ".other.zarr.tmp-old"}


def test_a_use_during_gc_wins(five, monkeypatch):
    store, ids = five
    rename = Path.rename

    def racing(path, target):
        if path.name == ids[0]:
            monkeypatch.setattr(Path, "rename", rename)
            other = cache.open_store(store.location, writable=True)
            other.use(ids[0])
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", racing)
    report = store.gc(keep=1)
    assert ids[0] not in report.removed
    assert cache.open_store(store.location).load("causal/q4").version == ids[0]


def test_a_use_of_what_gc_took_is_refused_and_undone(five, monkeypatch):
    store, ids = five
    replace = writer.replace_file
    removed = []

    def racing(path, data, staging):
        if not removed:
            removed.append(Path(store.location, ids[0]).rename(staging / "gone"))
        replace(path, data, staging)

    monkeypatch.setattr(writer, "replace_file", racing)
    with pytest.raises(VersionNotFoundError, match="removed by a gc"):
        store.use(ids[0])
    assert cache.open_store(store.location).current == ids[4]


def test_a_publish_of_what_gc_takes_meanwhile_is_written_again(five, monkeypatch):
    store, ids = five
    replace = writer.replace_file
    removed = []

    def racing(path, data, staging):
        if not removed:
            removed.append(Path(store.location, ids[0]).rename(staging / "gone"))
        replace(path, data, staging)

    monkeypatch.setattr(writer, "replace_file", racing)
    assert store.publish(entries(1, scale=1)) == ids[0]
    assert removed
    assert cache.open_store(store.location).verify() == []


def test_a_second_gc_is_refused(five):
    import fcntl

    store, _ = five
    descriptor = os.open(store.location, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(StoreWriteError, match="another gc is at"):
            store.gc(keep=1)
    finally:
        os.close(descriptor)
    assert len(store.gc(keep=1).removed) == 4


def test_gc_wants_a_count(five):
    with pytest.raises(ValueError, match="keep must be 1 or more, found 0"):
        five[0].gc(keep=0)


def test_published_files_have_the_umask_of_the_user(tmp_path):
    store = published(tmp_path / "m.zarr")
    umask = os.umask(0)
    os.umask(umask)
    folder = Path(store.location, store.current)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
    assert (folder / "zarr.json").stat().st_mode & 0o777 == 0o666 & ~umask
