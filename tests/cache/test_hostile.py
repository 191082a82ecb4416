"""Servers that refuse, break off, lie or say nothing: what is told, and what is not shown."""

import http.server
import re
import socket
import subprocess
import sys
import threading
import traceback

import pytest
import s3fs
from click.testing import CliRunner

import cache
from cache.errors import DamagedEntryError, ShippingError, StoreNotFoundError, StoreReadError
from maskgen.cli import main
from tests.cache.samples import files_of, published

PAGE = b"<!DOCTYPE html>\n<html><body>Please log in</body></html>"
SECRETS = "?token=hidden1&X-Amz-Signature=hidden2#hidden3"
QUIET_S = 0.3
"""How long a test waits for a server that says nothing."""


class Hostile(http.server.BaseHTTPRequestHandler):
    """Answers every request in the way that its server is told."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        behave = self.server.behave
        if isinstance(behave, int):
            self._send(behave, PAGE)
        else:
            behave(self)

    do_HEAD = do_PUT = do_GET

    def _send(self, status, body, length=None, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def circle(self):
        self._send(302, b"", Location=self.path)

    def away(self):
        self._send(302, b"", Location="ftp://127.0.0.1/m.zarr")

    def half(self):
        self._send(200, b'{"attributes"', length=1000)
        self.close_connection = True

    def longer(self):
        self._send(200, b'{"a":1}{"b":2}', length=7)
        self.close_connection = True

    def badly_packed(self):
        self._send(200, b"no gzip", Content_Encoding="gzip")

    def no_http(self):
        self.wfile.write(b"SSH-2.0-server\r\n")
        self.close_connection = True

    def hang_up(self):
        self.close_connection = True

    def silent(self):
        self.server.told.wait(10)

    def silent_after_a_bit(self):
        self._send(200, b'{"attributes"', length=1000)
        self.server.told.wait(10)

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("cache.remote.SILENCE_S", QUIET_S)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    server.handle_error = lambda *_arguments: None
    server.told = threading.Event()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    server.place = f"127.0.0.1:{server.server_address[1]}"
    server.url = f"http://user:hidden0@{server.place}/m.zarr{SECRETS}"
    yield server
    server.told.set()
    server.shutdown()
    thread.join()
    server.server_close()


def refusal(url, kind=StoreReadError):
    """What opening a cache says; neither it nor a traceback may show a secret."""
    with pytest.raises(kind) as caught:
        cache.open_store(url)
    assert "hidden" not in "".join(traceback.format_exception(caught.value))
    return str(caught.value)


@pytest.mark.parametrize(
    ("behave", "what", "helps"),
    [
        (200, "a page for people", "check the address, and whether it asks for a log-in"),
        (400, r"does not serve that \(HTTP 400\)", "check the address"),
        (401, r"asks for a log-in \(HTTP 401\)", "check the user, password or token"),
        (403, r"refuses that \(HTTP 403\)", "check that the log-in, token or signature"),
        (429, r"asked too often \(HTTP 429\)", "wait a while"),
        (500, r"it fails \(HTTP 500\)", "run it again later"),
        (502, r"it fails \(HTTP 502\)", "run it again later"),
        (Hostile.circle, "redirects lead nowhere", "check the address"),
        (Hostile.away, "redirects lead nowhere", "check the address"),
        (Hostile.half, "the connection broke off", "run it again"),
        (Hostile.hang_up, "the connection broke off", "run it again"),
        (Hostile.badly_packed, "not packed as it says", "see to the server"),
        (Hostile.no_http, "no sound web server", "check the address and its port"),
        (Hostile.silent, "no answer for 30 s", "see that the server is up"),
        (Hostile.silent_after_a_bit, "no answer for 30 s", "see that the server is up"),
    ],
)
def test_what_happened_and_what_helps_is_said(server, behave, what, helps):
    server.behave = behave
    message = refusal(server.url)
    shown = f"http://***@{server.place}/m.zarr/zarr.json?token=***&X-Amz-Signature=***#***"
    assert re.match(f"cannot read {re.escape(shown)}: .*{what}.*; {helps}", message), message
    assert "Delete" not in message


@pytest.mark.parametrize("status", [404, 410])
def test_what_is_not_there_is_no_cache(server, status):
    server.behave = status
    message = refusal(server.url, StoreNotFoundError)
    assert "check the address; `push` puts one there" in message
    assert "download it" in refusal(f"http://{server.place}/m.zip?x=hidden", StoreNotFoundError)


def test_more_than_was_announced_is_no_cache(server):
    server.behave = Hostile.longer
    assert "check the address" in refusal(server.url, (DamagedEntryError, StoreReadError))


@pytest.fixture
def mute():
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        yield mute.getsockname()[1]


def test_servers_that_cannot_be_reached(server, mute):
    for url, message in (
        ("http://127.0.0.1:9/m.zarr?token=hidden", "no connection; see that the server is up"),
        ("http://host.invalid/m.zarr?token=hidden", "its host is not known; check the host"),
        (f"https://hidden@{server.place}/m.zarr", "no connection that can be trusted; check the"),
        (f"http://127.0.0.1:{mute}/m.zarr?hidden", "no answer for 30 s; see that the server"),
    ):
        told = refusal(url)
        assert re.search(r"/m\.zarr/zarr\.json(\?[a-z=]*\*\*\*)?: " + message, told), told
    for url, message in (
        ("sftp://user:hidden@127.0.0.1:9/m.zarr", "no connection; see that the server is up"),
        ("sftp://user:hidden@host.invalid/m.zarr", "its host is not known; check the host"),
        (f"sftp://user:hidden@127.0.0.1:{mute}/m.zarr", "no SSH server answers there; check"),
        ("gopher://user:hidden@127.0.0.1/m.zarr", "Protocol not known: gopher; check the"),
    ):
        assert f"/m.zarr: {message}" in refusal(url, ShippingError)


@pytest.mark.parametrize(
    ("behave", "limit_s", "message"),
    [
        (403, 30, "it refuses that (HTTP 403); check that the log-in, token or signature"),
        (Hostile.silent, QUIET_S, "no answer for 30 s; see that the server is up"),
    ],
)
def test_a_bucket_that_refuses_or_is_silent(server, monkeypatch, behave, limit_s, message):
    server.behave = behave
    monkeypatch.setattr("cache.remote.SILENCE_S", limit_s)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server.place}")
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        assert f"cannot read s3://bucket/m.zarr/zarr.json: {message}" in refusal(
            "s3://bucket/m.zarr"
        )
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


def test_a_token_reaches_the_server_and_no_eye(server, tmp_path):
    store = published(tmp_path / "www" / "m.zarr")

    def serve(handler):
        path, _, query = handler.path.partition("?")
        file = tmp_path / "www" / path.lstrip("/")
        if query != "token=hidden1&X-Amz-Signature=hidden2":
            handler._send(403, PAGE)
        elif file.is_file():
            handler._send(200, file.read_bytes())
        else:
            handler._send(404, PAGE)

    server.behave = serve
    url = f"http://{server.place}/m.zarr{SECRETS}"
    assert cache.open_store(url).verify() == []
    run = CliRunner()
    pulled = run.invoke(main, ["pull", url, "--cache", str(tmp_path / "n.zarr")])
    assert pulled.exit_code == 0
    assert files_of(cache.open_store(tmp_path / "n.zarr")) == files_of(store)
    chunk = tmp_path / "www" / "m.zarr" / store.current / "spans" / "c" / "0"
    chunk.write_bytes(PAGE)
    for arguments in (
        ["list", "--cache", url],
        ["list", "--cache", url.replace("hidden1", "hidden4")],
        ["versions", "--cache", url],
        ["verify", "--cache", url, "--json"],
        ["use", "0" * 64, "--cache", url],
        ["push", url, "--cache", str(tmp_path / "n.zarr")],
        ["pack", str(tmp_path / "x.zip"), "--cache", url],
        ["pull", url, "--cache", str(tmp_path / "o.zarr")],
        ["unpack", url, "--cache", str(tmp_path / "o.zarr")],
        ["gc", "--cache", url],
    ):
        done = run.invoke(main, arguments)
        assert "hidden" not in done.output, arguments
        assert done.exception is None or isinstance(done.exception, SystemExit), arguments


def test_nothing_is_left_open_or_printed_by_the_libraries(server):
    # Long, so that it is not yet read when its status is known.
    server.behave = lambda handler: handler._send(404, PAGE * 100_000)
    program = (
        "import gc, sys, cache\n"
        "for url in sys.argv[1:]:\n"
        "    try: cache.open_store(url)\n"
        "    except cache.errors.CacheError as error: print(type(error).__name__)\n"
        "    gc.collect()\n"
    )
    urls = [server.url, f"sftp://user:pass@{server.place}/m.zarr"]
    command = [sys.executable, "-c", program, *urls]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["StoreNotFoundError", "ShippingError"]
    assert done.stderr == ""
