"""One contract for every source of bytes: folder, zip, URL."""

import itertools
import os
import stat
import threading
import time
import zipfile
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import cache
from cache.archive import ZipSource
from cache.errors import DamagedEntryError, StoreReadError, VersionRemovedError
from cache.remote import UrlSource, url_source
from cache.source import FolderSource, read_part
from cache.upload import RemoteWriter
from tests.cache.samples import DictSource, entries, files_of, published

_NAMES = itertools.count()


@pytest.fixture(params=["folder", "zip", "memory", "file"])
def source(request, tmp_path):
    store = published(tmp_path / "m.zarr")
    if request.param == "folder":
        yield FolderSource(tmp_path / "m.zarr")
    elif request.param == "zip":
        cache.pack(store, tmp_path / "m.zip")
        zipped = ZipSource(tmp_path / "m.zip")
        yield zipped
        zipped.close()
    elif request.param == "memory":
        name = f"bucket{next(_NAMES)}/m.zarr"
        cache.push(store, f"memory://{name}")
        yield url_source(f"memory://{name}")
    else:
        yield url_source(f"file://{tmp_path}/m.zarr")


@pytest.fixture
def files(tmp_path, source):
    return files_of(cache.open_store(tmp_path / "m.zarr"))


def test_every_file_reads_as_it_is(source, files):
    for key, data in files.items():
        assert source.read(key, len(data)) == data
        assert key in source.name(key)
        assert source.location in source.name(key)


def test_a_file_longer_than_allowed_is_refused(source, files):
    for key, data in files.items():
        with pytest.raises(DamagedEntryError, match="longer than it can be"):
            source.read(key, len(data) - 1)


def test_what_is_not_there_is_none(source):
    assert source.read("0" * 64 + "/zarr.json", 100) is None
    assert source.read("zarr.json/zarr.json", 100) is None


def test_versions_and_sizes_are_listed(source, files):
    (version,) = source.version_ids()
    assert source.file_sizes(version) == {
        key: len(data) for key, data in files.items() if key != "zarr.json"
    }
    assert source.file_sizes("0" * 64) == {}


def test_eight_threads_read_at_once(source, files):
    wrong = []

    def read():
        for key, data in list(files.items()) * 5:
            if source.read(key, len(data)) != data:
                wrong.append(key)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class OneConnection(MemoryFileSystem):
    """A file system that notes how many threads are in it at once, as ftp has one connection."""

    protocol = "lone"
    inside: ClassVar = []
    most = 0
    calls = 0

    def __getattribute__(self, name):
        if name not in {"cat_file", "exists", "info", "invalidate_cache", "ls"}:
            return super().__getattribute__(name)
        method = getattr(MemoryFileSystem, name)

        def noting(*arguments, **options):
            kind, thread = type(self), threading.get_ident()
            kind.calls += 1
            kind.inside.append(thread)
            kind.most = max(kind.most, len(set(kind.inside)))
            time.sleep(0.002)
            try:
                return method(self, *arguments, **options)
            finally:
                kind.inside.remove(thread)

        return noting


class ManyConnections(OneConnection):
    async_impl = True


