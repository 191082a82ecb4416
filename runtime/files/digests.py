"""SHA-256 of large files, each read whole once and then remembered in the user's cache folder."""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from cache.digest import sha256_hex
from maskgen.progress import Progress
from runtime.files.sealed import json_digest
from runtime.files.writing import write_file

PART = 1 << 24
"""Bytes read at once."""
SHOWN_FROM = 2 << 30
"""Bytes to read from which progress is shown."""
SETTLED_S = 2.0
"""Age from which a file is remembered: coarser clocks could not tell a change right after."""

State = tuple[str | int, ...]
"""Path, device, inode, size and times: equal as long as nobody writes to the file."""

_known: dict[State, str] = {}


def user_cache() -> Path:
    """``flex-mask-compiler`` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "flex-mask-compiler"


def sha256_of_files(paths: Sequence[Path]) -> list[str]:
    """SHA-256 of each file, 64 hex digits.

    Raises:
        OSError: A file is not there or cannot be read.
    """
    states = {path: file_state(path) for path in paths}
    unread = [path for path in paths if not _recall(states[path])]
    total = sum(path.stat().st_size for path in unread)
    shown = Progress("reading the target's files", total) if total >= SHOWN_FROM else None
    read: dict[Path, str] = {}
    with shown or contextlib.nullcontext():
        for path in unread:
            read[path] = _read(path, shown)
            if file_state(path) == states[path]:
                _remember(states[path], read[path])
    return [read.get(path) or _recall(states[path]) for path in paths]


def sha256_of_file(path: Path) -> str:
    """SHA-256 of one file, read now; 64 hex digits.

    Raises:
        OSError: It is not there or cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_state(path: Path) -> State:
    """What changes with every write to a file.

    Raises:
        OSError: It is not there.
    """
    stat = path.stat()
    # The time at which the inode changed cannot be set back, as that of the content can.
    return (
        str(path.resolve()),
        stat.st_dev,
        stat.st_ino,
        stat.st_size,
        stat.st_mtime_ns,
        stat.st_ctime_ns,
    )


def _read(path: Path, shown: Progress | None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while part := stream.read(PART):
            digest.update(part)
            if shown is not None:
                shown.advance(len(part))
    return digest.hexdigest()


def _memory(state: State) -> Path:
    return user_cache() / "digests" / f"{sha256_hex(os.fsencode(str(state[0])))[:32]}.json"


def _record(state: State, digest: str) -> dict[str, object]:
    return {"file": list(state), "sha256": digest, "check": json_digest([state, digest])}


def _recall(state: State) -> str:
    """The digest of a file of this state; empty where it is not known."""
    if state not in _known:
        try:
            record = json.loads(_memory(state).read_bytes())
            if record == _record(state, record["sha256"]):
                _known[state] = record["sha256"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            # Never remembered, or damaged: the file is read again.
            return ""
    return _known.get(state, "")


def _remember(state: State, digest: str) -> None:
    if time.time_ns() - max(map(int, state[-2:])) < SETTLED_S * 1e9:
        return
    _known[state] = digest
    path = _memory(state)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(_record(state, digest)).encode())
