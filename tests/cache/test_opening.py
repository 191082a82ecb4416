"""Which places are opened, for reading or writing, and what is said of those that are not."""

from pathlib import Path

import pytest

import cache
from cache.archive import ZipSource
from cache.errors import (
    DamagedEntryError,
    ShippingError,
    StoreNotFoundError,
    StoreWriteError,
    VersionNotFoundError,
)
from cache.remote import UrlSource
from cache.source import FolderSource
from tests.cache.samples import entries, published

BUILD = "python -m maskgen build --config FILE --cache"


@pytest.fixture
def store(tmp_path):
    return published(tmp_path / "m.zarr")


@pytest.fixture
def packed(store, tmp_path):
    cache.pack(store, tmp_path / "m.zip")
    return tmp_path / "m.zip"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("{}/m.zarr", FolderSource),
        ("file://{}/m.zarr", FolderSource),
        ("{}/m.zip", ZipSource),
        ("file://{}/m.zip", ZipSource),
        ("memory://opened/m.zarr", UrlSource),
    ],
)
def test_a_place_is_read_by_what_it_is(store, packed, tmp_path, name, kind):
    location = name.format(tmp_path)
    if kind is UrlSource:
        cache.push(store, location)
    opened = cache.open_store(location)
    assert type(opened.source) is kind
    assert opened.location == location.removeprefix("file://")
    assert opened.current == store.current
    assert opened.load("causal/q8").sha256 == store.load("causal/q8").sha256


def test_a_path_a_text_and_a_file_url_are_written_alike(tmp_path):
    for number, location in enumerate(
        (tmp_path / "0.zarr", f"{tmp_path}/1.zarr", f"file://{tmp_path}/2.zarr")
    ):
        made = cache.open_store(location, writable=True).publish(entries())
        assert cache.open_store(tmp_path / f"{number}.zarr").current == made


def test_what_is_not_there_is_told_with_what_brings_it(tmp_path):
    folder = tmp_path / "m.zarr"
    for location, message in (
        (
            folder,
            f"there is no cache at {folder} (no zarr.json in it); `unpack` and `pull` bring one, "
            f"or run: {BUILD} {folder}",
        ),
        (
            "memory://nowhere/m.zarr",
            "there is no cache at memory://nowhere/m.zarr (no zarr.json in it); check the address; "
            f"`push` puts one there: run: {BUILD} masks.zarr && python -m maskgen push "
            "memory://nowhere/m.zarr --cache masks.zarr",
        ),
        (
            tmp_path / "m.zip",
            f"there is no file {tmp_path}/m.zip; run: {BUILD} {folder} && python -m maskgen pack "
            f"{tmp_path}/m.zip --cache {folder}",
        ),
    ):
        with pytest.raises(StoreNotFoundError) as caught:
            cache.open_store(location)
        assert str(caught.value) == message
        assert caught.value.location == str(location)
    # A folder without a root is none either, and a file no folder.
    folder.mkdir()
    with pytest.raises(StoreNotFoundError, match="there is no cache at"):
        cache.open_store(folder)
    (tmp_path / "file.zarr").write_bytes(b"")
    with pytest.raises(StoreNotFoundError) as caught:
        cache.open_store(tmp_path / "file.zarr")
    assert str(caught.value) == (
        f"{tmp_path}/file.zarr is a file; a cache is a folder, or a packed file in .zip"
    )
    assert caught.value.location == f"{tmp_path}/file.zarr"


@pytest.mark.parametrize("name", ["m", "m.zar", "m.zarr.bak", "m.zip", "memory://m.zarr"])
def test_what_cannot_be_written_is_told_before_it_is_read(packed, tmp_path, name):
    location = name if "://" in name else f"{tmp_path}/{name}"
    with pytest.raises(StoreWriteError) as caught:
        cache.open_store(location, writable=True)
    assert str(caught.value) == (f"{location} cannot be written: name a folder that ends in .zarr")
    assert caught.value.file == location


@pytest.mark.parametrize("name", ["masks", "mzip", "m.zip.d", ".zip"])
def test_a_folder_of_any_name_is_read(store, tmp_path, name):
    Path(store.location).rename(tmp_path / name)
    assert cache.open_store(tmp_path / name).current == store.current


