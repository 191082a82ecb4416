"""Which versions a gc keeps: by their number, their age, and which one is current."""

import errno
import fcntl
import os
import shutil
import time
from pathlib import Path

import pytest

import cache
from cache import sweep
from cache.errors import StoreReadError, StoreWriteError
from cache.format import root_document
from tests.cache.samples import entries, files_of, published


@pytest.fixture
def four(tmp_path):
    """Four versions, the newest first, of ages of 2, 3, 4 and 5 hours; the newest is current."""
    store = published(tmp_path / "m.zarr", entries(1, scale=4))
    ids = [store.current, *(store.publish(entries(1, scale=s)) for s in (3, 2, 1))][::-1]
    for position, version in enumerate(ids):
        when = time.time() - 3600 * (2 + position)
        os.utime(tmp_path / "m.zarr" / version, (when, when))
    return store, ids


def make_current(store, version):
    """As a choice does that makes nothing young."""
    Path(store.location, "zarr.json").write_bytes(root_document(version))


@pytest.mark.parametrize("current", [0, 1, 2, 3, None])
@pytest.mark.parametrize("keep", [1, 2, 3, 4, 9])
def test_the_newest_and_the_current_one_stay(four, keep, current):
    store, ids = four
    make_current(store, None if current is None else ids[current])
    others = [version for position, version in enumerate(ids) if position != current]
    room = keep if current is None else keep - 1
    report = cache.open_store(store.location, writable=True).gc(keep)
    # The newest of what goes is the first.
    assert report.removed == tuple(others[room:])
    assert (report.swept, report.left) == ((), ())
    assert set(store.source.version_ids()) == set(ids) - set(report.removed)
    assert [path.name for path in Path(store.location).parent.iterdir()] == ["m.zarr"]


@pytest.mark.parametrize(
    ("options", "removed"),
    [
        ({}, [1, 2, 3]),
        ({"min_age_s": 3600 * 4 - 60}, [2, 3]),
        ({"min_age_s": 3600 * 4 + 60}, [3]),
        ({"min_age_s": 3600 * 6}, []),
        ({"min_age_s": 0}, [1, 2, 3]),
    ],
)
def test_young_versions_stay(four, options, removed):
    store, ids = four
    assert store.gc(1, **options).removed == tuple(ids[position] for position in removed)


@pytest.mark.parametrize(("age", "goes"), [(3540, False), (3660, True)])
def test_by_default_what_is_an_hour_old_is_old(tmp_path, age, goes):
    store = published(tmp_path / "m.zarr", entries(1))
    old = store.current
    store.publish(entries(2))
    left, sidecar = tmp_path / ".m.zarr.tmp-left", tmp_path / "sidecars" / ("0" * 64)
    for path in (left, sidecar):
        path.mkdir(parents=True)
    when = time.time() - age
    for path in (tmp_path / "m.zarr" / old, left, sidecar):
        os.utime(path, (when, when))
    report = store.gc(1)
    assert report.removed == ((old,) if goes else ())
    assert report.swept == ((str(left), str(sidecar)) if goes else ())


def test_what_goes_is_counted_to_the_byte(four, tmp_path):
    store, ids = four
    sizes = dict.fromkeys(ids, 0)
    for key, data in files_of(store).items():
        if key != "zarr.json":
            sizes[key.split("/")[0]] += len(data)
    left = tmp_path / ".m.zarr.tmp-left"
    for key, size in (("a", 7), ("deep/b", 11)):
        (left / key).parent.mkdir(parents=True, exist_ok=True)
        (left / key).write_bytes(b"x" * size)
    for top, size in (("sidecars", 13), ("attest", 17)):
        (tmp_path / top / ids[3]).mkdir(parents=True)
        (tmp_path / top / ids[3] / "c.json").write_bytes(b"x" * size)
    os.utime(left, (1, 1))
    report = store.gc(3)
    assert report == sweep.GcReport(
        (ids[3],),
        (str(left), str(tmp_path / "sidecars" / ids[3]), str(tmp_path / "attest" / ids[3])),
        sizes[ids[3]] + 7 + 11 + 13 + 17,
        (),
    )
    assert store.gc(3) == sweep.GcReport((), (), 0, ())


