"""gc: what it removes, what it leaves, and what meets it half-way."""

import contextlib
import errno
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import zipfile
from pathlib import Path

import pytest

import cache
from cache import place, writer
from cache.errors import (
    DamagedEntryError,
    StoreWriteError,
    VersionNotFoundError,
    VersionRemovedError,
)
from cache.place import locked
from cache.source import FolderSource
from tests.cache.samples import entries, files_of, published, truth_of


def aged(store, version, seconds):
    folder = Path(store.location) / version
    when = folder.stat().st_mtime - seconds
    os.utime(folder, (when, when))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Acts that are put within a gc do not wait for its end."""
    monkeypatch.setattr(place, "PATIENCE_S", 0.05)
    monkeypatch.setattr("cache.sweep._PATIENCE_S", 0.05)


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


def test_a_version_that_was_chosen_a_while_ago_is_young(five):
    store, ids = five
    store.use(ids[0])
    store.use(ids[4])
    assert set(store.gc(keep=1).removed) == set(ids[1:4])


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


@pytest.mark.parametrize("is_his", [False, True])
def test_a_use_during_gc_wins(five, monkeypatch, is_his):
    """Also of another user's version, which cannot be made young."""
    store, ids = five
    rename, utime = Path.rename, os.utime

    def refuse(path, *arguments, **options):
        if is_his and Path(path).name == ids[0]:
            raise PermissionError(1, "Operation not permitted", str(path))
        utime(path, *arguments, **options)

    monkeypatch.setattr(os, "utime", refuse)

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


def removed_before_the_root_is_written(store, version, monkeypatch):
    """A gc takes a version just then; gives a list that is empty until it did."""
    replace = writer.replace_file
    removed = []

    def racing(path, data, staging):
        if not removed:
            removed.append(Path(store.location, version).rename(staging / "gone"))
        replace(path, data, staging)

    monkeypatch.setattr(writer, "replace_file", racing)
    return removed


def test_a_use_of_what_gc_took_is_refused_and_undone(five, monkeypatch):
    store, ids = five
    removed_before_the_root_is_written(store, ids[0], monkeypatch)
    with pytest.raises(VersionNotFoundError, match="removed by a gc"):
        store.use(ids[0])
    assert cache.open_store(store.location).current == ids[4]


def test_a_publish_of_what_gc_takes_meanwhile_is_written_again(five, monkeypatch):
    store, ids = five
    removed = removed_before_the_root_is_written(store, ids[0], monkeypatch)
    assert store.publish(entries(1, scale=1)) == ids[0]
    assert removed
    assert cache.open_store(store.location).verify() == []