WRITES = {
    "publish": lambda store: store.publish(entries(1)),
    "use": lambda store: store.use(store.current),
    "gc": lambda store: store.gc(1),
    "check_writable": lambda store: store.check_writable(),
    "writer": lambda store: store.writer(),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_was_opened_for_reading_is_not_written(store, packed, tmp_path, write):
    cache.push(store, "memory://closed/m.zarr")
    advice = {
        store.location: "was opened for reading: open it with writable=True",
        str(packed): "is read-only: unpack or pull it into a .zarr folder first",
        "memory://closed/m.zarr": "is read-only: unpack or pull it into a .zarr folder first",
    }
    for location, message in advice.items():
        with pytest.raises(StoreWriteError) as caught:
            WRITES[write](cache.open_store(location))
        assert str(caught.value) == f"{location} {message}"
        assert caught.value.file == location


@pytest.mark.parametrize("keep", [0, -1])
def test_a_gc_that_would_keep_nothing_is_refused_and_one_is_enough(store, keep):
    store.publish(entries(1, scale=9))
    with pytest.raises(ValueError, match=f"^keep must be 1 or more, found {keep}$"):
        store.gc(keep, min_age_s=-1)
    assert len(store.versions()) == 2
    assert len(store.gc(1, min_age_s=-1).removed) == 1


def test_no_current_version_is_told_with_what_brings_one(tmp_path):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    for ask in (store.resolve, store.version, store.load_all, store.reader):
        with pytest.raises(VersionNotFoundError) as caught:
            ask()
        assert str(caught.value) == (
            f"{store.location} has no current version; `use` one, or run: {BUILD} {store.location}"
        )
        assert caught.value.version == "current"


def test_sidecars_stand_beside_whatever_holds_the_version(store, packed, tmp_path, monkeypatch):
    version = store.current
    wanted = tmp_path / "sidecars" / version
    assert cache.open_store(packed).sidecar_dir(version) == wanted
    assert cache.open_store(f"file://{tmp_path}/m.zarr").sidecar_dir(version) == wanted
    monkeypatch.chdir(tmp_path)
    for name in ("m.zarr", "m.zip"):
        assert cache.open_store(name).sidecar_dir(version) == wanted
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "n.zarr").symlink_to(tmp_path / "m.zarr")
    assert cache.open_store("link/n.zarr").sidecar_dir(version) == wanted


def test_a_sidecar_is_read_where_it_stands_and_by_its_old_place_last(store, packed, tmp_path):
    version = store.current
    new, old = (tmp_path / top / version for top in ("sidecars", "attest"))
    for opened in (store, cache.open_store(packed)):
        assert opened.find_sidecar(version, "a.json") == new / "a.json"
    old.mkdir(parents=True)
    (old / "a.json").write_bytes(b"old")
    assert store.find_sidecar(version, "a.json") == old / "a.json"
    # Another name, or another version's.
    assert store.find_sidecar(version, "b.json") == new / "b.json"
    assert store.find_sidecar("0" * 64, "a.json").parent == new.with_name("0" * 64)
    new.mkdir(parents=True)
    assert store.find_sidecar(version, "a.json") == old / "a.json"
    (new / "a.json").write_bytes(b"new")
    assert store.find_sidecar(version, "a.json") == new / "a.json"


def test_nothing_stands_beside_a_url(store):
    url = "memory://beside/m.zarr"
    cache.push(store, url)
    far = cache.open_store(url)
    for ask in (far.sidecar_dir, lambda version: far.find_sidecar(version, "a.json")):
        with pytest.raises(StoreWriteError) as caught:
            ask(store.current)
        assert str(caught.value) == f"{url} has no folder beside it; pull it first"
        assert caught.value.file == url


def test_a_root_of_the_longest_allowed_length_is_read_and_no_longer_one(store):
    root = Path(store.location, "zarr.json")
    text = root.read_bytes()
    root.write_bytes(text + b" " * ((1 << 16) - len(text)))
    assert cache.open_store(store.location).current == store.current
    root.write_bytes(text + b" " * ((1 << 16) + 1 - len(text)))
    with pytest.raises(DamagedEntryError) as caught:
        cache.open_store(store.location)
    assert caught.value.expected == "at most 65536 bytes"
    assert (caught.value.file, caught.value.found) == (str(root), 65537)


def test_unpack_takes_a_zip_alone_and_closes_it(store, packed, tmp_path, monkeypatch):
    with pytest.raises(ShippingError) as caught:
        cache.unpack(store.location, tmp_path / "n.zarr")
    assert str(caught.value) == f"{store.location} is no .zip; `pull` takes others"
    assert caught.value.location == store.location
    closed, close = [], ZipSource.close

    def noting(source):
        closed.append(source.location)
        close(source)

    monkeypatch.setattr(ZipSource, "close", noting)
    cache.unpack(packed, tmp_path / "n.zarr")
    assert closed == [str(packed)]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreWriteError):
        cache.unpack(packed, tmp_path / "file" / "n.zarr")
    assert closed == [str(packed)] * 2