@pytest.mark.parametrize("kind", [OneConnection, ManyConnections])
def test_calls_of_a_file_system_that_is_not_async_come_one_at_a_time(tmp_path, kind):
    store = published(tmp_path / "m.zarr")
    name = f"bucket{next(_NAMES)}/m.zarr"
    cache.push(store, f"memory://{name}")
    # Two sources of one thread share the file system, as fsspec has it.
    sources = [UrlSource(f"lone://{name}", kind(), f"/{name}") for _ in range(2)]
    assert sources[0].filesystem is sources[1].filesystem
    acts = (
        lambda source: source.read("zarr.json", 1000),
        lambda source: source.version_ids(),
        lambda source: source.file_sizes(store.current),
        lambda source: source.strangers(),
        lambda source: RemoteWriter(source).holds("zarr.json", b"other"),
    )
    gate = threading.Barrier(2 * len(acts))

    def call(act, source):
        gate.wait()
        act(source)

    threads = [
        threading.Thread(target=call, args=(act, source)) for act in acts for source in sources
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kind.calls > 20
    assert (kind.most == 1) == (kind is OneConnection)


def test_a_folder_lists_versions_only(tmp_path):
    store = published(tmp_path / "m.zarr")
    for name in ("attest", "A" * 64, "0" * 64, "1" * 63):
        (tmp_path / "m.zarr" / name).mkdir()
    assert store.source.version_ids() == [store.current]
    assert FolderSource(tmp_path / "absent").version_ids() == []


def test_a_url_lists_versions_whose_document_is_there():
    """One that another push has begun has chunks, and no document yet."""
    name, version, begun = f"bucket{next(_NAMES)}/m.zarr", "1" * 64, "0" * 64
    files = MemoryFileSystem()
    for key in (
        f"{version}/zarr.json",
        f"{version}/spans/c/0",
        f"{begun}/spans/c/0",
        "a/zarr.json",
    ):
        files.pipe_file(f"/{name}/{key}", b"x")
    assert url_source(f"memory://{name}").version_ids() == [version]


@pytest.mark.timeout(60)
def test_a_pipe_or_an_endless_link_does_not_hang(tmp_path):
    source = FolderSource(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    for key in ("pipe", "zero", "folder"):
        with pytest.raises(DamagedEntryError, match="must be a regular file"):
            source.read(key, 100)
    with pytest.raises(StoreReadError, match="loop"):
        source.read("loop", 100)


def test_a_hub_snapshot_of_links_reads(tmp_path):
    """The Hugging Face hub's client gives a folder of links to files kept elsewhere."""
    store = published(tmp_path / "m.zarr")
    snapshot = tmp_path / "snapshot"
    for number, (key, data) in enumerate(files_of(store).items()):
        blob = tmp_path / f"blob{number}"
        blob.write_bytes(data)
        (snapshot / key).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / key).symlink_to(blob)
    assert cache.open_store(snapshot).verify() == []


def packed_members(tmp_path):
    store = published(tmp_path / "m.zarr")
    return [
        ("zarr.json", (tmp_path / "m.zarr" / "zarr.json").read_bytes()),
        *((key, data) for key, data in files_of(store).items() if key != "zarr.json"),
    ]


def zipped(path, members, **fields):
    """A zip of members; ``fields`` are set on the last one."""
    with zipfile.ZipFile(path, "w") as archive:
        for position, (name, data) in enumerate(members):
            info = zipfile.ZipInfo(name)
            if position == len(members) - 1:
                for field, value in fields.items():
                    setattr(info, field, value)
            archive.writestr(info, data)


@pytest.mark.parametrize(
    "name",
    [
        "../zarr.json",
        "/zarr.json",
        "a/../zarr.json",
        "C:\\zarr.json",
        "extra",
        "m.zarr/zarr.json",
        "0" * 64 + "/",
        "0" * 64 + "/spans/c/00",
        "0" * 64 + "/spans/c/0/../../../../../x",
        "0" * 64 + "/other/zarr.json",
        "ZARR.JSON",
    ],
)
def test_a_member_of_another_name_is_refused(tmp_path, name):
    zipped(tmp_path / "z.zip", [*packed_members(tmp_path), (name, b"x")])
    before = sorted(tmp_path.rglob("*"))
    for use in (cache.open_store, lambda path: cache.unpack(path, tmp_path / "n.zarr")):
        with pytest.raises(DamagedEntryError, match="must be named by a key of the format"):
            use(tmp_path / "z.zip")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_zip_lists_the_versions_whose_document_it_holds(tmp_path):
    members = packed_members(tmp_path)
    version = next(name.split("/")[0] for name, _ in members if "/" in name)
    for kept, wanted in (
        (members, [version]),
        ([item for item in members if item[0] != f"{version}/zarr.json"], []),
    ):
        zipped(tmp_path / "z.zip", kept)
        source = ZipSource(tmp_path / "z.zip")
        assert source.version_ids() == wanted
        source.close()


def test_a_name_that_goes_on_behind_a_zero_byte_is_refused(tmp_path):
    """Python's zipfile cuts it there, another program may not."""
    *members, (name, data) = packed_members(tmp_path)
    zipped(tmp_path / "z.zip", [*members, (f"{name}#/../../x", data)])
    content = (tmp_path / "z.zip").read_bytes()
    (tmp_path / "z.zip").write_bytes(content.replace(f"{name}#".encode(), f"{name}\0".encode()))
    with zipfile.ZipFile(tmp_path / "z.zip") as archive:
        assert archive.namelist()[-1] == name
    with pytest.raises(DamagedEntryError, match="must be named by a key of the format"):
        cache.open_store(tmp_path / "z.zip")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"external_attr": (stat.S_IFLNK | 0o777) << 16}, "must be a regular file"),
        ({"external_attr": (stat.S_IFIFO | 0o777) << 16}, "must be a regular file"),
        ({"compress_type": zipfile.ZIP_DEFLATED}, "must be stored"),
    ],
)
def test_a_link_or_a_packed_member_is_refused(tmp_path, fields, message):
    zipped(tmp_path / "z.zip", packed_members(tmp_path), **fields)
    with pytest.raises(DamagedEntryError, match=message):
        cache.open_store(tmp_path / "z.zip")


