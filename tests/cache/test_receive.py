"""pull and unpack beside others of their kind, and what broken and killed ones left."""

import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest

import cache
from cache import receive
from cache.errors import DamagedEntryError, StoreReadError, StoreWriteError
from cache.source import FolderSource
from tests.cache.samples import entries, files_of, published


@pytest.fixture
def far(tmp_path, monkeypatch):
    """A cache of seven chunks in ``tmp_path / "far"``."""
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", 24)
    return published(tmp_path / "far" / "f.zarr", entries(6))


@pytest.fixture
def near(tmp_path):
    (tmp_path / "near").mkdir()
    return tmp_path / "near" / "m.zarr"


@pytest.fixture
def fetched(far, monkeypatch):
    """The keys of chunks that are read at the far end."""
    keys, read = [], FolderSource.read

    def noting(source, key, limit):
        if "/c/" in key and source.location == far.location:
            keys.append(key)
        return read(source, key, limit)

    monkeypatch.setattr(FolderSource, "read", noting)
    return keys


def pull(far, near):
    return cache.pull(far.location, near)


def left_part(far, near, name="pull-{}-dead"):
    """What a killed pull left: all chunks, and of the documents none."""
    part = near.parent / f".m.zarr.tmp-{name.format(far.current[:16])}"
    for key, data in files_of(far).items():
        if "/c/" in key:
            (part / key).parent.mkdir(parents=True, exist_ok=True)
            (part / key).write_bytes(data)
    return part / far.current


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def good(far, near):
    assert files_of(cache.open_store(near)) == files_of(far)
    assert names(near.parent) == ["m.zarr"]


@pytest.mark.parametrize("name", ["pull-{}", "pull-{}-dead"])
def test_what_is_sound_in_a_part_is_not_fetched(far, near, fetched, name):
    """The first name is that of earlier releases."""
    left_part(far, near, name)
    assert pull(far, near).kept == 7
    assert fetched == []
    good(far, near)


def cut(chunk):
    chunk.write_bytes(chunk.read_bytes()[:-1])


def empty(chunk):
    chunk.write_bytes(b"")


def flip(chunk):
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 4
    chunk.write_bytes(data)


def replace_by_pipe(chunk):
    chunk.unlink()
    os.mkfifo(chunk)


def replace_by_folder(chunk):
    chunk.unlink()
    chunk.mkdir()


@pytest.mark.parametrize("harm", [cut, empty, flip, replace_by_pipe, replace_by_folder, os.unlink])
def test_what_is_torn_in_a_part_is_fetched_alone(far, near, fetched, harm):
    harm(left_part(far, near) / "spans" / "c" / "2")
    assert pull(far, near).kept == 6
    assert fetched == [f"{far.current}/spans/c/2"]
    good(far, near)


def test_files_of_other_names_in_a_part_are_no_damage(far, near, fetched):
    part = left_part(far, near)
    for name in ("zarr.json", "zarr.json.4711.part", "spans/zarr.json", "spans/c/0.12.part"):
        (part / name).write_bytes(b"{")
    assert pull(far, near).kept == 7
    good(far, near)


def test_a_part_that_looks_right_and_is_wrong_is_fetched_again(far, near, fetched):
    """Two chunks of equal length are swapped: each has its checksum, the digests differ."""
    chunks = left_part(far, near) / "spans" / "c"
    (chunks / "0").write_bytes((chunks / "1").read_bytes())
    assert pull(far, near).copied == 11
    assert len(fetched) == 7
    good(far, near)


def test_what_is_wrong_at_the_far_end_is_named_by_its_place_there(far, near):
    chunks = Path(far.location) / far.current / "spans" / "c"
    (chunks / "0").write_bytes((chunks / "1").read_bytes())
    with pytest.raises(DamagedEntryError, match="SHA-256 of its values") as caught:
        pull(far, near)
    assert f"{chunks}/0" in caught.value.file
    assert names(near.parent) == []


def test_a_chunk_is_checked_as_it_comes(far, near, fetched):
    """Else all is fetched before the damage is seen."""
    flip(Path(far.location) / far.current / "spans" / "c" / "0")
    with pytest.raises(DamagedEntryError, match="CRC-32C"):
        pull(far, near)
    assert fetched == [f"{far.current}/spans/c/0"]
    assert names(near.parent) == []


def breaking(monkeypatch, after):
    """Break the connection after so many chunks."""
    chunk, count = receive.sound_chunk, []

    def broken(source, key, length):
        data = chunk(source, key, length)
        if "far" in source.location:
            count.append(key)
            if len(count) > after:
                raise StoreReadError(key, ConnectionResetError("broken"))
        return data

    monkeypatch.setattr(receive, "sound_chunk", broken)


