"""Whatever is raised -> one line: what, of which file or at which place, and what to do.

Errors of other libraries are known by the names of their classes, so that none is imported here.
"""

import contextlib
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

from cache.address import without_secrets_in
from cache.causes import why
from maskgen.named_module import is_of_named
from maskgen.runfile import with_run_file

LONGEST = 600
"""Characters of another library's message."""
LESS = (
    "close other programs, or ask for less: fewer anchors, shorter contexts, a smaller batch or "
    "target"
)
NO_MEMORY = r"an(no|')t allocate memory|out of memory|failed to map segment"
"""What torch and the loader of its libraries say."""
UNREADABLE = (
    *("SafetensorError", "JSONDecodeError", "TOMLDecodeError", "UnicodeDecodeError", "BadZipFile"),
    *("BadGzipFile", "LZMAError", "EOFError", "UnpicklingError", "ParserError", "ArrowInvalid"),
    *("error", "Error"),
)
"""Classes of what is raised about a file that holds something else than it should; the last two are
those of zlib, struct, csv and binascii."""
KINDS: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
    (("MemoryError", "OutOfMemoryError"), "", "out of memory", LESS),
    (("RuntimeError", "ImportError"), NO_MEMORY, "out of memory", LESS),
    (
        ("KeyError", "RuntimeError"),
        r"getpwuid|home directory",
        "this user has no home",
        "set the environment variables USER and HOME",
    ),
    (("RecursionError",), "", "something is nested too deeply", "see what it reads"),
    (
        ("RuntimeError", "DeferredCudaCallError"),
        r"\bCUDA|\bcuDNN|\bCUDNN|\bCUBLAS|NVIDIA|\bNCCL",
        "the device fails",
        "see that its driver is sound (`nvidia-smi`), then run it again",
    ),
    (("UnicodeEncodeError",), "", "no text of that encoding", "set PYTHONIOENCODING=utf-8"),
    (UNREADABLE, "", "not as it should be", "see what stands there, or make it anew"),
)
"""Classes, what their message must have, what happened, and what helps; the first that fits."""

NETWORK = (
    *("socket", "ssl", "http", "urllib", "urllib3", "requests", "httpx", "aiohttp", "botocore"),
    *("fsspec", "s3fs", "gcsfs", "adlfs", "azure", "google", "paramiko", "huggingface_hub"),
)
"""Modules whose errors are of a server, or of the way there."""

_ROOT = Path(__file__).parents[1]
_OURS = ("cache", "maskgen", "runtime")


def told(error: BaseException) -> str:
    """Return an error as one line, for the user of a command.

    An error of this program is its own message. One of the system or of another library names the
    file, or else the place in the code, and what to do. Any other is a fault of this program.
    """
    if _is_ours(error) or isinstance(error, KeyboardInterrupt):
        line = str(error) or type(error).__name__
    elif not isinstance(error, Exception):
        line = f"{_named(error)} ({_place(error)}) ended it before it was done"
    elif _is_of_network(error):
        what, helps = why(error, "://")
        line = f"{what} ({_named(error)}, {_place(error)}); {helps}"
    elif isinstance(error, OSError) and type(error).__module__ == "builtins":
        line = _of_system(error)
    else:
        line = _of_library(error)
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return re.sub(r"\s*[\r\n]\s*", " ", line + notes)


def show(
    error: BaseException, run_file: str | None, settings: Sequence[str], *, debug: bool
) -> None:
    """Show the user what ended a command; nothing where whoever read its output is gone.

    Args:
        error: What ended it.
        run_file: As in ``with_run_file``, which the commands that the error advises repeat.
        settings: As in ``with_run_file``.
        debug: Whether the traceback is shown, too.
    """
    if isinstance(error, BrokenPipeError) and _is_of_output(error):
        return
    interrupted = isinstance(error, KeyboardInterrupt)
    line = "stopped by SIGINT" if interrupted else f"Error: {told(error)}"
    text = with_run_file(line, run_file, settings)
    if debug:
        text = "".join(traceback.format_exception(error)) + text
    with contextlib.suppress(OSError):
        click.echo(without_secrets_in(text), err=True)


def users_place(error: BaseException) -> str | None:
    """Return ``file:line`` where code that a run file names, or what it called, raised an error.

    None where it was raised in our code or below that.
    """
    place = _innermost(error)
    return None if place is None or _is_in_ours(place[0]) else _place(error)


def exit_code(error: BaseException) -> int:
    """What a command that this ended exits with; after a signal as a shell reports it."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, BrokenPipeError) and _is_of_output(error):
        return 128 + signal.SIGPIPE
    return int(getattr(error, "exit_code", 1)) if _is_ours(error) else 1


def _is_ours(error: BaseException) -> bool:
    # Errors of the runtime are not imported here; those of all three packages have an exit code.
    return isinstance(getattr(error, "exit_code", None), int)


def _is_of_output(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is click.echo.__code__ for frame, _ in frames)


def _is_of_network(error: BaseException) -> bool:
    if isinstance(error, OSError) and (error.filename is not None or _is_of_output(error)):
        return False
    roots = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, (ConnectionError, TimeoutError)) or not roots.isdisjoint(NETWORK)


def _of_system(error: OSError) -> str:
    files = [str(name) for name in (error.filename, error.filename2) if name is not None]
    if _is_of_output(error):
        files = ["the output"]
    if files:
        what, helps = why(error, files[0])
        return f"{' -> '.join(files)}: {what}; {helps}"
    what, helps = why(error, "")
    return f"{what} ({_place(error)}); {helps}"


def _of_library(error: BaseException) -> str:
    names = {kind.__name__ for kind in type(error).__mro__}
    where = "the output" if _is_of_output(error) else _place(error)
    text = _message(error)
    for kinds, pattern, what, helps in KINDS:
        if not names.isdisjoint(kinds) and re.search(pattern, text):
            return f"{what}: {text} ({where}); {helps}"
    if isinstance(error, ImportError):
        return _of_import(error, where)
    if users_place(error) is not None:
        return f"{_named(error)} ({where}), in code that the run file names; see it with --debug"
    library = type(error).__module__.partition(".")[0]
    if library not in ("builtins", *_OURS):
        return f"{library} fails: {_named(error)} ({where}); --debug shows the traceback"
    return (
        f"{_named(error)} ({where}): a fault of this program, please report it with what --debug "
        "shows"
    )


def _of_import(error: ImportError, where: str) -> str:
    package = (error.name or "").partition(".")[0]
    missing = isinstance(error, ModuleNotFoundError) and package not in ("", *_OURS)
    if missing and package not in sys.stdlib_module_names:
        return f"the package {package} is not installed ({where}); run: pip install {package}"
    return f"{_message(error)} ({where}); install this program and its packages again"


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {_message(error)}" if str(error) else type(error).__name__


def _message(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _place(error: BaseException) -> str:
    """The innermost place in our code or the user's, or the innermost of all."""
    place = _innermost(error)
    if place is None:
        every = [(Path(f.f_code.co_filename), n) for f, n in traceback.walk_tb(error.__traceback__)]
        if not every:
            return "nowhere"
        place = every[-1]
    path, line = place
    shown = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path
    return f"{shown}:{line}"


def _innermost(error: BaseException) -> tuple[Path, int] | None:
    """The innermost place in our code or in what a run file names."""
    places = [
        (path, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if _is_in_ours(path := Path(frame.f_code.co_filename)) or is_of_named(frame)
    ]
    return places[-1] if places else None


def _is_in_ours(path: Path) -> bool:
    # This file's own folder is ours, and so may be the environment that stands in it.
    return path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] in _OURS
