"""A URL as a source of bytes: what is asked of a file system, and what its errors become."""

import itertools
import re
import threading
import traceback

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from cache.errors import (
    BackendMissingError,
    DamagedEntryError,
    NotListableError,
    ShippingError,
    StoreReadError,
)
from cache.remote import PIP_LINES, UrlSource, protocols, url_source

_NAMES = itertools.count()
ONE, TWO = "1" * 64, "2" * 64


class Files(MemoryFileSystem):
    """Files in memory under any protocol; notes what is asked for."""

    cachable = False

    def __init__(self, protocol="memory"):
        super().__init__()
        self.protocol, self.asked = protocol, []

    def info(self, path, **options):
        self.asked.append(("info", path))
        return super().info(path, **options)

    def cat_file(self, path, **options):
        self.asked.append(("cat_file", path))
        return super().cat_file(path, **options)

    def invalidate_cache(self, path=None):
        self.asked.append(("invalidate_cache", path))


@pytest.fixture
def place():
    return f"/url{next(_NAMES)}/m.zarr"


@pytest.fixture
def source(place):
    return UrlSource(f"memory:/{place}", Files(), place)


def put(source, **files):
    for key, data in files.items():
        source.filesystem.pipe_file(source.path(key.replace("__", "/")), data)
    source.filesystem.asked.clear()


def test_each_package_that_is_advised_is_the_one_that_fsspec_wants():
    assert set(PIP_LINES) == {
        *("http", "https", "s3", "s3a", "gs", "gcs", "hf", "sftp", "ssh", "abfs", "az")
    }
    for protocol, line in PIP_LINES.items():
        packages = line.removeprefix("pip install ").split()
        assert line == "pip install " + " ".join(packages)
        for package in packages:
            assert package in known_implementations[protocol]["err"], protocol


def test_a_package_that_is_missing_is_named_and_its_cause_stays(monkeypatch):
    cause = ImportError("no module")

    def refuse(*_arguments, **_options):
        raise cause

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    for protocol, line in (
        *PIP_LINES.items(),
        ("dropbox", "see fsspec's documentation of dropbox"),
    ):
        url = f"{protocol}://user:hidden@host/m.zarr"
        with pytest.raises(BackendMissingError) as caught:
            url_source(url)
        assert caught.value.pip_line == line
        assert caught.value.protocol == protocol
        assert "hidden" not in caught.value.location
        assert caught.value.__cause__ is cause


def test_what_cannot_be_opened_is_told_without_its_cause(monkeypatch):
    def refuse(*_arguments, **_options):
        raise ValueError("s3://user:hidden@bucket")

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    url = "s3://user:hidden@bucket/m.zarr"
    with pytest.raises(ShippingError) as caught:
        url_source(url)
    assert str(caught.value) == (
        "cannot open s3://user:***@bucket/m.zarr: s3://user:***@bucket; check the address, and "
        "whether the server is up"
    )
    assert caught.value.location == "s3://user:***@bucket/m.zarr"
    assert "hidden" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("protocol", ["sftp", "ssh", "ftp", "s3", "http", "memory"])
def test_the_silence_of_an_ssh_server_is_bounded(monkeypatch, place, protocol):
    seen = []

    def opened(url, **options):
        seen.append(options)
        return Files(), place

    monkeypatch.setattr(fsspec.core, "url_to_fs", opened)
    url_source(f"{protocol}:/{place}")
    bounded = {"timeout": 30, "channel_timeout": 30}
    assert seen == [bounded if protocol in ("sftp", "ssh") else {}]


def test_a_listing_from_before_is_dropped_when_a_url_is_opened(monkeypatch, place):
    files = Files()
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **options: (files, place))
    url_source(f"memory:/{place}")
    assert files.asked == [("invalidate_cache", None)]


@pytest.mark.parametrize("slashes", ["", "/", "//"])
def test_slashes_at_the_end_of_an_address_say_nothing(place, slashes):
    source = UrlSource(f"memory:/{place}{slashes}", Files(), f"{place}{slashes}")
    assert source.location == f"memory:/{place}"
    assert source.name("a/b") == f"memory:/{place}/a/b"
    assert source.path("a/b") == f"{place}/a/b"


