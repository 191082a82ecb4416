"""pack, unpack, push and pull between folders, zips and an in-memory store."""

import errno
import itertools
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import fsspec
import pytest

import cache
from cache import receive
from cache.errors import (
    DamagedEntryError,
    FormatVersionError,
    NotListableError,
    ShippingError,
    StoreNotFoundError,
    StoreWriteError,
    VersionNotFoundError,
    VersionRemovedError,
)
from cache.remote import UrlSource
from cache.source import FolderSource
from tests.cache.samples import entries, files_of, published, truth_of

_NAMES = itertools.count()


@pytest.fixture
def store(tmp_path):
    return published(tmp_path / "m.zarr")


@pytest.fixture
def url():
    return f"memory://ship{next(_NAMES)}/m.zarr"


@pytest.fixture
def memory():
    return fsspec.filesystem("memory")


def test_two_packs_are_equal_byte_for_byte(store, tmp_path):
    cache.pack(store, tmp_path / "a.zip")
    os.utime(tmp_path / "m.zarr" / "zarr.json", (1, 1))
    packed = cache.pack(published(tmp_path / "other" / "n.zarr"), tmp_path / "b.zip")
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    size = sum(map(len, files_of(store).values()))
    assert packed == cache.Shipment(store.current, 6, 0, size)


def test_pack_takes_one_version(store, tmp_path):
    first = store.current
    store.publish(entries(4, scale=9))
    cache.pack(store, tmp_path / "a.zip", first[:8])
    packed = cache.open_store(tmp_path / "a.zip")
    assert packed.current == first
    assert [line.id for line in packed.versions()] == [first]
    assert packed.load("causal/q4").sha256 == store.load("causal/q4", first).sha256


def test_unpack_restores_the_folder(store, tmp_path):
    cache.pack(store, tmp_path / "a.zip")
    done = cache.unpack(tmp_path / "a.zip", tmp_path / "n.zarr")
    assert done.version == store.current
    assert files_of(cache.open_store(tmp_path / "n.zarr")) == files_of(store)
    assert cache.unpack(tmp_path / "a.zip", tmp_path / "n.zarr").copied == 0
    assert {path.name for path in tmp_path.iterdir()} == {"m.zarr", "n.zarr", "a.zip"}


def test_unpack_adds_to_a_store(store, tmp_path):
    cache.pack(store, tmp_path / "a.zip")
    other = published(tmp_path / "n.zarr", entries(1, scale=4))
    cache.unpack(tmp_path / "a.zip", other.location, make_current=False)
    again = cache.open_store(other.location)
    assert again.current == other.current
    assert {line.id for line in again.versions()} == {store.current, other.current}
    cache.unpack(tmp_path / "a.zip", other.location)
    assert cache.open_store(other.location).current == store.current


def test_a_damaged_version_is_not_shipped(store, tmp_path, url):
    chunk = tmp_path / "m.zarr" / store.current / "spans" / "c" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    for send in (
        lambda: cache.pack(store, tmp_path / "a.zip"),
        lambda: cache.push(store, url),
        lambda: cache.pull(store.location, tmp_path / "n.zarr"),
    ):
        with pytest.raises(DamagedEntryError, match="spans/c/0"):
            send()
    assert not (tmp_path / "a.zip").exists()
    assert not (tmp_path / "n.zarr").exists()
    with pytest.raises(StoreNotFoundError, match="there is no cache at"):
        cache.open_store(url)