def test_a_second_gc_is_told_to_wait(four, monkeypatch):
    store, _ = four
    assert sweep._PATIENCE_S == 2
    monkeypatch.setattr(sweep, "_PATIENCE_S", 0.05)
    # It waits for who chooses a version; another gc takes longer.
    monkeypatch.setattr("cache.place.PATIENCE_S", 20)
    descriptor = os.open(store.location, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    begun = time.monotonic()
    with pytest.raises(StoreWriteError) as caught:
        store.gc(1)
    assert 0.05 <= time.monotonic() - begun < 15
    os.close(descriptor)
    assert str(caught.value) == f"another gc, or a repair, is at {store.location}; wait for it"
    assert (caught.value.file, caught.value.errno) == (store.location, errno.EAGAIN)
    assert len(store.versions()) == 4
    assert len(store.gc(1).removed) == 3


def test_what_was_set_aside_goes_even_if_the_rest_fails(four, tmp_path, monkeypatch):
    store, ids = four

    def refuse(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep._Sweep, "sidecars", refuse)
    with pytest.raises(KeyboardInterrupt):
        store.gc(1)
    assert [path.name for path in tmp_path.iterdir()] == ["m.zarr"]
    assert store.source.version_ids() == ids[:1]


def test_a_root_that_cannot_be_read_ends_a_gc_before_it_removes(four, tmp_path):
    store, ids = four
    root = tmp_path / "m.zarr" / "zarr.json"
    root.unlink()
    root.symlink_to("zarr.json")
    with pytest.raises(StoreReadError):
        store.gc(1)
    assert store.source.version_ids() == ids


@pytest.mark.parametrize("top", ["sidecars", "attest"])
def test_sidecars_of_both_places_go_by_their_version(four, tmp_path, top):
    store, ids = four
    names = [*ids, "0" * 64, "1" * 64, "notes"]
    for name in names:
        (tmp_path / top / name).mkdir(parents=True)
        if name != "1" * 64:
            os.utime(tmp_path / top / name, (1, 1))
    report = store.gc(2)
    assert report.removed == tuple(ids[2:])
    gone = sorted([*ids[2:], "0" * 64])
    assert report.swept == tuple(str(tmp_path / top / name) for name in gone)
    assert {path.name for path in (tmp_path / top).iterdir()} == set(names) - set(gone)


def test_a_version_that_cannot_be_moved_stays_with_its_sidecars(four, tmp_path, monkeypatch):
    store, ids = four
    for version in ids:
        (tmp_path / "sidecars" / version).mkdir(parents=True)
        os.utime(tmp_path / "sidecars" / version, (1, 1))
    rename = os.rename

    def refuse(source, target, **options):
        if Path(source).name == ids[2] and Path(source).parent.name == "m.zarr":
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(source))
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", refuse)
    report = store.gc(1)
    assert report.removed == (ids[1], ids[3])
    assert report.left == (f"{tmp_path}/m.zarr/{ids[2]} stays: Directory not empty",)
    assert report.swept == tuple(
        sorted(str(tmp_path / "sidecars" / version) for version in (ids[1], ids[3]))
    )


def test_what_cannot_be_deleted_is_noted_and_not_counted(four, tmp_path, monkeypatch):
    store, ids = four
    (tmp_path / "sidecars" / ids[3]).mkdir(parents=True)
    remove = shutil.rmtree

    def refuse(path, **options):
        if ids[3] in Path(path).name and not (Path(path) / "zarr.json").exists():
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    report = store.gc(1)
    assert report.removed == tuple(ids[1:])
    assert report.swept == ()
    (note,) = report.left
    assert note.startswith(f"{tmp_path}/.m.zarr.tmp-gone-{ids[3]}-")
    assert note.endswith(" stays: Permission denied")


def test_a_gc_forgets_what_it_removed_alone(four):
    store, ids = four
    held = {version: store.load("causal/q4", version) for version in ids}
    store.gc(2)
    for version in ids[:2]:
        assert store.load("causal/q4", version) is held[version]
    assert store.source.version_ids() == ids[:2]


def test_a_young_version_is_not_even_moved(four, monkeypatch):
    """A reader would miss it for a moment."""
    store, ids = four
    rename, moved = os.rename, []

    def noting(source, target, **options):
        moved.append(Path(source).name)
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", noting)
    store.gc(1, min_age_s=3600 * 4 + 60)
    assert moved == [ids[3]]


def test_a_gc_that_finds_nothing_touches_nothing(four, tmp_path, monkeypatch):
    """Nor does it look into what stands beside where no sidecar is in question."""
    store, ids = four
    (tmp_path / "sidecars" / ids[0]).mkdir(parents=True)
    (tmp_path / "broken.zip").write_bytes(b"no zip")

    def refuse(*_arguments, **_options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for name in ("rename", "replace", "fsync", "mkdir", "unlink", "utime"):
        monkeypatch.setattr(os, name, refuse)
    assert store.gc(9) == sweep.GcReport((), (), 0, ())


def test_sidecars_of_what_a_killed_pull_had_got_go_with_it(four, tmp_path):
    """While the pull may be at work they stay: its version is not there yet."""
    store, _ = four
    version = "0" * 64
    part = tmp_path / f".m.zarr.tmp-pull-{version[:16]}-dead"
    (part / version).mkdir(parents=True)
    (part / version / "zarr.json").write_bytes(b"{}")
    sidecar = tmp_path / "sidecars" / version
    sidecar.mkdir(parents=True)
    os.utime(sidecar, (1, 1))
    assert store.gc(9).swept == ()
    os.utime(part, (1, 1))
    assert store.gc(9).swept == (str(part), str(sidecar))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_the_current_version_that_a_killed_gc_had_in_hand_is_put_back_and_no_other(
    four, tmp_path, position
):
    store, ids = four
    make_current(store, ids[0])
    for version in ids[:3]:
        (tmp_path / "m.zarr" / version).rename(tmp_path / f".m.zarr.tmp-gone-{version}-a")
    make_current(store, ids[position])
    again = cache.open_store(store.location, writable=True)
    report = again.gc(9, min_age_s=-1)
    assert again.source.version_ids() == [ids[position], ids[3]]
    assert report.swept == tuple(
        sorted(
            str(tmp_path / f".m.zarr.tmp-gone-{version}-a")
            for version in ids[:3]
            if version != ids[position]
        )
    )
    assert again.verify() == []
