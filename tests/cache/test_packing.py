"""pack and push: what is written where, in which order, and what stays when they fail."""

import errno
import os
import stat
import zipfile
from pathlib import Path

import pytest

import cache
from cache import ship
from cache.errors import (
    DamagedEntryError,
    FormatVersionError,
    StoreWriteError,
    VersionNotFoundError,
)
from cache.format import root_document
from cache.remote import url_source
from tests.cache.samples import entries, files_of, published


@pytest.fixture
def store(tmp_path):
    """Two versions; the second is current."""
    store = published(tmp_path / "m.zarr", entries(1))
    store.publish(entries(2, scale=2))
    return store


@pytest.fixture
def first(store):
    return next(line.id for line in store.versions() if line.id != store.current)


def members(path):
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def test_a_zip_holds_one_version_and_its_root_in_order(store, first, tmp_path):
    files = files_of(store)
    for number, (version, asked) in enumerate(((store.current, None), (first, first[:6]))):
        path = tmp_path / "deep" / "down" / f"{number}.zip"
        done = cache.pack(store, path, asked)
        wanted = {key: data for key, data in files.items() if key.startswith(version)}
        wanted["zarr.json"] = root_document(version)
        assert members(path) == wanted
        assert done == cache.Shipment(version, 6, 0, sum(map(len, wanted.values())))
        with zipfile.ZipFile(path) as archive:
            listed = archive.infolist()
        assert [info.filename for info in listed] == sorted(wanted)
        for info in listed:
            assert info.compress_type == zipfile.ZIP_STORED
            assert info.external_attr >> 16 == stat.S_IFREG | 0o644
            assert (info.date_time, info.create_system) == ((1980, 1, 1, 0, 0, 0), 3)
        assert [name.name for name in path.parent.iterdir() if name.suffix != ".zip"] == []


def test_a_zip_that_is_there_is_replaced_whole_or_not_at_all(store, first, tmp_path, monkeypatch):
    path = tmp_path / "m.zip"
    cache.pack(store, path, first)
    old = path.read_bytes()
    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:

            def refuse(*_arguments, **_options):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            patch.setattr(os, call, refuse)
            with pytest.raises(StoreWriteError) as caught:
                cache.pack(store, path)
        assert str(caught.value) == (
            f"cannot write {path}: No space left on device; no part of a zip was left; make room "
            "or choose another folder, then run it again"
        )
        assert (caught.value.file, caught.value.errno) == (str(path), errno.ENOSPC)
        assert isinstance(caught.value.__cause__, OSError)
        assert path.read_bytes() == old
        assert sorted(name.name for name in tmp_path.iterdir()) == ["m.zarr", "m.zip"]
    cache.pack(store, path)
    assert cache.open_store(path).current == store.current


def test_a_zip_appears_by_one_rename(store, tmp_path, monkeypatch):
    path, replace, seen = tmp_path / "m.zip", os.replace, []

    def noting(source, target, **options):
        seen.append((Path(source).parent.parent, Path(source).parent.name[:11], Path(target)))
        assert members(source)
        assert not path.exists()
        replace(source, target, **options)

    monkeypatch.setattr(os, "replace", noting)
    cache.pack(store, path)
    assert seen == [(tmp_path, ".m.zip.tmp-", path)]


@pytest.mark.parametrize("name", ["m", "m.zarr", "m.ZIP", "m.zip.bak", "zip"])
def test_another_name_is_refused_before_anything_is_read(store, tmp_path, name):
    with pytest.raises(StoreWriteError) as caught:
        cache.pack(store, tmp_path / "deep" / name, "0" * 64)
    assert str(caught.value) == f"{tmp_path}/deep/{name} must end in .zip"
    assert caught.value.file == f"{tmp_path}/deep/{name}"
    assert not (tmp_path / "deep").exists()


def test_what_is_damaged_or_not_there_is_not_packed(store, first, tmp_path):
    chunk = Path(store.location, first, "tables", "c", "0")
    whole = chunk.read_bytes()
    chunk.write_bytes(b"")
    for version, kind in ((first, DamagedEntryError), ("0" * 64, VersionNotFoundError)):
        with pytest.raises(kind):
            cache.pack(store, tmp_path / "deep" / "m.zip", version)
        with pytest.raises(kind):
            cache.push(store, "memory://packing/damaged.zarr", version)
    assert not (tmp_path / "deep").exists()
    # The one beside it is sound.
    cache.pack(store, tmp_path / "m.zip")
    chunk.write_bytes(whole)
    cache.pack(store, tmp_path / "m.zip", first)


def test_a_chunk_that_is_harmed_after_it_was_verified_is_not_shipped(store, tmp_path, monkeypatch):
    chunk = Path(store.location, store.current, "spans", "c", "0")
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    findings = ship.findings_of

    def harming(source, version):
        found = findings(source, version)
        chunk.write_bytes(data)
        return found

    monkeypatch.setattr("cache.ship.findings_of", harming)
    whole = chunk.read_bytes()
    for send in (
        lambda: cache.pack(store, tmp_path / "m.zip"),
        lambda: cache.push(store, "memory://packing/harmed.zarr"),
    ):
        with pytest.raises(DamagedEntryError, match="CRC-32C must fit"):
            send()
        chunk.write_bytes(whole)
    assert not (tmp_path / "m.zip").exists()
    with pytest.raises(cache.errors.StoreNotFoundError):
        cache.open_store("memory://packing/harmed.zarr")


@pytest.mark.parametrize("make_current", [True, False])
@pytest.mark.parametrize("form", ["{}/n.zarr", "file://{}/n.zarr"])
def test_a_push_to_a_folder_is_a_pull(store, first, tmp_path, form, make_current):
    other = published(tmp_path / "n.zarr", entries(1, scale=9))
    done = cache.push(store, form.format(tmp_path), first[:8], make_current=make_current)
    assert done.version == first
    near = cache.open_store(tmp_path / "n.zarr")
    assert near.current == (first if make_current else other.current)
    assert near.verify() == []
    assert set(near.source.version_ids()) == {first, other.current}


def test_what_stands_at_a_url_is_looked_at_before_a_version_is_sent(store, monkeypatch):
    url = "memory://packing/other.zarr"
    far = url_source(url)
    far.filesystem.pipe_file(far.path("zarr.json"), b'{"attributes":{},"zarr_format":3}')
    monkeypatch.setattr("cache.ship.findings_of", lambda *_: pytest.fail("read"))
    with pytest.raises(FormatVersionError):
        cache.push(store, url)
    assert [path.rsplit("/", 1)[1] for path in far.filesystem.find(far.root)] == ["zarr.json"]


@pytest.mark.parametrize("way", ["pull", "unpack"])
def test_a_version_becomes_current_unless_that_is_not_wanted(store, first, tmp_path, way):
    cache.pack(store, tmp_path / "a.zip", first)
    bring = {
        "pull": lambda near, **options: cache.pull(store.location, near, first[:8], **options),
        "unpack": lambda near, **options: cache.unpack(tmp_path / "a.zip", near, **options),
    }[way]
    for name, options, is_current in (
        ("b", {}, True),
        ("c", {"make_current": True}, True),
        ("d", {"make_current": False}, False),
    ):
        near = tmp_path / f"{name}.zarr"
        assert bring(near, **options).version == first
        assert cache.open_store(near).current == (first if is_current else None)
        assert cache.open_store(near).verify(first) == []
