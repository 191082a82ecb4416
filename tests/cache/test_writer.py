"""Publishing under trouble: other writers, kills, full disks."""

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
from cache import unpublished, writer
from cache.errors import DamagedEntryError, StoreWriteError
from cache.place import locked
from tests.cache.samples import entries, files_of, published

ROOT = Path(__file__).parents[2]


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
    write = unpublished.write_synced

    def refuse(path, data):
        calls.append(path)
        if len(calls) > step:
            raise OSError(number, os.strerror(number), str(path))
        write(path, data)

    monkeypatch.setattr(unpublished, "write_synced", refuse)
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


@pytest.mark.parametrize("place", ["unpublished.write_synced", "writer.move_folder"])
def test_a_full_disk_during_the_first_publish_leaves_no_store(tmp_path, monkeypatch, place):
    def refuse(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(f"cache.{place}", refuse)
    with pytest.raises(StoreWriteError, match="No space left"):
        published(tmp_path / "m.zarr")
    assert list(tmp_path.iterdir()) == []


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

    monkeypatch.setattr(unpublished, "write_synced", refuse)
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
    (line,) = cache.open_store(store.location, writable=True).versions()
    assert "its current version must be there" in line.damage
    cache.open_store(store.location, writable=True).publish(entries())
    assert files_of(store) == before
    assert [path.name for path in tmp_path.iterdir()] == ["m.zarr"]


def test_published_files_have_the_umask_of_the_user(tmp_path):
    store = published(tmp_path / "m.zarr")
    umask = os.umask(0)
    os.umask(umask)
    folder = Path(store.location, store.current)
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask
    assert (folder / "zarr.json").stat().st_mode & 0o777 == 0o666 & ~umask


def race(monkeypatch, act):
    """Call ``act`` once, just before a version is renamed into the store."""
    move, acted = writer.move_folder, []

    def moving(source, target):
        if not acted:
            acted.append(True)
            act()
        return move(source, target)

    monkeypatch.setattr(writer, "move_folder", moving)
    return acted


def test_who_loses_a_race_leaves_the_good_version_of_the_first_one_where_it_is(
    tmp_path, monkeypatch
):
    location = tmp_path / "m.zarr"
    seen = []

    def first():
        published(location)
        place = location / cache.open_store(location).current
        seen.append(place.stat().st_ino)
        rename = Path.rename

        def moving(path, target):
            assert path != place
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", moving)

    acted = race(monkeypatch, first)
    store = published(location)
    assert acted
    assert (location / store.current).stat().st_ino == seen[0]
    assert store.verify() == []


@pytest.mark.parametrize("is_asked", [False, True])
def test_who_loses_a_race_looks_at_what_the_first_one_left(tmp_path, monkeypatch, is_asked):
    def first():
        store = published(tmp_path / "m.zarr")
        remove_a_chunk(tmp_path / "m.zarr" / store.current)

    acted, seen = race(monkeypatch, first), []
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    if is_asked:
        store.publish(entries(), on_damage=seen.append)
        assert (len(seen), store.verify()) == (1, [])
    else:
        with pytest.raises(DamagedEntryError, match="the file is missing"):
            store.publish(entries())
    assert acted


@pytest.mark.timeout(60)
def test_what_another_one_repairs_just_now_is_waited_for(tmp_path, monkeypatch):
    store = published(tmp_path / "m.zarr")
    damaged = tmp_path / "m.zarr" / store.current / "tables" / "c" / "0"
    good = damaged.read_bytes()
    damaged.write_bytes(b"")
    begun, ended = threading.Event(), threading.Event()

    def repair():
        with locked(tmp_path / "m.zarr"):
            begun.set()
            # The other one has seen the damage, and waits.
            ended.wait(20)
            damaged.write_bytes(good)

    findings = writer.findings_of

    def looking(source, version):
        found = findings(source, version)
        ended.set()
        return found

    monkeypatch.setattr(writer, "findings_of", looking)
    thread = threading.Thread(target=repair)
    thread.start()
    begun.wait(20)
    assert store.publish(entries()) == store.current
    thread.join()
    assert store.verify() == []


def test_without_locks_what_came_since_it_was_looked_at_is_put_back(tmp_path, monkeypatch):
    """A folder without a document stands there; it is whole just before it is moved away."""
    store = published(tmp_path / "m.zarr")
    version = tmp_path / "m.zarr" / store.current
    (version / "zarr.json").rename(tmp_path / "document")
    rename = Path.rename

    def whole(path, target):
        if path == version and (tmp_path / "document").exists():
            rename(tmp_path / "document", version / "zarr.json")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", whole)
    before = version.stat().st_ino
    assert cache.open_store(tmp_path / "m.zarr", writable=True).publish(entries()) == store.current
    assert version.stat().st_ino == before
    assert store.verify() == []


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOSYS, errno.EBADF])
def test_a_file_system_without_locks_takes_writes(tmp_path, monkeypatch, number):
    import fcntl

    def refuse(*_arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    store = published(tmp_path / "m.zarr")
    first = store.current
    remove_a_chunk(tmp_path / "m.zarr" / first)
    store.publish(entries(), on_damage=lambda error: None)
    store.publish(entries(2))
    assert store.gc(1, min_age_s=-1).removed == (first,)
    assert store.verify() == []