def test_pack_wants_a_zip_and_room(store, tmp_path, monkeypatch):
    with pytest.raises(StoreWriteError, match=r"must end in \.zip"):
        cache.pack(store, tmp_path / "a.tar")
    monkeypatch.setattr(os, "fsync", refusing(errno.ENOSPC))
    with pytest.raises(StoreWriteError, match="No space left"):
        cache.pack(store, tmp_path / "a.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["m.zarr"]


def test_unpack_of_a_damaged_zip_leaves_nothing(store, tmp_path):
    cache.pack(store, tmp_path / "m.zip")
    data = bytearray((tmp_path / "m.zip").read_bytes())
    with zipfile.ZipFile(tmp_path / "m.zip") as archive:
        (info,) = (i for i in archive.infolist() if i.filename.endswith("tables/c/0"))
    data[info.header_offset + 30 + len(info.filename) + 20] ^= 1
    (tmp_path / "m.zip").write_bytes(data)
    with pytest.raises(DamagedEntryError, match=r"tables/c/0 is damaged.*Get the zip again"):
        cache.unpack(tmp_path / "m.zip", tmp_path / "n.zarr")
    assert list(tmp_path.glob("*n.zarr*")) == []


def test_unpack_wants_a_zip(store, tmp_path):
    with pytest.raises(ShippingError, match=r"is no \.zip; `pull` takes others"):
        cache.unpack(store.location, tmp_path / "n.zarr")


def refusing(number):
    def refuse(*_arguments):
        raise OSError(number, os.strerror(number))

    return refuse


def test_push_then_pull_gives_the_same_files(store, tmp_path, url):
    sent = cache.push(store, url)
    assert (sent.version, sent.copied, sent.kept) == (store.current, 6, 0)
    got = cache.pull(url, tmp_path / "n.zarr")
    assert got.version == store.current
    assert files_of(cache.open_store(tmp_path / "n.zarr")) == files_of(store)
    assert {path.name for path in tmp_path.iterdir()} == {"m.zarr", "n.zarr"}


def written_files(location, before):
    """The sizes of the files that were written since ``before`` was taken of the folder."""
    now = {path: path.stat() for path in location.rglob("*") if path.is_file()}
    return [at.st_size for path, at in now.items() if before.get(path) != at.st_ino]


@pytest.mark.parametrize("make_current", [True, False])
@pytest.mark.parametrize("way", ["pull", "unpack", "push"])
def test_a_shipment_counts_every_file_that_is_written(store, tmp_path, way, make_current):
    cache.pack(store, tmp_path / "a.zip")
    location = tmp_path / "n.zarr"
    ways = {
        "pull": lambda: cache.pull(store.location, location, make_current=make_current),
        "unpack": lambda: cache.unpack(tmp_path / "a.zip", location, make_current=make_current),
        "push": lambda: cache.push(store, str(location), make_current=make_current),
    }
    total = 6
    for there in ("nothing", "another version", "all"):
        if there == "another version":
            shutil.rmtree(location)
            published(location, entries(1, scale=4))
        files = location.rglob("*")
        before = {path: path.stat().st_ino for path in files if path.is_file()}
        done = ways[way]()
        sizes = written_files(location, before)
        assert (done.copied, done.copied_bytes) == (len(sizes), sum(sizes))
        assert done.copied + done.kept == total
        root_is_kept = there == "another version" and not make_current
        assert done.kept == (total if there == "all" else int(root_is_kept))


def test_push_and_pull_through_a_url_count_alike(store, tmp_path, url):
    sent = cache.push(store, url)
    assert sent == cache.Shipment(store.current, 6, 0, sum(map(len, files_of(store).values())))
    assert cache.pull(url, tmp_path / "n.zarr") == sent
    assert cache.pull(url, tmp_path / "n.zarr") == cache.push(store, url)


def test_a_version_that_is_removed_as_it_is_shipped_is_no_damage(store, tmp_path, url):
    cache.push(store, url)
    far = cache.open_store(url)
    place = far.source.path(far.version().id)
    far.source.filesystem.rm(place, recursive=True)
    gone = tmp_path / "m.zarr" / store.current
    for sending in (far, store):
        sending.version()
        shutil.rmtree(gone, ignore_errors=True)
        with pytest.raises(VersionNotFoundError, match="holds no version"):
            cache.push(sending, f"{url}2")
        with pytest.raises(VersionRemovedError, match="was removed while it was read"):
            sending.load("causal/q4")


def test_a_pull_of_what_is_removed_meanwhile_installs_nothing(store, tmp_path, monkeypatch):
    chunk = receive.sound_chunk

    def removing(source, key, length):
        shutil.rmtree(tmp_path / "m.zarr" / store.current, ignore_errors=True)
        return chunk(source, key, length)

    monkeypatch.setattr(receive, "sound_chunk", removing)
    with pytest.raises(VersionRemovedError, match="Open the cache again"):
        cache.pull(store.location, tmp_path / "n.zarr")
    assert not (tmp_path / "n.zarr").exists()


def test_a_pull_of_what_a_gc_takes_here_meanwhile_fetches_it(store, tmp_path, url, monkeypatch):
    cache.push(store, url)
    first = cache.pull(url, tmp_path / "n.zarr")
    near = cache.open_store(tmp_path / "n.zarr", writable=True)
    near.publish(entries(1, scale=9))
    place = tmp_path / "n.zarr" / store.current
    read, keys = FolderSource.read, []

    def removing(source, key, limit):
        keys.extend([key] if key.startswith(store.current) else [])
        if len(keys) == 2:
            shutil.rmtree(place, ignore_errors=True)
        return read(source, key, limit)

    monkeypatch.setattr(FolderSource, "read", removing)
    assert cache.pull(url, tmp_path / "n.zarr") == first
    monkeypatch.undo()
    assert cache.open_store(tmp_path / "n.zarr").current == store.current
    assert near.verify() == []


def test_a_url_is_read_in_place(store, url):
    cache.push(store, url)
    far = cache.open_store(url)
    assert truth_of(far) == truth_of(store)
    assert far.verify() == []
    with pytest.raises(StoreWriteError, match="unpack or pull it"):
        far.publish(entries())
    with pytest.raises(StoreWriteError, match="pull it first"):
        far.sidecar_dir(store.current)


def test_push_writes_the_root_last_and_the_document_before_it(store, url, memory, monkeypatch):
    order, parts = [], []
    pipe, move = type(memory).pipe_file, type(memory).mv

    def noting(self, path, value, **options):
        parts.append(path)
        return pipe(self, path, value, **options)

    def moving(self, source, target, **options):
        assert source == parts[-1]
        order.append(target)
        return move(self, source, target, **options)

    monkeypatch.setattr(type(memory), "pipe_file", noting)
    monkeypatch.setattr(type(memory), "mv", moving)
    cache.push(store, url)
    root = url.removeprefix("memory:/")
    assert order[-1] == f"{root}/zarr.json"
    assert order[-2] == f"{root}/{store.current}/zarr.json"
    assert len(order) == len(set(order)) == len(set(parts)) == 6
    # Beside the versions, so that one that is left is part of none.
    assert {part.rsplit("/", 1)[0] for part in parts} == {root}


def test_two_pushes_at_once_of_one_version_do_not_meet(store, url, memory, monkeypatch):
    """The second one works from beginning to end just before each file of the first is moved."""
    move = type(memory).mv

    for step in range(6):
        target, moved = f"{url}{step}", []

        def meeting(self, source, to, _step=step, _target=target, _moved=moved, **options):
            _moved.append(to)
            if len(_moved) == _step + 1:
                cache.push(store, _target)
            return move(self, source, to, **options)

        monkeypatch.setattr(type(memory), "mv", meeting)
        cache.push(store, target)
        monkeypatch.setattr(type(memory), "mv", move)
        assert len(moved) >= 6
        far = cache.open_store(target)
        assert (far.current, far.verify(), far.strangers()) == (store.current, [], [])


def test_push_sends_only_what_is_missing(store, url, memory):
    cache.push(store, url)
    assert cache.push(store, url) == cache.Shipment(store.current, 0, 6, 0)
    root = url.removeprefix("memory:/")
    memory.rm(f"{root}/{store.current}/tables/c/0")
    assert cache.push(store, url).copied == 1
    memory.pipe_file(f"{root}/{store.current}/spans/c/0", b"short")
    assert cache.push(store, url).copied == 1
    second = store.publish(entries(2, scale=8))
    assert cache.push(store, url).copied == 6
    far = cache.open_store(url)
    assert far.current == second
    assert len(far.versions()) == 2
    assert far.verify() == []


def test_a_push_that_breaks_shows_no_version_and_goes_on(store, url, memory, monkeypatch):
    pipe = type(memory).pipe_file
    for broken_at in range(1, 6):
        target = f"{url}{broken_at}"
        left = [broken_at]

        def breaking(self, path, value, _left=left, **options):
            _left[0] -= 1
            if _left[0] < 0:
                raise ConnectionResetError("broken")
            return pipe(self, path, value, **options)

        monkeypatch.setattr(type(memory), "pipe_file", breaking)
        with pytest.raises(ShippingError, match="connection broke off; no reader sees a half"):
            cache.push(store, target)
        with pytest.raises(StoreNotFoundError, match="there is no cache at"):
            cache.open_store(target)
        monkeypatch.setattr(type(memory), "pipe_file", pipe)
        assert cache.push(store, target).kept == broken_at
        assert cache.open_store(target).verify() == []


def test_push_without_make_current_leaves_the_far_current(store, url):
    first = store.current
    cache.push(store, url)
    second = store.publish(entries(2, scale=8))
    cache.push(store, url, make_current=False)
    far = cache.open_store(url)
    assert far.current == first
    assert far.load("causal/q4", second).version == second


def test_push_overwrites_no_other_zarr(store, url, memory):
    memory.pipe_file(
        url.removeprefix("memory:/") + "/zarr.json",
        b'{"attributes":{},"node_type":"group","zarr_format":3}',
    )
    with pytest.raises(FormatVersionError, match="this reader knows format 1"):
        cache.push(store, url)


def test_push_and_pull_take_folders(store, tmp_path):
    cache.push(store, str(tmp_path / "n.zarr"))
    cache.push(store, f"file://{tmp_path}/o.zarr")
    cache.pull(f"file://{tmp_path}/o.zarr", tmp_path / "p.zarr")
    for name in ("n", "o", "p"):
        assert files_of(cache.open_store(tmp_path / f"{name}.zarr")) == files_of(store)


def test_pull_takes_a_version_by_id_and_prefix(store, tmp_path, url):
    first = store.current
    cache.push(store, url)
    store.publish(entries(2, scale=8))
    cache.push(store, url)
    assert cache.pull(url, tmp_path / "n.zarr", first[:8]).version == first
    with pytest.raises(VersionNotFoundError, match="holds no version"):
        cache.pull(url, tmp_path / "n.zarr", "0" * 64)


def test_a_pull_that_breaks_shows_no_version_and_resumes(tmp_path, url, monkeypatch):
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", 24)
    store = published(tmp_path / "m.zarr", entries(6))
    cache.push(store, url)
    read = UrlSource.read
    fetched = []

    def breaking(source, key, limit):
        if "/c/" in key:
            if len(fetched) == 3:
                raise cache.errors.StoreReadError(key, ConnectionResetError("broken"))
            fetched.append(key)
        return read(source, key, limit)

    monkeypatch.setattr(UrlSource, "read", breaking)
    with pytest.raises(cache.errors.StoreReadError, match="broken"):
        cache.pull(url, tmp_path / "n.zarr")
    assert not (tmp_path / "n.zarr").exists()

    def counting(source, key, limit):
        fetched.extend([key] if "/c/" in key else [])
        return read(source, key, limit)

    monkeypatch.setattr(UrlSource, "read", counting)
    done = cache.pull(url, tmp_path / "n.zarr")
    assert done.kept == 3
    assert len(fetched) == len(set(fetched)) == 7
    assert files_of(cache.open_store(tmp_path / "n.zarr")) == files_of(store)
    assert not list(tmp_path.glob(".n.zarr.tmp-*"))


def test_a_torn_leftover_of_a_pull_is_fetched_again(tmp_path, url, monkeypatch):
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", 24)
    store = published(tmp_path / "m.zarr", entries(6))
    cache.push(store, url)
    left = tmp_path / f".n.zarr.tmp-pull-{store.current[:16]}" / store.current / "spans" / "c"
    left.mkdir(parents=True)
    whole = (tmp_path / "m.zarr" / store.current / "spans" / "c" / "0").read_bytes()
    (left / "0").write_bytes(whole)
    (left / "1").write_bytes(whole[:-1])
    (left / "2").symlink_to("/dev/zero")
    assert cache.pull(url, tmp_path / "n.zarr").kept == 1
    assert cache.open_store(tmp_path / "n.zarr").verify() == []
    assert files_of(cache.open_store(tmp_path / "n.zarr")) == files_of(store)


def test_wrong_bytes_that_pass_their_checksum_never_arrive(store, tmp_path, url, memory):
    other = published(tmp_path / "o.zarr", entries(3, scale=7))
    cache.push(store, url)
    swapped = files_of(other)[f"{other.current}/spans/c/0"]
    memory.pipe_file(url.removeprefix("memory:/") + f"/{store.current}/spans/c/0", swapped)
    with pytest.raises(DamagedEntryError, match="SHA-256 of its values"):
        cache.pull(url, tmp_path / "n.zarr")
    assert not (tmp_path / "n.zarr").exists()
    assert not list(tmp_path.glob(".n.zarr.tmp-*"))


def test_pull_onto_a_damaged_version_is_refused(store, tmp_path, url):
    cache.push(store, url)
    cache.pull(url, tmp_path / "n.zarr")
    (tmp_path / "n.zarr" / store.current / "spans" / "c" / "0").write_bytes(b"")
    with pytest.raises(DamagedEntryError, match="cut short"):
        cache.pull(url, tmp_path / "n.zarr")


def test_pull_into_a_full_disk_is_typed(store, tmp_path, url, monkeypatch):
    cache.push(store, url)
    monkeypatch.setattr(os, "fsync", refusing(errno.ENOSPC))
    with pytest.raises(StoreWriteError, match="No space left"):
        cache.pull(url, tmp_path / "n.zarr")
    assert list(tmp_path.glob("*n.zarr*")) == []


def test_a_store_that_cannot_list_says_so(store, url, memory, monkeypatch, tmp_path):
    cache.push(store, url)

    def forbidden(*_arguments, **_options):
        raise PermissionError("AccessDenied")

    monkeypatch.setattr(type(memory), "ls", forbidden)
    far = cache.open_store(url)
    with pytest.raises(NotListableError, match="cannot list its versions"):
        far.versions()
    with pytest.raises(NotListableError, match="full id of 64"):
        far.load("causal/q4", store.current[:8])
    assert far.load("causal/q4").version == store.current
    assert far.load("causal/q8", store.current).version == store.current
    assert far.verify() == []
    assert cache.pull(url, tmp_path / "n.zarr").version == store.current


def test_a_missing_package_names_its_pip_line(store):
    """In a process of its own, in which none of the packages can be imported."""
    code = """
        import sys
        for name in ("aiohttp", "gcsfs", "huggingface_hub", "paramiko", "s3fs"):
            sys.modules[name] = None
        import cache
        store = cache.open_store(sys.argv[1])
        for protocol in ("gs", "sftp", "s3", "https", "hf"):
            url = f"{protocol}://host/path/m.zarr"
            for use in (
                lambda: cache.open_store(url),
                lambda: cache.push(store, url),
                lambda: cache.pull(url, sys.argv[1]),
            ):
                try:
                    use()
                except cache.errors.BackendMissingError as error:
                    assert isinstance(error, ImportError)
                    assert error.pip_line in str(error)
                    print(error.protocol, error.pip_line)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), store.location],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    lines = [
        "gs pip install gcsfs",
        "sftp pip install paramiko",
        "s3 pip install s3fs",
        "https pip install aiohttp requests",
        "hf pip install huggingface_hub",
    ]
    assert done.stdout.splitlines() == [line for line in lines for _ in range(3)], done.stderr


def test_an_unknown_protocol_is_refused():
    with pytest.raises(ShippingError, match="cannot open gopher://x"):
        cache.open_store("gopher://x/m.zarr")
