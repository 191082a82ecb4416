"""Why a read or a write failed, of what file, in plain words, and what helps.

Errors of other libraries are known by the names of their classes, so that none is imported here.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cache.address import is_url

SILENCE_S = 30.0
"""Seconds for which a server may send nothing before a transfer is given up."""

_ON_DISK = (
    ((errno.EACCES, errno.EPERM), "see that its permissions allow this user that"),
    ((errno.EROFS,), "choose a folder that may be written"),
    ((errno.ENOMEM,), "close other programs, or use a machine with more memory"),
    ((errno.ENOENT,), "see that it is there"),
    ((errno.ENOSPC, errno.EDQUOT), "make room or choose another folder"),
    ((errno.EFBIG,), "raise the limit (`ulimit -f`) or choose another file system"),
    (
        (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.ETIMEDOUT),
        "see that its disk or mount is sound",
    ),
    ((errno.EMFILE, errno.ENFILE), "close files or raise the limit (`ulimit -n`)"),
    ((errno.ENAMETOOLONG,), "choose a shorter path"),
    ((errno.ELOOP,), "mend the links on its path"),
    (
        (errno.EXDEV, errno.EBUSY),
        "choose a folder that is neither a mount point nor a link to another file system",
    ),
    (
        (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK),
        "its file system cannot do that: choose a folder on another one",
    ),
)
"""Error numbers, and what helps."""

_SERVERS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("gaierror", "ClientConnectorDNSError", "NameResolutionError"),
        "its host is not known",
        "check the host's name in the address",
    ),
    (
        ("SSLError", "CertificateError"),
        "no connection that can be trusted",
        "check the server's certificate, and http against https in the address",
    ),
    (
        ("WebPage",),
        "what came is a page for people, not a file of a cache",
        "check the address, and whether it asks for a log-in",
    ),
    (
        ("TooManyRedirects", "NonHttpUrlClientError"),
        "its redirects lead nowhere",
        "check the address, and whether it asks for a log-in",
    ),
    (
        ("ContentEncodingError",),
        "what it sends is not packed as it says",
        "see to the server",
    ),
    (
        (
            "ClientPayloadError",
            "ServerDisconnectedError",
            "ConnectionClosedError",
            "IncompleteRead",
            "ConnectionResetError",
            "BrokenPipeError",
            "EOFError",
        ),
        "the connection broke off",
        "run it again; `pull` and `push` go on where they were",
    ),
    (
        ("BadHttpMessage", "InvalidURL"),
        "what answers there is no sound web server",
        "check the address and its port",
    ),
    (
        ("AuthenticationException", "NoCredentialsError", "PartialCredentialsError"),
        "no log-in that it takes",
        "check the user, the password or key, and the credentials in the environment",
    ),
    (
        ("SSHException",),
        "no SSH server answers there",
        "check the host and port in the address",
    ),
    (
        ("Timeout", "TimeoutError"),
        f"no answer for {SILENCE_S:.0f} s",
        "see that the server is up and can be reached from here, then run it again",
    ),
    (
        (
            "ConnectionRefusedError",
            "ClientConnectorError",
            "EndpointConnectionError",
            "NoValidConnectionsError",
        ),
        "no connection",
        "see that the server is up, and check the host and port in the address",
    ),
)
"""Names of classes, what happened, and what helps; the first that fits is taken."""

_ALLOWED = (
    "check that the log-in, token or signature that it was asked with may do that and has not run "
    "out (what is missing looks so too where listing is not allowed)"
)
_STATUSES = {
    401: ("it asks for a log-in", "check the user, password or token"),
    403: ("it refuses that", _ALLOWED),
    407: ("the proxy asks for a log-in", "check the proxy's user and password"),
    429: ("it is asked too often", "wait a while, then run it again"),
}


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Let what the block raises name the file that it is about.

    The system names a file that it cannot open, and none that it cannot write on to. An ``OSError``
    gets the path where it has none, any other error a note. What the system said to a library in
    Rust, as safetensors and tokenizers are, becomes an ``OSError`` again.
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is not None:
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
        error.add_note(f"in {path}")
        raise


def why(cause: BaseException, file: str) -> tuple[str, str]:
    """Return what happened to ``file``, a path or an address, and what helps."""
    return _why_of_server(cause) if is_url(file) else _why_on_disk(cause)


def _why_on_disk(cause: BaseException) -> tuple[str, str]:
    number = getattr(cause, "errno", None)
    helps = (advice for numbers, advice in _ON_DISK if number in numbers)
    return getattr(cause, "strerror", None) or _message(cause), next(helps, "see what stands there")


def _why_of_server(cause: BaseException) -> tuple[str, str]:
    chain = list(_chain(cause))
    names = {kind.__name__ for error in chain for kind in type(error).__mro__}
    for kinds, what, helps in _SERVERS:
        if not names.isdisjoint(kinds):
            return what, helps
    for error in chain:
        status = _status(error)
        if status is not None:
            what, helps = _STATUSES.get(status, ("it fails", "run it again later"))
            if status not in _STATUSES and status < 500:
                what, helps = "it does not serve that", "check the address"
            return f"{what} (HTTP {status})", helps
    if "PermissionError" in names:
        return f"it refuses that ({_message(cause)})", _ALLOWED
    return _message(cause), "check the address, and whether the server is up"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error of aiohttp, requests, botocore or Azure, if any."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(error, "status", None) or getattr(response, "status_code", None)
    return found if isinstance(found, int) and found >= 300 else None


def _message(cause: BaseException) -> str:
    return " ".join(str(cause).split()) or type(cause).__name__
