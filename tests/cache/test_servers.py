"""What the error of a library says of a server: by its class, its status, or its text."""

import pytest

from cache.errors import StoreReadError

FILE = "s3://bucket/m.zarr/zarr.json"
LOGIN = "check the address, and whether it asks for a log-in"
GOES_ON = "run it again; `pull` and `push` go on where they were"
MAY = (
    "check that the log-in, token or signature that it was asked with may do that and has not run "
    "out (what is missing looks so too where listing is not allowed)"
)
CREDENTIALS = "check the user, the password or key, and the credentials in the environment"
PORT = "see that the server is up, and check the host and port in the address"

CLASSES = [
    ("gaierror", "its host is not known", "check the host's name in the address"),
    ("ClientConnectorDNSError", "its host is not known", "check the host's name in the address"),
    ("NameResolutionError", "its host is not known", "check the host's name in the address"),
    *(
        (
            name,
            "no connection that can be trusted",
            "check the server's certificate, and http against https in the address",
        )
        for name in ("SSLError", "CertificateError")
    ),
    ("WebPage", "what came is a page for people, not a file of a cache", LOGIN),
    ("TooManyRedirects", "its redirects lead nowhere", LOGIN),
    ("NonHttpUrlClientError", "its redirects lead nowhere", LOGIN),
    ("ContentEncodingError", "what it sends is not packed as it says", "see to the server"),
    *(
        (name, "the connection broke off", GOES_ON)
        for name in (
            "ClientPayloadError",
            "ServerDisconnectedError",
            "ConnectionClosedError",
            "IncompleteRead",
            "ConnectionResetError",
            "BrokenPipeError",
            "EOFError",
        )
    ),
    *(
        (name, "what answers there is no sound web server", "check the address and its port")
        for name in ("BadHttpMessage", "InvalidURL")
    ),
    *(
        (name, "no log-in that it takes", CREDENTIALS)
        for name in ("AuthenticationException", "NoCredentialsError", "PartialCredentialsError")
    ),
    ("SSHException", "no SSH server answers there", "check the host and port in the address"),
    *(
        (
            name,
            "no answer for 30 s",
            "see that the server is up and can be reached from here, then run it again",
        )
        for name in ("Timeout", "TimeoutError")
    ),
    *(
        (name, "no connection", PORT)
        for name in (
            "ConnectionRefusedError",
            "ClientConnectorError",
            "EndpointConnectionError",
            "NoValidConnectionsError",
        )
    ),
]


def told(error):
    """What is said of an error, without the file's name before it."""
    message = str(StoreReadError(FILE, error))
    assert message.startswith(f"cannot read {FILE}: ")
    return message.removeprefix(f"cannot read {FILE}: ")


def named(name, base=Exception, text="some text"):
    """An error of a class of that name, as another library's."""
    return type(name, (base,), {})(text)


@pytest.mark.parametrize(("name", "what", "helps"), CLASSES)
def test_a_class_of_errors_is_known_by_its_name(name, what, helps):
    assert told(named(name)) == f"{what}; {helps}"
    # Also one that is derived from it, is the cause of another, or was met before it.
    derived = type("Derived", (type(named(name)),), {})("some text")
    assert told(derived) == f"{what}; {helps}"
    for link in ("__cause__", "__context__"):
        outer = RuntimeError("outer")
        setattr(outer, link, named(name))
        assert told(outer) == f"{what}; {helps}"
        outermost = RuntimeError("outermost")
        outermost.__cause__ = outer
        assert told(outermost) == f"{what}; {helps}"


def test_the_narrower_class_goes_first():
    """A log-in that is refused is an SSHException too, a reset one a broken connection."""
    ssh = type("SSHException", (Exception,), {})
    assert told(named("AuthenticationException", ssh)).startswith("no log-in that it takes; ")
    refused = type("ClientConnectorError", (OSError,), {})
    assert told(named("ClientConnectorDNSError", refused)).startswith("its host is not known; ")


def test_a_circle_of_causes_ends():
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one
    assert told(one) == "one; check the address, and whether the server is up"


class Response:
    def __init__(self, status_code):
        self.status_code = status_code


def with_status(status, way):
    """An error that carries a status as aiohttp, requests or botocore have it."""
    error = RuntimeError("some text")
    if way == "aiohttp":
        error.status = status
    elif way == "requests":
        error.response = Response(status)
    else:
        error.response = {"ResponseMetadata": {"HTTPStatusCode": status}}
    return error


@pytest.mark.parametrize("way", ["aiohttp", "requests", "botocore"])
@pytest.mark.parametrize(
    ("status", "what", "helps"),
    [
        (300, "it does not serve that", "check the address"),
        (400, "it does not serve that", "check the address"),
        (401, "it asks for a log-in", "check the user, password or token"),
        (403, "it refuses that", MAY),
        (404, "it does not serve that", "check the address"),
        (407, "the proxy asks for a log-in", "check the proxy's user and password"),
        (429, "it is asked too often", "wait a while, then run it again"),
        (499, "it does not serve that", "check the address"),
        (500, "it fails", "run it again later"),
        (503, "it fails", "run it again later"),
    ],
)
def test_a_status_is_known_however_it_is_carried(way, status, what, helps):
    assert told(with_status(status, way)) == f"{what} (HTTP {status}); {helps}"
    outer = RuntimeError("outer")
    outer.__cause__ = with_status(status, way)
    assert told(outer) == f"{what} (HTTP {status}); {helps}"


@pytest.mark.parametrize("way", ["aiohttp", "requests", "botocore"])
@pytest.mark.parametrize("status", [None, 200, 299, "403"])
def test_what_is_no_refusing_status_says_what_the_library_says(way, status):
    error = with_status(status, way)
    assert told(error) == "some text; check the address, and whether the server is up"


def test_an_answer_without_a_status_is_taken_as_it_is():
    error = RuntimeError("some text")
    error.response = {}
    assert told(error) == "some text; check the address, and whether the server is up"


def test_what_else_is_refused_or_fails_keeps_its_text():
    assert told(PermissionError("no  \n entry")) == f"it refuses that (no entry); {MAY}"
    assert told(ValueError()) == "ValueError; check the address, and whether the server is up"
    assert told(PermissionError()) == f"it refuses that (PermissionError); {MAY}"
    # A status says more.
    refused = PermissionError("no entry")
    refused.status = 401
    assert told(refused).startswith("it asks for a log-in (HTTP 401); ")