@pytest.mark.timeout(60)
def test_a_second_gc_is_refused(five):
    import fcntl

    store, _ = five
    descriptor = os.open(store.location, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(StoreWriteError, match="another gc, or a repair, is at"):
            store.gc(keep=1)
    finally:
        os.close(descriptor)
    assert len(store.gc(keep=1).removed) == 4


def test_gc_wants_a_count(five):
    with pytest.raises(ValueError, match="keep must be 1 or more, found 0"):
        five[0].gc(keep=0)


def sidecar(store, version, *, age):
    """A sidecar folder of 100 bytes that was last changed ``age`` seconds ago."""
    folder = store.sidecar_dir(version)
    folder.mkdir(parents=True)
    (folder / "certificate.json").write_bytes(b"x" * 100)
    when = folder.stat().st_mtime - age
    os.utime(folder, (when, when))
    return folder


def test_gc_removes_the_sidecars_of_what_it_removes_and_no_others(five):
    store, ids = five
    os.utime(Path(store.location) / ids[2])
    folders = [sidecar(store, version, age=0 if version == ids[0] else 9e6) for version in ids]
    gone = [0, 1, 3]
    sizes = [sum(store.source.file_sizes(ids[index]).values()) for index in gone]
    report = store.gc(keep=1)
    assert set(report.removed) == {ids[index] for index in gone}
    assert [folder.exists() for folder in folders] == [False, False, True, False, True]
    assert report.swept == tuple(sorted(str(folders[index]) for index in gone))
    assert report.freed_bytes == sum(sizes) + 300


def test_gc_removes_the_sidecars_that_an_earlier_release_wrote(five, tmp_path):
    store, ids = five
    for version in ids:
        sidecar(store, version, age=9e6)
    (tmp_path / "sidecars").rename(tmp_path / "attest")
    newer = sidecar(store, ids[0], age=0)
    report = store.gc(keep=1)
    assert set(report.removed) == set(ids[:4])
    assert report.swept == (str(newer), *sorted(str(tmp_path / "attest" / i) for i in ids[:4]))
    assert [path.name for path in (tmp_path / "attest").iterdir()] == [ids[4]]


def test_gc_sweeps_old_sidecars_of_no_version(five, tmp_path):
    store, _ = five
    old, young = (sidecar(store, digit * 64, age=age) for digit, age in (("0", 3700), ("1", 3500)))
    notes = sidecar(store, "notes", age=9e6)
    link = tmp_path / "sidecars" / ("2" * 64)
    link.symlink_to(notes)
    os.utime(link, (1, 1), follow_symlinks=False)
    file = tmp_path / "sidecars" / ("3" * 64)
    file.write_bytes(b"")
    os.utime(file, (1, 1))
    report = store.gc(keep=100)
    assert (report.removed, report.swept, report.freed_bytes) == ((), (str(old),), 100)
    assert not old.exists()
    assert all(path.exists() for path in (young, notes / "certificate.json", link, file))


def test_gc_leaves_the_sidecars_of_versions_that_stand_elsewhere_in_the_folder(five, tmp_path):
    store, ids = five
    cache.pull(store.location, tmp_path / "n.zarr", ids[0])
    cache.pack(store, tmp_path / "p.zip", ids[1])
    (tmp_path / "notes.txt").write_bytes(b"")
    (tmp_path / "folder.zip").mkdir()
    at_work = tmp_path / ".n.zarr.tmp-pull" / ids[2]
    shutil.copytree(Path(store.location) / ids[2], at_work)
    folders = [sidecar(store, version, age=9e6) for version in ids]
    report = store.gc(keep=1)
    assert set(report.removed) == set(ids[:4])
    assert [folder.exists() for folder in folders] == [True, True, True, False, True]
    (tmp_path / "p.zip").unlink()
    assert store.gc(keep=1).swept == (str(folders[1]),)


def test_gc_keeps_all_sidecars_beside_a_zip_that_is_not_whole(five, tmp_path):
    store, ids = five
    packed = tmp_path / "p.zip"
    cache.pack(store, packed, ids[0])
    folders = [sidecar(store, version, age=9e6) for version in ids[:2]]
    whole = packed.read_bytes()
    for part in (b"no cache", whole[:-10]):
        packed.write_bytes(part)
        assert store.gc(keep=1).swept == ()
    packed.write_bytes(whole)
    assert store.gc(keep=1).swept == (str(folders[1]),)
    assert folders[0].exists()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_gc_of_a_folder_that_may_not_be_listed_leaves_all_sidecars(
    five, tmp_path, monkeypatch, number
):
    """Refused as leftovers are looked for, or before or after the sidecars were moved aside."""
    store, ids = five
    folders = [sidecar(store, version, age=9e6) for version in ids]
    calls = []

    def refusing(allowed):
        def refuse(path="."):
            if str(path) == str(tmp_path):
                calls.append(path)
                if len(calls) == number:
                    raise PermissionError(13, "Permission denied", str(path))
            return allowed(path)

        return refuse

    monkeypatch.setattr(os, "listdir", refusing(os.listdir))
    monkeypatch.setattr(os, "scandir", refusing(os.scandir))
    report = store.gc(keep=1)
    (note,) = report.left
    what = "leftovers" if number == 1 else "all sidecars"
    assert note == f"{tmp_path} cannot be listed, so {what} stay: Permission denied"
    assert set(report.removed) == set(ids[:4])
    kept = [(folder / "certificate.json").exists() for folder in folders]
    assert kept == ([False] * 4 + [True] if number == 1 else [True] * 5)


def test_gc_leaves_the_sidecars_of_a_store_that_it_may_not_enter(five, tmp_path, monkeypatch):
    store, ids = five
    other = published(tmp_path / "o.zarr", entries(1, scale=7))
    folder = sidecar(other, other.current, age=9e6)
    stat = os.stat

    def refuse(path, **options):
        if str(path).startswith(f"{other.location}/"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert set(store.gc(keep=1).removed) == set(ids[:4])
    monkeypatch.undo()
    assert folder.exists()


@pytest.mark.parametrize("is_moved", [False, True])
def test_sidecars_of_a_version_that_is_published_meanwhile_stay(five, monkeypatch, is_moved):
    store, ids = five
    fresh = cache.open_store(store.location, writable=True)
    folder = sidecar(store, ids[0], age=9e6)
    rename = Path.rename

    def publish():
        fresh.publish(entries(1, scale=1))
        folder.mkdir(exist_ok=True)
        (folder / "certificate.json").write_bytes(b"fresh")

    def racing(path, target):
        if path != folder:
            return rename(path, target)
        monkeypatch.setattr(Path, "rename", rename)
        acts = [publish, lambda: rename(path, target)]
        for act in reversed(acts) if is_moved else acts:
            act()
        return target

    monkeypatch.setattr(Path, "rename", racing)
    report = store.gc(keep=1)
    assert ids[0] in report.removed
    assert report.swept == ()
    assert fresh.current == ids[0]
    assert (folder / "certificate.json").read_bytes() == b"fresh"
    assert not list(folder.parent.parent.glob(".m.zarr.tmp-*"))


def test_what_cannot_be_removed_is_reported_and_the_rest_goes(five, tmp_path, monkeypatch):
    store, ids = five
    folders = [sidecar(store, version, age=0) for version in ids]
    leftovers = [tmp_path / f".m.zarr.tmp-{name}" for name in "ab"]
    for leftover in leftovers:
        leftover.mkdir()
        os.utime(leftover, (1, 1))
    stay = (folders[0], leftovers[0], Path(store.location) / ids[1])
    rename = Path.rename

    def refuse(path, target):
        if path in stay:
            raise PermissionError(13, "Permission denied", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    report = store.gc(keep=1)
    assert report.removed == (ids[3], ids[2], ids[0])
    assert report.left == tuple(
        f"{path} stays: Permission denied" for path in (stay[1], *stay[::-2])
    )
    assert all(path.exists() for path in stay)
    assert report.swept == (str(leftovers[1]), *sorted(map(str, folders[2:4])))
    assert [line.id for line in store.versions()] == [ids[4], ids[1]]


@pytest.fixture
def chunked(tmp_path, monkeypatch):
    """A store of many small chunks with an old version, which is not current."""
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", 24)
    store = published(tmp_path / "m.zarr", entries(4))
    old = store.current
    store.publish(entries(1, scale=9))
    return store, old


def act_at_read(monkeypatch, step, act):
    """Call ``act`` once, before the read number ``step`` of any folder; returns the reads."""
    read = FolderSource.read
    keys = []

    def acting(source, key, limit):
        keys.append(key)
        if len(keys) == step + 1:
            act()
        return read(source, key, limit)

    monkeypatch.setattr(FolderSource, "read", acting)
    return keys


def test_a_version_that_gc_removes_while_it_is_read_is_no_damage(chunked):
    store, old = chunked
    reading = cache.open_store(store.location)
    first = reading.load("causal/q4", old)
    assert store.gc(keep=1, min_age_s=0).removed == (old,)
    assert reading.load("causal/q4", old) is first
    message = (
        rf"version {old[:12]} was removed while it was read: expected .*/spans/c/\d, found neither "
        r"it nor the version's document\. Open the cache again"
    )
    for load in (lambda: reading.load("causal/q16", old), lambda: reading.load_all(old)):
        with pytest.raises(VersionRemovedError, match=message) as caught:
            load()
        assert isinstance(caught.value, VersionNotFoundError)
        assert caught.value.version == old
        assert caught.value.file.startswith(f"{store.location}/{old}/spans/c/")
    again = cache.open_store(store.location)
    assert again.load("causal/q4").version == again.current != old


@pytest.mark.parametrize("read", ["load_all", "load", "verify"])
def test_a_removal_at_any_read_is_told_as_what_it_is(chunked, monkeypatch, read):
    store, old = chunked
    name = list(store.version(old).entries)[-1]
    aside = Path(store.location).parent / "aside"
    acts = {
        "load_all": lambda far: far.load_all(old),
        "load": lambda far: far.load(name, old),
        "verify": lambda far: far.verify(old),
    }
    seen = []
    for step in range(40):
        with monkeypatch.context() as patch:
            far = cache.open_store(store.location)
            place = Path(store.location) / old
            keys = act_at_read(patch, step, lambda place=place: place.rename(aside))
            try:
                acts[read](far)
                seen.append("right")
            except VersionNotFoundError as error:
                seen.append(type(error).__name__)
        if len(keys) <= step:
            break
        aside.rename(place)
    assert seen[0] == "VersionNotFoundError"
    assert set(seen[1:-1]) == {"VersionRemovedError"}
    assert seen[-1] == "right"
    assert len(seen) > 4


@pytest.mark.parametrize("part", ["spans/c/0", "spans/zarr.json", "tables/c/0", "spans", "tables"])
def test_what_alone_is_missing_is_damage(chunked, part):
    store, old = chunked
    reading = cache.open_store(store.location)
    reading.version(old)
    path = Path(store.location) / old / part
    path.rename(path.parent / "aside")
    with pytest.raises(DamagedEntryError, match=f"{part}.* is damaged: the file is missing"):
        reading.load_all(old)


def test_a_version_that_is_put_back_as_it_is_read_is_no_damage(chunked, monkeypatch):
    store, old = chunked
    far = cache.open_store(store.location)
    name = next(iter(far.version(old).entries))
    place, aside = Path(store.location) / old, Path(store.location).parent / "aside"
    place.rename(aside)
    read = FolderSource.read

    def publishing(source, key, limit):
        data = read(source, key, limit)
        if data is None and aside.exists():
            aside.rename(place)
        return data

    monkeypatch.setattr(FolderSource, "read", publishing)
    assert far.load(name, old).version == old
    assert place.exists()


def test_verify_of_all_passes_over_what_gc_removes_meanwhile(chunked, monkeypatch):
    store, old = chunked
    place = Path(store.location) / old
    aside = Path(store.location).parent / "aside"
    for step in range(1, 12):
        with monkeypatch.context() as patch:
            far = cache.open_store(store.location)
            keys = act_at_read(patch, step, lambda: place.rename(aside))
            assert far.verify() == []
        assert any(key.startswith(old) for key in keys)
        aside.rename(place)


def test_a_current_version_that_is_removed_meanwhile_is_told(chunked, monkeypatch):
    store, _ = chunked
    far = cache.open_store(store.location)
    place = Path(store.location) / store.current
    act_at_read(monkeypatch, 2, lambda: shutil.rmtree(place))
    with pytest.raises(VersionRemovedError, match=f"version {store.current[:12]} was removed"):
        far.verify()


def test_a_publish_of_what_gc_takes_as_it_is_checked_is_written_again(chunked, monkeypatch):
    store, old = chunked
    before = files_of(store)
    place = Path(store.location) / old
    act_at_read(monkeypatch, 2, lambda: shutil.rmtree(place))
    assert store.publish(entries(4), make_current=False) == old
    assert files_of(store) == before
    assert len(truth_of(cache.open_store(store.location))) == 2


def leftover(folder, name, *, age=9e6):
    path = folder / f".m.zarr.tmp-{name}"
    path.mkdir()
    (path / "half").write_bytes(b"x")
    os.utime(path, (path.stat().st_mtime - age,) * 2)
    return path


def test_what_its_maker_touches_as_gc_takes_it_is_put_back(five, tmp_path, monkeypatch):
    store, ids = five
    at_work, gone = leftover(tmp_path, "work"), leftover(tmp_path, "gone")
    rename = Path.rename

    def touching(path, target):
        if path in (at_work, Path(store.location) / ids[1]):
            os.utime(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", touching)
    report = store.gc(keep=1)
    assert report.swept == (str(gone),)
    assert set(report.removed) == {ids[0], ids[2], ids[3]}
    assert (at_work / "half").exists()
    assert store.load("causal/q4", ids[1]).version == ids[1]


def test_what_goes_has_another_name_before_any_of_it_is_deleted(five, tmp_path, monkeypatch):
    store, _ = five
    leftover(tmp_path, "old")
    deleted = []
    for module, name in ((os, "unlink"), (os, "rmdir")):
        function = getattr(module, name)

        def noting(path, *args, _function=function, dir_fd=None, **options):
            at = path if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink() / path
            deleted.append(str(at))
            return _function(path, *args, dir_fd=dir_fd, **options)

        monkeypatch.setattr(module, name, noting)
    assert len(store.gc(keep=1).removed) == 4
    assert len(deleted) > 4 * 10
    assert all(".m.zarr.tmp-gone-" in path for path in deleted)


def test_the_current_version_that_a_killed_gc_had_in_hand_is_put_back(five, tmp_path):
    store, ids = five
    # Its sidecars, too, which are no version.
    leftover(tmp_path, f"gone-{ids[4]}-a")
    (Path(store.location) / ids[4]).rename(tmp_path / f".m.zarr.tmp-gone-{ids[4]}-b")
    assert cache.open_store(store.location).verify() != []
    report = store.gc(keep=5)
    assert store.load("causal/q4").version == ids[4]
    assert store.verify() == []
    assert (report.removed, report.swept) == ((), ())
    assert store.gc(keep=5, min_age_s=-1).swept == (str(tmp_path / f".m.zarr.tmp-gone-{ids[4]}-a"),)


@pytest.mark.parametrize("act", ["use", "publish"])
def test_who_chooses_a_version_that_a_gc_has_looked_at_waits_for_it(five, monkeypatch, act):
    """Else a gc that is killed with the version in hand loses what was just chosen."""
    monkeypatch.setattr(place, "PATIENCE_S", 20)
    store, ids = five
    other = cache.open_store(store.location, writable=True)
    acts = {
        "use": lambda: other.use(ids[0]),
        "publish": lambda: other.publish(entries(1, scale=1)),
    }
    taken, took = Path(store.location) / ids[0], []
    rename, current = Path.rename, other.current

    def run():
        with contextlib.suppress(VersionNotFoundError):
            acts[act]()

    thread = threading.Thread(target=run)

    def take(path, target):
        if path == taken and not took:
            took.append(True)
            thread.start()
            thread.join(0.3)
            # It waits: nothing is chosen that will be gone in a moment.
            assert cache.open_store(store.location).current == current
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", take)
    store.gc(keep=1)
    thread.join()
    assert took
    again = cache.open_store(store.location)
    assert again.verify() == []
    assert again.current == (ids[0] if act == "publish" else current)


@pytest.mark.timeout(60)
def test_who_holds_the_lock_for_ever_holds_up_nobody_for_ever(five):
    """As a gc does that was stopped by Ctrl-Z."""
    store, ids = five
    with locked(Path(store.location)):
        assert store.use(ids[0]) == ids[0]
        made = store.publish(entries(1, scale=77))
        (Path(store.location) / made / "spans" / "c" / "0").write_bytes(b"")
        assert store.publish(entries(1, scale=77), on_damage=lambda error: None) == made
        assert store.verify() == []
        with pytest.raises(StoreWriteError, match="another gc, or a repair, is at"):
            store.gc(keep=1)


def foreign(path, change):
    """A zip of another program, with bytes of it changed."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", b"hello")
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


ZIPS = {
    "empty file": lambda data: data.clear(),
    "another name": lambda data: data.__setitem__(slice(0, len(data)), b"MZ\x90" * 20),
    "cut": lambda data: data.__delitem__(slice(-8, None)),
    "extra field": lambda data: data.__setitem__(slice(-22 - 51 + 30, -22 - 51 + 32), b"\x09\0"),
    "version": lambda data: data.__setitem__(data.index(b"PK\1\2") + 6, 99),
    "offset": lambda data: data.__setitem__(slice(-6, -2), b"\xff" * 4),
    "count": lambda data: data.__setitem__(slice(-14, -10), b"\xff" * 4),
}


@pytest.mark.parametrize("change", ZIPS.values(), ids=ZIPS)
def test_a_foreign_zip_costs_no_more_than_the_sidecars(five, tmp_path, change):
    store, ids = five
    folders = [sidecar(store, version, age=9e6) for version in ids]
    foreign(tmp_path / "foreign.zip", change)
    report = store.gc(keep=1)
    assert set(report.removed) == set(ids[:4])
    kept = [folder.exists() for folder in folders]
    if report.left:
        (note,) = report.left
        assert note.startswith(f"{tmp_path}/foreign.zip cannot be looked into, so all sidecars")
        assert kept == [True] * 5
    else:
        assert kept == [False] * 4 + [True]


@pytest.mark.parametrize(
    "error", [NotImplementedError("x"), RuntimeError("x"), struct.error("x"), OverflowError("x")]
)
def test_whatever_a_zip_raises_is_reported(five, tmp_path, monkeypatch, error):
    store, ids = five
    sidecar(store, ids[0], age=9e6)
    (tmp_path / "foreign.zip").write_bytes(b"")

    def refuse(*_arguments):
        raise error

    monkeypatch.setattr(zipfile, "ZipFile", refuse)
    assert store.gc(keep=1).left == (
        f"{tmp_path}/foreign.zip cannot be looked into, so all sidecars stay: x",
    )


def test_a_leftover_that_is_no_folder_goes_too(five, tmp_path):
    store, _ = five
    for name in ("file", "link"):
        path = tmp_path / f".m.zarr.tmp-{name}"
        path.symlink_to(tmp_path / "m.zarr") if name == "link" else path.write_bytes(b"x")
        os.utime(path, (1, 1), follow_symlinks=False)
    assert len(store.gc(keep=5).swept) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["m.zarr"]
    assert store.verify() == []


def test_what_belongs_to_another_user_is_reported_and_the_rest_goes():
    """By the system's own refusals: root's folders, swept by nobody."""
    code = """
        import json, os, sys, cache
        if os.geteuid() == 0:
            os.setegid(65534)
            os.seteuid(65534)
        report = cache.open_store(sys.argv[1], writable=True).gc(1, min_age_s=-1)
        print(json.dumps([report.removed, report.swept, report.left]))
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        store = published(folder / "m.zarr", entries(1, scale=1))
        ids = [store.current, *(store.publish(entries(1, scale=s)) for s in (2, 3))]
        mine, closed = leftover(folder, "mine"), leftover(folder, "closed")
        for path in (folder / "m.zarr", folder / "m.zarr" / ids[1], mine):
            path.chmod(0o777)
        # One that may be neither read nor moved, and a leftover likewise.
        for path in (folder / "m.zarr" / ids[0], closed):
            path.chmod(0o700)
        for path in (folder / "m.zarr" / ids[1]).rglob("*"):
            path.chmod(0o777)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), store.location],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            check=False,
        )
        removed, swept, left = json.loads(done.stdout)
        assert removed == [ids[1]], done.stderr
        assert swept == [str(mine)]
        assert len(left) == 2
        assert all("Permission denied" in note for note in left)
        assert {note.split(" ")[0] for note in left} == {
            str(folder / ".m.zarr.tmp-gone-closed"),
            str(folder / "m.zarr" / ids[0]),
        }
        assert store.load("causal/q4").version == ids[2]


def test_gc_works_on_a_full_disk(five, tmp_path, monkeypatch):
    """It makes nothing: no file, no folder."""
    store, ids = five
    sidecar(store, ids[0], age=9e6)
    leftover(tmp_path, "old")

    def full(*_arguments, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("mkdir", "link"):
        monkeypatch.setattr(os, name, full)
    report = store.gc(keep=1)
    assert (len(report.removed), len(report.swept), report.left) == (4, 2, ())
    assert {path.name for path in tmp_path.iterdir()} == {"m.zarr", "sidecars"}


def test_gc_of_a_store_that_may_not_be_written_is_refused_in_one_line(five, monkeypatch):
    store, _ = five

    def refuse(path, target):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(StoreWriteError, match="Read-only file system; nothing was changed"):
        store.gc(keep=1)
    assert len(store.versions()) == 5


def test_what_another_gc_has_in_hand_is_left_to_it(five, tmp_path):
    """Where there are no locks: a version that it may have to put back is old by its content."""
    store, ids = five
    taken = tmp_path / f".m.zarr.tmp-gone-{ids[0]}-other"
    (Path(store.location) / ids[0]).rename(taken)
    assert len(store.gc(keep=1).removed) == 3
    assert taken.exists()
