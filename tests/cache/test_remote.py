"""push and pull against real servers on loopback: http.server and an S3 API (moto)."""

import functools
import http.server
import threading
from pathlib import Path

import boto3
import fsspec
import pytest
from moto.server import ThreadedMotoServer

import cache
from cache.causes import SILENCE_S
from cache.errors import (
    DamagedEntryError,
    NotListableError,
    ShippingError,
    StoreNotFoundError,
    StoreReadError,
)
from cache.remote import url_source
from tests.cache.samples import entries, files_of, published, truth_of


@pytest.mark.parametrize(
    ("own", "passed"),
    [
        ({}, {"timeout": SILENCE_S, "channel_timeout": SILENCE_S}),
        ({"timeout": 3}, {"channel_timeout": SILENCE_S}),
        ({"timeout": 3, "channel_timeout": 4, "port": 5}, {}),
    ],
)
def test_the_users_own_settings_of_a_server_go_first(monkeypatch, own, passed):
    """fsspec adds those itself, unless it is given others."""
    seen = []

    def opened(url, **options):
        seen.append((url, options))
        return fsspec.filesystem("memory"), "place"

    monkeypatch.setattr(fsspec.core, "url_to_fs", opened)
    monkeypatch.setitem(fsspec.config.conf, "sftp", own)
    url_source("sftp://host/m.zarr")
    url_source("s3://bucket/m.zarr")
    assert seen == [("sftp://host/m.zarr", passed), ("s3://bucket/m.zarr", {})]


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, notes what is asked for, and breaks when it is told to."""

    asked: list
    break_after: int | None = None

    def do_GET(self):
        self.server.asked.append(self.path)
        self.server.headers.append(dict(self.headers))
        if self.server.break_after is not None and len(self.server.asked) > self.server.break_after:
            self.close_connection = True
            return
        super().do_GET()

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def web(tmp_path):
    """A web server over ``tmp_path / "www"``."""
    folder = tmp_path / "www"
    folder.mkdir()
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
    )
    server.asked, server.headers, server.break_after = [], [], None
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    server.folder = folder
    server.url = f"http://127.0.0.1:{server.server_address[1]}/m.zarr"
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_http_serves_a_folder_in_place(web):
    store = published(web.folder / "m.zarr")
    first = store.current
    store.publish(entries(2, scale=9))
    far = cache.open_store(web.url)
    assert far.current == store.current
    assert far.load("causal/q4").sha256 == store.load("causal/q4").sha256
    assert far.load("causal/q12", first).sha256 == store.load("causal/q12", first).sha256
    assert far.verify() == []
    with pytest.raises(NotListableError, match="cannot list its versions"):
        far.versions()


def test_http_pulls_the_same_files(web, tmp_path):
    store = published(web.folder / "m.zarr")
    got = cache.pull(web.url, tmp_path / "n.zarr")
    assert got.version == store.current
    assert files_of(cache.open_store(tmp_path / "n.zarr")) == files_of(store)
    web.asked.clear()
    assert cache.pull(web.url, tmp_path / "n.zarr").copied == 0
    assert not [path for path in web.asked if "/c/" in path]


def test_http_resumes_after_a_broken_transfer(web, tmp_path, monkeypatch):
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", 24)
    store = published(web.folder / "m.zarr", entries(6))
    web.break_after = 5
    with pytest.raises(StoreReadError, match=f"cannot read {web.url}"):
        cache.pull(web.url, tmp_path / "n.zarr")
    assert not (tmp_path / "n.zarr").exists()
    web.break_after = None
    served = {path for path in web.asked[:5] if "/c/" in path}
    web.asked.clear()
    assert cache.pull(web.url, tmp_path / "n.zarr").kept == len(served) > 0
    assert not served & set(web.asked)
    assert files_of(cache.open_store(tmp_path / "n.zarr")) == files_of(store)


def test_http_that_sends_too_much_or_wrong_bytes_is_refused(web, tmp_path):
    store = published(web.folder / "m.zarr")
    chunk = Path(store.location, store.current, "spans", "c", "0")
    whole = chunk.read_bytes()
    for data, message in (
        (whole + bytes(10**6), "longer than it can be"),
        (whole[:-1], "CRC-32C"),
        (b"", "cut short"),
    ):
        chunk.write_bytes(data)
        with pytest.raises(DamagedEntryError, match=message):
            cache.pull(web.url, tmp_path / "n.zarr")
    chunk.unlink()
    with pytest.raises(DamagedEntryError, match="the file is missing"):
        cache.pull(web.url, tmp_path / "n.zarr")
    assert not (tmp_path / "n.zarr").exists()


def test_http_without_a_cache_or_a_server_is_typed(web, tmp_path):
    with pytest.raises(StoreNotFoundError, match="there is no cache at http"):
        cache.open_store(web.url)
    with pytest.raises(StoreReadError, match=r"cannot read http://127\.0\.0\.1:9/m\.zarr"):
        cache.open_store("http://127.0.0.1:9/m.zarr")


def test_http_reads_a_file_up_to_its_limit(web):
    """Whatever length was announced: what comes is counted, in parts of a MiB."""
    (web.folder / "m.zarr").mkdir()
    source = url_source(web.url)
    for size in (0, 1, 1000, (1 << 20) + 1, 3 << 20):
        data = bytes(range(256)) * (size // 256) + bytes(size % 256)
        (web.folder / "m.zarr" / "file").write_bytes(data)
        assert source.read("file", size) == data
        assert source.read("file", size + 1) == data
        if size:
            with pytest.raises(DamagedEntryError) as caught:
                source.read("file", size - 1)
            assert caught.value.file == f"{web.url}/file"
            assert caught.value.expected == f"at most {size - 1} bytes"
    assert source.read("absent", 9) is None
    # A folder is answered by a page of links.
    with pytest.raises(StoreReadError, match="a page for people"):
        source.read("", 1 << 20)


def test_http_takes_the_users_own_settings(web, monkeypatch):
    published(web.folder / "m.zarr")
    monkeypatch.setitem(fsspec.config.conf, "http", {"headers": {"X-Own": "mine"}})
    assert cache.open_store(web.url).verify() == []
    assert len(web.headers) > 4
    assert {headers.get("X-Own") for headers in web.headers} == {"mine"}


def test_http_is_not_pushed_to(web, tmp_path):
    store = published(tmp_path / "m.zarr")
    with pytest.raises(
        ShippingError, match=r"cannot write http.*: a web server takes no files; `push`"
    ):
        cache.push(store, web.url)
    # Refused before anything is asked of it.
    assert web.asked == []


@pytest.fixture(scope="module")
def s3_endpoint():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_endpoint, monkeypatch, request):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    name = request.node.name.replace("_", "-")[:60]
    client = boto3.client("s3")
    client.create_bucket(Bucket=name)
    yield client, name
    client.close()


def test_s3_round_trip(bucket, tmp_path):
    client, name = bucket
    url = f"s3://{name}/caches/m.zarr"
    store = published(tmp_path / "m.zarr")
    first = store.current
    assert cache.push(store, url).copied == 6
    assert cache.push(store, url).copied == 0
    store.publish(entries(2, scale=9))
    assert cache.push(store, url).copied == 6
    far = cache.open_store(url)
    assert {line.id for line in far.versions()} == {first, store.current}
    assert truth_of(far) == truth_of(store)
    assert far.verify() == []
    cache.pull(url, tmp_path / "n.zarr", first[:8])
    cache.pull(url, tmp_path / "n.zarr")
    assert files_of(cache.open_store(tmp_path / "n.zarr")) == files_of(store)
    keys = {item["Key"] for item in client.list_objects_v2(Bucket=name)["Contents"]}
    assert keys == {f"caches/m.zarr/{key}" for key in files_of(store)}


def test_s3_damage_is_refused_and_repaired_by_a_push(bucket, tmp_path):
    client, name = bucket
    url = f"s3://{name}/m.zarr"
    store = published(tmp_path / "m.zarr")
    cache.push(store, url)
    key = f"m.zarr/{store.current}/tables/c/0"
    client.put_object(Bucket=name, Key=key, Body=b"damaged")
    with pytest.raises(DamagedEntryError, match="tables/c/0"):
        cache.pull(url, tmp_path / "n.zarr")
    (finding, *_) = cache.open_store(url).verify()
    assert finding.file == f"{url}/{store.current}/tables/c/0"
    client.delete_object(Bucket=name, Key=key)
    with pytest.raises(DamagedEntryError, match="the file is missing"):
        cache.pull(url, tmp_path / "n.zarr")
    assert cache.push(store, url).copied == 1
    assert cache.pull(url, tmp_path / "n.zarr").version == store.current


def test_s3_without_the_bucket_is_typed(bucket, tmp_path):
    store = published(tmp_path / "m.zarr")
    with pytest.raises(StoreNotFoundError, match="there is no cache at s3://absent-bucket"):
        cache.open_store("s3://absent-bucket/m.zarr")
    with pytest.raises(ShippingError, match="cannot write s3://absent-bucket"):
        cache.push(store, "s3://absent-bucket/m.zarr")
    names = [item["Name"] for item in bucket[0].list_buckets()["Buckets"]]
    assert "absent-bucket" not in names


def test_a_listing_that_a_file_system_keeps_is_asked_for_anew(tmp_path, monkeypatch):
    """fsspec keeps listings, of buckets among others; another process may have published."""
    kind, url = type(fsspec.filesystem("memory")), "memory://listing/m.zarr"
    kept, listed, invalidate = {}, kind.ls, kind.invalidate_cache

    def ls(self, path, detail=True, **options):
        if path not in kept:
            kept[path] = listed(self, path, detail=detail, **options)
        return kept[path]

    def push_elsewhere():
        with monkeypatch.context() as patch:
            patch.setattr(kind, "ls", listed)
            patch.setattr(kind, "invalidate_cache", invalidate)
            cache.push(store, url)

    monkeypatch.setattr(kind, "ls", ls)
    monkeypatch.setattr(kind, "invalidate_cache", lambda self, path=None: kept.clear())
    store = published(tmp_path / "m.zarr")
    push_elsewhere()
    far = cache.open_store(url)
    assert len(far.versions()) == 1
    store.publish(entries(2, scale=9))
    push_elsewhere()
    assert len(far.versions()) == 2
    chunk = f"/listing/m.zarr/{store.current}/spans/c/0"
    fsspec.filesystem("memory").rm(chunk)
    kept.clear()
    assert len(far.source.file_sizes(store.current)) == 4
    push_elsewhere()
    assert len(far.source.file_sizes(store.current)) == 4
    assert len(cache.open_store(url).source.file_sizes(store.current)) == 5