def test_a_name_that_stands_twice_is_refused(tmp_path):
    members = packed_members(tmp_path)
    with pytest.warns(UserWarning, match="Duplicate name"):
        zipped(tmp_path / "z.zip", [*members, members[0]])
    with pytest.raises(DamagedEntryError, match="a name must stand once"):
        cache.open_store(tmp_path / "z.zip")


def test_members_that_claim_more_than_the_file_are_refused(tmp_path):
    """Members that overlap, or whose sizes lie, are how a small zip becomes a large one."""
    zipped(tmp_path / "z.zip", packed_members(tmp_path))
    data = bytearray((tmp_path / "z.zip").read_bytes())
    place = data.rindex(b"PK\x01\x02")
    data[place + 20 : place + 28] = (10**9).to_bytes(4, "little") * 2
    (tmp_path / "z.zip").write_bytes(data)
    with pytest.raises(DamagedEntryError, match="sizes must fit the file"):
        cache.open_store(tmp_path / "z.zip")


def test_too_many_members_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("cache.archive.MAX_ZIP_MEMBERS", 3)
    zipped(tmp_path / "z.zip", packed_members(tmp_path))
    with pytest.raises(DamagedEntryError, match="has at most 3 members"):
        cache.open_store(tmp_path / "z.zip")


def test_what_is_no_zip_is_refused(tmp_path):
    (tmp_path / "z.zip").write_bytes(b"not a zip")
    with pytest.raises(DamagedEntryError, match="it must be a zip"):
        cache.open_store(tmp_path / "z.zip")


def test_a_flipped_member_is_refused(tmp_path):
    store = published(tmp_path / "m.zarr")
    cache.pack(store, tmp_path / "m.zip")
    data = bytearray((tmp_path / "m.zip").read_bytes())
    data[data.index(b"spans/c/0") + 40] ^= 1
    (tmp_path / "m.zip").write_bytes(data)
    with pytest.raises(DamagedEntryError, match="the zip must hold it whole"):
        cache.open_store(tmp_path / "m.zip").load("causal/q4")


def test_a_backend_that_fails_is_typed(tmp_path, monkeypatch):
    source = url_source("memory://typed/m.zarr")
    monkeypatch.setattr(
        type(source.filesystem),
        "info",
        lambda *_a, **_k: (_ for _ in ()).throw(TimeoutError("slow")),
    )
    with pytest.raises(StoreReadError, match=r"no answer for 30 s; see that the server is up"):
        source.read("zarr.json", 100)


def test_url_sizes_lie_and_are_checked_again(monkeypatch):
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file("/liar/zarr.json", b"x" * 100)
    source = url_source("memory://liar")
    monkeypatch.setattr(type(filesystem), "info", lambda *_a, **_k: {"size": 1})
    with pytest.raises(DamagedEntryError, match="longer than it can be"):
        source.read("zarr.json", 10)


def test_entries_of_a_zip_equal_those_of_the_folder(tmp_path):
    store = published(tmp_path / "m.zarr")
    cache.pack(store, tmp_path / "m.zip")
    zipped_store = cache.open_store(tmp_path / "m.zip")
    assert zipped_store.current == store.current
    for made in entries():
        assert zipped_store.load(made.name).sha256 == store.load(made.name).sha256
    assert zipped_store.verify() == []


class Passing(DictSource):
    """Holds the files of one state after another: each read moves on."""

    def __init__(self, *states):
        super().__init__(states[0])
        self.states = iter(states)

    def read(self, key, limit):
        self.files = next(self.states)
        return super().read(key, limit)


def test_what_became_of_a_version_whose_file_is_missing_is_told():
    version = "ab" * 32
    key, document = f"{version}/spans/c/0", f"{version}/zarr.json"
    gone, bare, whole = {}, {document: b"{}"}, {document: b"{}", key: b"data"}
    assert read_part(Passing(whole), key, 9) == b"data"
    # Removed by a gc, and put back by a publish between two reads.
    assert read_part(Passing(gone, whole, whole), key, 9) == b"data"
    with pytest.raises(VersionRemovedError):
        read_part(Passing(gone, gone), key, 9)
    with pytest.raises(DamagedEntryError, match="the file is missing") as caught:
        read_part(Passing(bare, bare, bare), key, 9)
    assert caught.value.file == f"memory/{key}"