def test_broken_pulls_go_on_and_do_not_pile_up(far, near, monkeypatch, fetched):
    for done in range(7):
        with monkeypatch.context() as patch:
            breaking(patch, 1 if done < 6 else 0)
            with pytest.raises(StoreReadError, match="broken"):
                pull(far, near)
        (part,) = near.parent.iterdir()
        assert len(list(part.rglob("c/*"))) == min(done + 1, 6)
    fetched.clear()
    assert pull(far, near).kept == 6
    assert len(fetched) == 1
    good(far, near)


def test_a_pull_that_breaks_at_once_leaves_nothing(far, near, monkeypatch):
    breaking(monkeypatch, 0)
    with pytest.raises(StoreReadError, match="broken"):
        pull(far, near)
    assert names(near.parent) == []


def test_an_interrupted_pull_is_gone_on_with(far, near, monkeypatch, fetched):
    with monkeypatch.context() as patch:
        write, count = receive.write_synced, []

        def stopped(path, data):
            count.append(path)
            if len(count) > 3:
                raise KeyboardInterrupt
            write(path, data)

        patch.setattr(receive, "write_synced", stopped)
        with pytest.raises(KeyboardInterrupt):
            pull(far, near)
    fetched.clear()
    assert pull(far, near).kept == 3
    assert len(fetched) == 4
    good(far, near)


def test_a_full_disk_leaves_no_part_of_anybody(far, near, monkeypatch):
    left_part(far, near)
    write, count = receive.write_synced, []

    def full(path, data):
        count.append(path)
        if len(count) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, data)

    monkeypatch.setattr(receive, "write_synced", full)
    with pytest.raises(StoreWriteError, match=f"cannot write {near}: No space left") as caught:
        pull(far, near)
    assert "make room" in str(caught.value)
    assert names(near.parent) == []


def test_an_unpack_that_fails_leaves_nothing(far, near, tmp_path, monkeypatch):
    cache.pack(far, tmp_path / "far" / "f.zip")
    breaking(monkeypatch, 3)
    with pytest.raises(StoreReadError, match="broken"):
        cache.unpack(tmp_path / "far" / "f.zip", near)
    assert names(near.parent) == []


@pytest.mark.parametrize("way", ["pull", "unpack", "publish"])
@pytest.mark.parametrize("step", [1, 4, 8, 10])
def test_who_finds_the_version_there_after_all_uses_it(far, near, tmp_path, monkeypatch, way, step):
    cache.pack(far, tmp_path / "far" / "f.zip")
    write, count = receive.write_synced, []
    other = {
        "pull": lambda: pull(far, near),
        "unpack": lambda: cache.unpack(tmp_path / "far" / "f.zip", near),
        "publish": lambda: published(near, entries(6)),
    }

    def racing(path, data):
        count.append(path)
        if len(count) == step:
            other[way]()
        write(path, data)

    monkeypatch.setattr(receive, "write_synced", racing)
    assert pull(far, near).version == far.current
    assert len(count) >= step
    good(far, near)


def test_what_is_there_already_is_taken_without_a_write(far, near, monkeypatch):
    pull(far, near)
    left = left_part(far, near).parent
    closed = [OSError(errno.EROFS, os.strerror(errno.EROFS))]

    def refuse(**_options):
        raise closed[0]

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    assert pull(far, near) == cache.Shipment(far.current, 0, 11, 0)
    # What was left of it is of no use any more.
    assert not left.exists()


def as_it_begins(monkeypatch, act):
    """Call ``act`` once, just before the first staging folder is made."""
    make, acted = tempfile.mkdtemp, []

    def making(**options):
        if not acted:
            acted.append(True)
            act()
        return make(**options)

    monkeypatch.setattr(tempfile, "mkdtemp", making)


def test_who_finds_the_version_there_as_he_begins_fetches_nothing(far, near, monkeypatch, fetched):
    def first():
        shutil.copytree(Path(far.location, far.current), near / far.current)

    as_it_begins(monkeypatch, first)
    done = pull(far, near)
    root = (near / "zarr.json").read_bytes()
    assert done == cache.Shipment(far.current, 1, 10, len(root))
    assert fetched == []
    good(far, near)


def test_who_finds_it_there_damaged_as_he_begins_says_so(far, near, monkeypatch):
    def first():
        shutil.copytree(Path(far.location, far.current), near / far.current)
        (near / far.current / "spans" / "c" / "3").unlink()

    as_it_begins(monkeypatch, first)
    with pytest.raises(DamagedEntryError, match="the file is missing") as caught:
        pull(far, near)
    assert caught.value.file == str(near / far.current / "spans" / "c" / "3")
    assert names(near.parent) == ["m.zarr"]


