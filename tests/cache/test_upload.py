"""What is written behind a URL, how, and what counts as being there already."""

import itertools
import traceback

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import cache
from cache.errors import DamagedEntryError, FormatVersionError, ShippingError
from cache.format import root_document
from cache.remote import UrlSource
from cache.upload import RemoteWriter
from tests.cache.samples import files_of, published

_NAMES = itertools.count()
ID = "ab" * 32


class Noting(MemoryFileSystem):
    """Files in memory under any protocol; notes what is done, in order."""

    cachable = False

    def __init__(self, protocol):
        super().__init__()
        self.protocol, self.done = protocol, []

    def makedirs(self, path, exist_ok=False):
        assert exist_ok
        self.done.append(("makedirs", path))

    def pipe_file(self, path, value, **options):
        self.done.append(("pipe_file", path))
        return super().pipe_file(path, value, **options)

    def mv(self, source, target, **options):
        self.done.append(("mv", source, target))
        return super().mv(source, target, **options)


def writing(protocol):
    """A writer to an empty place behind a protocol or several, and that place."""
    name = f"/upload{next(_NAMES)}/m.zarr"
    first = protocol if isinstance(protocol, str) else protocol[0]
    return RemoteWriter(UrlSource(f"{first}:/{name}", Noting(protocol), name)), name


@pytest.mark.parametrize(
    "protocol",
    ["s3", "s3a", "gs", "gcs", "hf", "abfs", "az", "adl", "oci", "oss", ("s3", "s3a"), ("x", "gs")],
)
def test_an_object_store_takes_a_file_under_its_own_name(protocol):
    far, place = writing(protocol)
    for key in ("zarr.json", f"{ID}/spans/c/0"):
        far.write(key, b"data")
        assert far.source.filesystem.done == [("pipe_file", f"{place}/{key}")]
        assert far.source.read(key, 9) == b"data"
        far.source.filesystem.done.clear()


@pytest.mark.parametrize("protocol", ["sftp", "memory", "ftp", "smb", ("ssh", "sftp")])
def test_elsewhere_a_file_is_written_beside_the_versions_and_renamed(protocol):
    far, place = writing(protocol)
    parts = set()
    for key, folder in (("zarr.json", place), (f"{ID}/spans/c/0", f"{place}/{ID}/spans/c")):
        far.write(key, b"data")
        made, (piped, part), moved = far.source.filesystem.done
        assert made == ("makedirs", folder)
        assert piped == "pipe_file"
        assert part.startswith(f"{place}/.tmp-")
        assert "/" not in part.removeprefix(f"{place}/")
        assert moved == ("mv", part, f"{place}/{key}")
        assert far.source.read(key, 9) == b"data"
        parts.add(part)
        far.source.filesystem.done.clear()
    assert len(parts) == 2
    assert not any(".tmp-" in path for path in far.source.filesystem.find(place))


@pytest.mark.parametrize("protocol", ["http", ("http", "https"), ("https", "http")])
def test_a_web_server_takes_no_files(protocol):
    with pytest.raises(ShippingError) as caught:
        writing(protocol)
    location = caught.value.location
    assert location.startswith(protocol if isinstance(protocol, str) else protocol[0])
    assert str(caught.value) == (
        f"cannot write {location}: a web server takes no files; `push` to where it serves them "
        "from, such as a folder or a bucket"
    )


CHUNK, DOCUMENT = f"{ID}/spans/c/0", f"{ID}/spans/zarr.json"


@pytest.mark.parametrize(
    ("key", "there", "wanted", "holds"),
    [
        (CHUNK, None, b"12345678", False),
        (CHUNK, b"12345678", b"12345678", True),
        # Its last four bytes are the checksum of the rest.
        (CHUNK, b"xx345678", b"12345678", True),
        (CHUNK, b"1234x678", b"12345678", False),
        (CHUNK, b"1234567x", b"12345678", False),
        (CHUNK, b"2345678", b"12345678", False),
        (CHUNK, b"012345678", b"12345678", False),
        (CHUNK, b"", b"12345678", False),
        (DOCUMENT, None, b"12345678", False),
        (DOCUMENT, b"12345678", b"12345678", True),
        (DOCUMENT, b"x2345678", b"12345678", False),
        (DOCUMENT, b"1234567x", b"12345678", False),
        (DOCUMENT, b"1234567", b"12345678", False),
        (DOCUMENT, b"123456789", b"12345678", False),
        ("zarr.json", b"x2345678", b"12345678", False),
        (f"{ID}/zarr.json", b"x2345678", b"12345678", False),
    ],
)
def test_a_file_is_there_by_its_length_and_what_it_holds(key, there, wanted, holds):
    far, place = writing("memory")
    if there is not None:
        far.source.filesystem.pipe_file(f"{place}/{key}", there)
    assert far.holds(key, wanted) is holds