def test_a_query_of_a_web_address_stays_behind_and_is_hidden(place):
    url = "http://h/m.zarr?token=hidden#x"
    source = UrlSource(url, Files(("http", "https")), url)
    assert not source.lists
    assert source.path("a/b") == "http://h/m.zarr/a/b?token=hidden#x"
    assert source.name("a/b") == "http://h/m.zarr/a/b?token=***#***"
    assert source.location == "http://h/m.zarr?token=***#***"
    # Elsewhere it is a part of the name.
    other = UrlSource("s3://b/m.zarr?x", Files("s3"), "b/m.zarr?x")
    assert other.lists
    assert other.path("a") == "b/m.zarr?x/a"


@pytest.mark.parametrize(
    ("protocol", "is_safe"),
    [
        ("memory", True),
        ("file", True),
        (("file", "local"), True),
        (("x", "local"), True),
        ("sftp", False),
        (("ssh", "sftp"), False),
        ("ftp", False),
    ],
)
def test_one_call_at_a_time_where_the_file_system_takes_no_more(place, protocol, is_safe):
    source = UrlSource(f"x:/{place}", Files(protocol), place)
    other = UrlSource(f"y:/{place}", Files(protocol), place)
    with source.guard:
        free = []

        def try_it():
            acquire = getattr(other.guard, "acquire", None)
            free.append(acquire is None or acquire(blocking=False))
            if acquire is not None and free[0]:
                other.guard.release()

        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join()
    assert free == [is_safe]
    files = Files(protocol)
    files.async_impl = True
    assert not hasattr(UrlSource(f"x:/{place}", files, place).guard, "acquire")


def test_the_channel_of_an_sftp_connection_is_not_waited_for_for_ever(place):
    class Channel:
        def settimeout(self, seconds):
            self.seconds = seconds

    channel = Channel()
    files = Files("sftp")
    files.ftp = type("Client", (), {"get_channel": lambda self: channel})()
    UrlSource(f"sftp:/{place}", files, place)
    assert channel.seconds == 30


def test_a_file_is_read_up_to_its_limit(source):
    put(source, a=b"12345")
    for limit in (5, 6):
        assert source.read("a", limit) == b"12345"
    source.filesystem.asked.clear()
    with pytest.raises(DamagedEntryError) as caught:
        source.read("a", 4)
    error = caught.value
    assert (error.file, error.expected, error.found) == (source.name("a"), "at most 4 bytes", 5)
    # Nothing of it was fetched.
    assert source.filesystem.asked == [("info", source.path("a"))]
    assert source.read("absent", 9) is None
    put(source, none=b"")
    assert source.read("none", 0) == b""


@pytest.mark.parametrize("kind", [FileNotFoundError, NotADirectoryError, IsADirectoryError])
@pytest.mark.parametrize("act", ["info", "cat_file"])
def test_what_is_not_there_is_none(source, monkeypatch, kind, act):
    put(source, a=b"12345")

    def refuse(*_arguments, **_options):
        raise kind("a")

    monkeypatch.setattr(Files, act, refuse)
    assert source.read("a", 9) is None


@pytest.mark.parametrize("act", ["info", "cat_file", "ls"])
def test_what_else_is_raised_is_typed_and_its_cause_not_shown(source, monkeypatch, act):
    put(source, a=b"12345")

    def refuse(*_arguments, **_options):
        raise ValueError("https://user:hidden@host")

    monkeypatch.setattr(Files, act, refuse)
    file = source.location if act == "ls" else source.name("a")
    ask = source.version_ids if act == "ls" else lambda: source.read("a", 9)
    with pytest.raises(StoreReadError) as caught:
        ask()
    assert caught.value.file == file
    assert str(caught.value) == (
        f"cannot read {file}: https://***@host; check the address, and whether the server is up"
    )
    assert "hidden" not in "".join(traceback.format_exception(caught.value))


def test_an_error_of_the_cache_stays_what_it_is(source, monkeypatch):
    error = DamagedEntryError("f", "r")

    def refuse(*_arguments, **_options):
        raise error

    monkeypatch.setattr(Files, "info", refuse)
    with pytest.raises(DamagedEntryError) as caught:
        source.read("a", 9)
    assert caught.value is error