def test_a_chunk_is_taken_from_whichever_part_has_it_whole(far, near, fetched):
    one, two, three = (
        left_part(far, near, name) for name in ("pull-{}-a", "pull-{}-b", "pull-{}-c")
    )
    for part, harmed in ((one, (0, 1, 2)), (two, (1, 2)), (three, (2,))):
        for index in harmed:
            flip(part / "spans" / "c" / str(index))
    assert pull(far, near).kept == 6
    assert fetched == [f"{far.current}/spans/c/2"]
    good(far, near)


@pytest.mark.parametrize("name", [".m.zarr.tmp-pull-{}-x", ".n.zarr.tmp-pull-{}-x"])
def test_parts_of_other_versions_and_stores_are_left_alone(far, near, fetched, name):
    head = far.current[:16] if "n.zarr" in name else "0" * 16
    part = near.parent / name.format(head)
    shutil.copytree(Path(far.location, far.current), part / far.current)
    assert pull(far, near).copied == 11
    assert len(fetched) == 7
    assert names(near.parent) == sorted([part.name, "m.zarr"])
    assert len(list(part.rglob("c/*"))) == 7


def test_a_part_inside_a_store_that_is_a_mount_point_is_used_and_dropped(far, near, fetched):
    near.mkdir()
    part = near / f".tmp-pull-{far.current[:16]}-dead"
    shutil.copytree(Path(far.location, far.current), part / far.current)
    assert pull(far, near).kept == 7
    assert fetched == []
    good(far, near)


def test_a_folder_that_may_not_be_listed_has_no_parts(far, near, monkeypatch, fetched):
    left_part(far, near)
    listdir = os.listdir

    def refuse(path="."):
        if Path(path) == near.parent:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert pull(far, near).copied == 11
    assert len(fetched) == 7
    monkeypatch.undo()
    assert files_of(cache.open_store(near)) == files_of(far)


@pytest.mark.parametrize("extra", [None, "empty", "more"])
def test_a_broken_pull_drops_the_parts_that_hold_no_more_than_its_own(
    far, near, monkeypatch, extra
):
    """Beside chunks that it has, one of three may hold an empty folder or a chunk that it lacks."""
    part = left_part(far, near)
    for index in range(2, 6):
        (part / "spans" / "c" / str(index)).unlink()
    (part / "tables" / "c" / "0").unlink()
    if extra == "empty":
        (part / "spans" / "d").mkdir()
    elif extra == "more":
        (part / "spans" / "c" / "5").write_bytes(b"torn")
    breaking(monkeypatch, 1)
    with pytest.raises(StoreReadError, match="broken"):
        pull(far, near)
    left = names(near.parent)
    assert len(left) == (2 if extra == "more" else 1)
    assert (part.parent.name in left) == (extra == "more")


def test_what_a_pull_left_is_dropped_when_the_far_end_proves_wrong(far, near):
    """All parts go: which of them was wrong is not known, and none is used again."""
    left_part(far, near)
    chunks = Path(far.location) / far.current / "spans" / "c"
    whole = (chunks / "0").read_bytes()
    (chunks / "0").write_bytes((chunks / "1").read_bytes())
    part = near.parent / f".m.zarr.tmp-pull-{far.current[:16]}-dead" / far.current / "spans" / "c"
    (part / "0").write_bytes((chunks / "1").read_bytes())
    with pytest.raises(DamagedEntryError, match="SHA-256 of its values"):
        pull(far, near)
    assert names(near.parent) == []
    (chunks / "0").write_bytes(whole)
    pull(far, near)
    good(far, near)


@pytest.mark.parametrize("kind", [DamagedEntryError, StoreReadError, KeyboardInterrupt])
def test_what_was_got_stays_after_an_error_of_the_far_end(far, near, monkeypatch, kind):
    errors = {
        DamagedEntryError: DamagedEntryError("f", "r"),
        StoreReadError: StoreReadError("f", OSError(errno.EIO, "far")),
        KeyboardInterrupt: KeyboardInterrupt(),
    }
    chunk, count = receive.sound_chunk, []

    def broken(source, key, length):
        count.append(key)
        if len(count) == 3:
            raise errors[kind]
        return chunk(source, key, length)

    monkeypatch.setattr(receive, "sound_chunk", broken)
    with pytest.raises(kind):
        pull(far, near)
    (part,) = near.parent.iterdir()
    assert part.name.startswith(f".m.zarr.tmp-pull-{far.current[:16]}-")
    assert len(list(part.rglob("c/*"))) == 2