def test_of_a_chunk_that_is_there_four_bytes_are_read(monkeypatch):
    far, place = writing("memory")
    far.source.filesystem.pipe_file(f"{place}/{CHUNK}", b"x" * 1000)
    asked, cat = [], MemoryFileSystem.cat_file

    def noting(self, path, start=None, end=None, **options):
        asked.append((path, start, end))
        return cat(self, path, start=start, end=end, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", noting)
    assert far.holds(CHUNK, b"x" * 1000)
    assert asked == [(f"{place}/{CHUNK}", 996, None)]
    # One of another length is not read at all.
    assert not far.holds(CHUNK, b"x" * 999)
    assert len(asked) == 1


def test_what_is_current_there_is_returned():
    far, place = writing("memory")
    assert far.root() is None
    for current in (None, ID):
        far.write("zarr.json", root_document(current))
        assert far.root() == current
    for data, kind in ((b"{", DamagedEntryError), (b'{"attributes":{}}', FormatVersionError)):
        far.source.filesystem.pipe_file(f"{place}/zarr.json", data)
        with pytest.raises(kind) as caught:
            far.root()
        assert caught.value.file == far.source.name("zarr.json")


@pytest.mark.parametrize("act", ["info", "cat_file", "pipe_file", "makedirs", "mv"])
def test_what_a_far_end_refuses_is_told_without_its_cause(monkeypatch, act):
    far, place = writing("memory")
    far.source.filesystem.pipe_file(f"{place}/{CHUNK}", b"12345678")

    def refuse(*_arguments, **_options):
        raise ConnectionResetError("https://user:hidden@host")

    monkeypatch.setattr(Noting, act, refuse)
    call = far.holds if act in ("info", "cat_file") else far.write
    with pytest.raises(ShippingError) as caught:
        call(CHUNK, b"12345678")
    assert str(caught.value) == (
        f"cannot write memory:/{place}/{CHUNK}: the connection broke off; no reader sees a half "
        "version, and a second push sends what is missing; run it again; `pull` and `push` go on "
        "where they were"
    )
    assert caught.value.location == f"memory:/{place}"
    assert "hidden" not in "".join(traceback.format_exception(caught.value))


def test_an_error_of_the_cache_stays_what_it_is(monkeypatch):
    far, _ = writing("memory")

    def refuse(*_arguments, **_options):
        raise DamagedEntryError("f", "r")

    monkeypatch.setattr(Noting, "info", refuse)
    with pytest.raises(DamagedEntryError):
        far.holds(CHUNK, b"")


@pytest.mark.parametrize("make_current", [True, False])
def test_a_push_counts_what_it_sent_and_what_was_there(tmp_path, make_current):
    store = published(tmp_path / "m.zarr")
    url = f"memory://upload{next(_NAMES)}/m.zarr"
    files = files_of(store)
    root = root_document(store.current if make_current else None)
    sizes = {key: len(data) for key, data in files.items()} | {"zarr.json": len(root)}
    done = cache.push(store, url, make_current=make_current)
    assert done == cache.Shipment(store.current, 6, 0, sum(sizes.values()))
    far = cache.open_store(url)
    assert far.current == (store.current if make_current else None)
    for key, size in sizes.items():
        far.source.filesystem.rm(far.source.path(key))
        again = cache.push(store, url, make_current=make_current)
        assert again == cache.Shipment(store.current, 1, 5, size)
        assert far.source.read(key, 10**6) == (root if key == "zarr.json" else files[key])
    none = cache.push(store, url, make_current=make_current)
    assert none == cache.Shipment(store.current, 0, 6, 0)
    # To make it current later writes the root alone.
    later = cache.push(store, url)
    kept = 6 if make_current else 5
    assert later == cache.Shipment(
        store.current, 6 - kept, kept, 0 if make_current else len(root_document(store.current))
    )
    assert cache.open_store(url).current == store.current