@pytest.mark.parametrize(
    ("data", "is_page"),
    [
        (b"<!doctype html>", True),
        (b"<!DOCTYPE HTML PUBLIC", True),
        (b" \r\n\t<html>", True),
        (b"<HTML lang=en>", True),
        (b"<head>", True),
        (b"<body>", True),
        (b'<?xml version="1.0"?>', True),
        (b"<Error><Code>NoSuchKey", True),
        (b"<errors>", False),
        (b"<htmlx>", False),
        (b"<!doc>", False),
        (b"<p>", False),
        (b"html", False),
        (b'{"a":"<html>"}', False),
        (b"\2\1<html>", False),
    ],
)
def test_a_page_for_people_is_no_file(source, data, is_page):
    put(source, a=data)
    if not is_page:
        assert source.read("a", 99) == data
        return
    with pytest.raises(StoreReadError) as caught:
        source.read("a", 99)
    assert str(caught.value) == (
        f"cannot read {source.name('a')}: what came is a page for people, not a file of a cache; "
        "check the address, and whether it asks for a log-in"
    )


def test_versions_are_listed_sorted_and_anew_each_time(source):
    put(source, **{f"{TWO}__zarr.json": b"x", f"{ONE}__zarr.json": b"x"})
    put(
        source,
        **{f"{'3' * 64}__spans__c__0": b"x", f"{'4' * 63}__zarr.json": b"x", "zarr.json": b""},
    )
    assert source.version_ids() == [ONE, TWO]
    assert source.filesystem.asked[0] == ("invalidate_cache", None)
    assert source.strangers() == [source.name("3" * 64), source.name("4" * 63)]
    source.filesystem.rm(source.path(f"{ONE}/zarr.json"))
    assert source.version_ids() == [TWO]


def test_sizes_are_those_of_all_files_of_one_version(source):
    put(
        source,
        **{
            f"{ONE}__zarr.json": b"x" * 3,
            f"{ONE}__spans__c__0": b"x" * 5,
            f"{ONE}__notes__deep__a.txt": b"x" * 7,
            f"{TWO}__zarr.json": b"x" * 9,
        },
    )
    assert source.file_sizes(ONE) == {
        f"{ONE}/zarr.json": 3,
        f"{ONE}/spans/c/0": 5,
        f"{ONE}/notes/deep/a.txt": 7,
    }
    assert source.file_sizes(TWO) == {f"{TWO}/zarr.json": 9}
    assert source.file_sizes("3" * 64) == {}


@pytest.mark.parametrize("kind", [PermissionError, NotImplementedError])
def test_what_may_not_be_listed_says_so(source, monkeypatch, kind):
    put(source, **{f"{ONE}__zarr.json": b"x"})

    def refuse(*_arguments, **_options):
        raise kind("no listing")

    monkeypatch.setattr(Files, "ls", refuse)
    for ask in (source.version_ids, lambda: source.file_sizes(ONE)):
        with pytest.raises(NotListableError) as caught:
            ask()
        assert caught.value.location == source.location
        assert caught.value.__suppress_context__
    assert source.strangers() == []
    assert source.read(f"{ONE}/zarr.json", 9) == b"x"


def test_a_web_server_is_not_asked_for_a_listing(place):
    source = UrlSource(f"http:/{place}", Files(("http", "https")), place)
    for ask in (source.version_ids, lambda: source.file_sizes(ONE)):
        with pytest.raises(NotListableError):
            ask()
    assert source.strangers() == []
    assert not [call for call in source.filesystem.asked if call[0] != "invalidate_cache"]


def test_the_protocols_of_a_file_system_are_one_or_several():
    assert protocols(Files("s3")) == ("s3",)
    assert protocols(Files(("s3", "s3a"))) == ("s3", "s3a")
    assert protocols(Files(["file", "local"])) == ("file", "local")


def test_an_unknown_protocol_is_named():
    with pytest.raises(ShippingError, match=re.escape("cannot open gopher://h/m: Protocol not kn")):
        url_source("gopher://h/m")
