"""JSON documents that carry their own digest, so that no bit of them changes unseen.

Such a document is an object with ``format``, an integer, and ``document_sha256``: the SHA-256 of
the canonical JSON of all other keys. Documents of format 1, which may leave ``format`` out, are
older than the digest and have none.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.errors import LaterFormatError
from runtime.files.writing import write_file

KEY = "document_sha256"
UNSEALED = 1
"""The format of documents that have no digest."""


class DamagedError(ValueError):
    """A document is not what was written; the message names the file and what was found."""


def json_digest(value: object) -> str:
    """SHA-256 of a value's canonical JSON: sorted keys, no spaces, ASCII; 64 hex digits.

    Raises:
        ValueError: It holds a number that is not finite.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def seal(document: Mapping[str, Any]) -> bytes:
    """The text of a document, with its digest.

    Raises:
        ValueError: As ``json_digest``.
    """
    plain = json.loads(json.dumps(dict(document), allow_nan=False))
    return json.dumps({**plain, KEY: json_digest(plain)}, indent=1).encode() + b"\n"


def write_sealed(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a document in one atomic step; it is on the disk when this returns.

    Raises:
        OSError: The disk refuses; the file is as it was.
    """
    write_file(path, seal(document))


def read_sealed(path: Path, latest: int, otherwise: str) -> dict[str, Any]:
    """Read a document, without its digest.

    Args:
        path: The file.
        latest: The newest format that is known.
        otherwise: What helps where the file is of a newer one.

    Raises:
        OSError: The file is not there or cannot be read.
        DamagedError: It is no such document, or is not as it was written.
        LaterFormatError: Its format is newer than ``latest``.
    """
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: it must be JSON ({error})") from error
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise DamagedError(f"{path} is damaged: it must be a JSON object, found {kind}")
    version = document.get("format", UNSEALED)
    if type(version) is not int or version < UNSEALED:
        raise DamagedError(
            f"{path} is damaged: its format must be 1 to {latest}, found {version!r:.40}"
        )
    if version > latest:
        raise LaterFormatError(
            f"{path} is of format {version}, and this release reads formats up to {latest}: use "
            f"the later release that wrote it, or {otherwise}"
        )
    found = document.pop(KEY, None)
    if version > UNSEALED or found is not None:
        try:
            expected = json_digest(document)
        except (ValueError, RecursionError):
            expected = ""
        if not expected or found != expected:
            raise DamagedError(
                f"{path} is damaged: the SHA-256 of what it says is {expected[:12] or 'none'}..., "
                f"and its {KEY} is {str(found)[:12]}..."
            )
    return document
