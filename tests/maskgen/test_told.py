"""How an error is told: in full, of what file or place, with its notes, and with what helps."""

import errno
import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from maskgen.border import Command, advise_with, after_result
from maskgen.errors import (
    BackendUnavailableError,
    HostBuildForbiddenError,
    LayoutInvariantError,
    MaskgenError,
    MaskSpecError,
    StaleMaskError,
    UnsupportedMaskError,
)
from maskgen.faults import exit_code, show, told


def of_system(number, *files):
    return OSError(number, os.strerror(number), *files)


def raised(call):
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        call()
    return caught.value


class Odd(Exception):
    """An error of a library that nothing is known of."""

    __module__ = "library.inner"


def test_our_errors_are_their_own_message_and_notes():
    error = MaskSpecError("a", 1, "must be 2")
    assert told(error) == "a = 1: must be 2"
    error.add_note("in entry 'x'")
    error.add_note("the result stands above")
    assert told(error) == "a = 1: must be 2 (in entry 'x') (the result stands above)"


def test_lines_are_joined():
    error = MaskgenError("one  \n\n  two\r\nthree")
    assert told(error) == "one two three"
    error.add_note("in\n  two lines")
    assert told(error) == "one two three (in two lines)"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (of_system(errno.ENOSPC, "a"), "a: No space left on device; make room or choose another"),
        (of_system(errno.EBUSY, "a", None, "b"), "a -> b: Device or resource busy; choose a"),
        (of_system(errno.EMFILE), "Too many open files (nowhere); close files or raise the"),
        (MemoryError(), "out of memory: MemoryError (nowhere); close other programs, or ask for "),
        (RuntimeError("Out of memory"), "RuntimeError: Out of memory (nowhere): a fault of this"),
        (RuntimeError("CUDA out of memory"), "out of memory: CUDA out of memory (nowhere); close"),
        (RuntimeError("CUDA error"), "the device fails: CUDA error (nowhere); see that its driver"),
        (KeyError("x"), "KeyError: 'x' (nowhere): a fault of this program, please report it with"),
        (ValueError(), "ValueError (nowhere): a fault of this program, please report it with"),
        (RecursionError("deep"), "something is nested too deeply: deep (nowhere); see what it"),
        (
            ModuleNotFoundError("No module named 'q'", name="q.r"),
            "the package q is not installed (",
        ),
        (ModuleNotFoundError("No maskgen.q", name="maskgen.q"), "No maskgen.q (nowhere); install "),
        (ModuleNotFoundError("No json.q", name="json.q"), "No json.q (nowhere); install this "),
        (ImportError("cannot import x", name="q"), "cannot import x (nowhere); install this "),
        (Odd("x"), "library fails: Odd: x (nowhere); --debug shows the traceback"),
    ],
)
def test_errors_of_others_are_told_with_what_helps(error, line):
    assert told(error).startswith(line)
    assert exit_code(error) == 1


def test_a_long_message_is_cut():
    for length, shown in ((600, "x" * 600), (601, "x" * 600 + "...")):
        assert told(json.JSONDecodeError("x" * length, "", 0)).startswith("not as it should be: x")
        line = told(ValueError("x" * length))
        assert line.startswith(f"ValueError: {shown} (nowhere): a fault")


def test_the_place_is_the_innermost_of_ours():
    error = raised(lambda: import_module("maskgen.buckets").plan_buckets(3, 1, 1))
    told_at = told(error)
    file = Path(import_module("maskgen.buckets").__file__)
    (line,) = (
        number
        for number, text in enumerate(file.read_text().splitlines(), start=1)
        if "np.asarray(list(lengths))" in text
    )
    assert f"(maskgen/buckets.py:{line})" in told_at
    # Where none of ours took part: the innermost of all.
    error = raised(lambda: json.loads("{"))
    assert f"({Path(json.decoder.__file__)}:" in told(error)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MaskgenError("x"), 1),
        (MaskSpecError("a", 1, "x"), 2),
        (UnsupportedMaskError("x"), 1),
        (LayoutInvariantError("t", 1, "x"), 3),
        (StaleMaskError("x"), 1),
        (BackendUnavailableError("p", "w", "i"), 1),
        (HostBuildForbiddenError("w", "r"), 1),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(errno.EPIPE, "gone"), 1),
        (SystemError(), 1),
    ],
)
def test_exit_codes(error, code):
    assert exit_code(error) == code


def test_what_our_errors_say():
    assert str(LayoutInvariantError("t", 7, "must be 8")) == (
        "t: must be 8, but found 7; rebuild the entry"
    )
    assert str(BackendUnavailableError("p", "a kernel", "pip install p")) == (
        "a kernel needs p, which is not installed: pip install p"
    )
    assert str(HostBuildForbiddenError("compile_mask", "a run trains")) == (
        "compile_mask may not run now: a run trains"
    )
    error = UnsupportedMaskError("x", row=(0, 1, 2), count=33, limit=32)
    assert (error.row, error.count, error.limit) == ((0, 1, 2), 33, 32)
    plain = UnsupportedMaskError("x")
    assert (plain.row, plain.count, plain.limit) == (None, None, None)


@pytest.mark.parametrize("debug", [False, True])
def test_an_error_is_shown_on_stderr_with_its_run_file(capsys, debug):
    error = raised(lambda: click.get_current_context())
    show(error, None, (), debug=debug)
    captured = capsys.readouterr()
    assert captured.out == ""
    trace, _, line = captured.err.rpartition("Error: RuntimeError: ")
    assert line.startswith("There is no active click context. (")
    assert line.endswith("\n")
    assert trace.startswith("Traceback (most recent call last):\n") == debug
    assert bool(trace) == debug


def test_advice_of_an_error_repeats_what_the_command_was_asked(capsys):
    show(MaskgenError("run: x --config FILE --cache y"), "a b.toml", ["run.seed=1"], debug=False)
    assert capsys.readouterr().err == (
        "Error: run: x --config 'a b.toml' --set run.seed=1 --cache y\n"
    )
    show(MaskgenError("run: x --config FILE"), None, ["run.seed=1"], debug=False)
    assert capsys.readouterr().err == "Error: run: x --config FILE\n"
    show(KeyboardInterrupt(), None, (), debug=False)
    assert capsys.readouterr().err == "stopped by SIGINT\n"


@click.group()
def tool():
    """Holds a command."""


@tool.command(cls=Command)
@click.option("--fail", default="")
@click.option("--number", type=int)
def verb(fail, number):
    """Fails as asked."""
    advise_with("r.toml", ["a.b=1"])
    if fail == "ours":
        raise LayoutInvariantError("t", 7, "run x --config FILE")
    if fail == "usage":
        raise click.UsageError("not so")
    if fail == "exit":
        click.get_current_context().exit(7)
    if fail == "abort":
        raise click.Abort
    if fail == "interrupt":
        raise KeyboardInterrupt
    if fail == "leave":
        raise SystemExit(0)
    if fail == "neither":
        with after_result(lambda: click.no_such_name):
            raise MaskgenError("not written")
    if fail == "both":
        with after_result(lambda: click.echo("shown")):
            raise MaskgenError("not written")
    click.echo(f"done {number}")


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["--number", "4"], 0, "done 4\n", ""),
        (
            ["--fail", "ours"],
            3,
            "",
            "Error: t: run x --config r.toml --set a.b=1, but found 7; rebuild the entry\n",
        ),
        (["--fail", "exit"], 7, "", ""),
        (["--fail", "abort"], 1, "", "Aborted!\n"),
        (["--fail", "interrupt"], 130, "", "stopped by SIGINT\n"),
        (["--fail", "neither"], 1, "", "Error: not written\n"),
        (["--fail", "both"], 1, "shown\n", "Error: not written (the result stands above)\n"),
    ],
)
def test_how_a_command_ends(arguments, code, out, err):
    result = CliRunner().invoke(tool, ["verb", *arguments])
    assert (result.exit_code, result.stdout, result.stderr) == (code, out, err)


def test_code_that_ends_the_program_fails_the_command():
    result = CliRunner().invoke(tool, ["verb", "--fail", "leave"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(r"Error: SystemExit: 0 \(.*:\d+\) ended it before.*\n", result.stderr)


def test_a_usage_error_ends_with_2_and_hides_secrets():
    assert CliRunner().invoke(tool, ["verb", "--fail", "usage"]).exit_code == 2
    result = CliRunner().invoke(tool, ["verb", "--number", "http://h/x?token=hidden"])
    assert result.exit_code == 2
    assert "token=***" in result.stderr
    assert "hidden" not in result.stderr


def test_every_command_has_its_debug_flag_once():
    assert [p.name for p in verb.params] == ["fail", "number", "debug"]
    shown = CliRunner().invoke(tool, ["verb", "--help"]).stdout
    assert "Show the traceback of an error." in shown
    result = CliRunner().invoke(tool, ["verb", "--fail", "ours", "--debug"])
    assert (result.exit_code, result.stderr.startswith("Traceback")) == (3, True)
    assert "Traceback" not in CliRunner().invoke(tool, ["verb", "--fail", "ours"]).stderr


def test_closed_streams_are_opened_and_others_left(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(SystemExit) as caught:
        verb.main(["--fail", "exit"])
    assert caught.value.code == 7
    assert sys.stderr.name == os.devnull
    sys.stderr.close()


def named(name, base=Exception, module="elsewhere"):
    """An error of a class of that name, as another library would raise it."""
    return type(name, (base,), {"__module__": module})


LESS = (
    "close other programs, or ask for less: fewer anchors, shorter contexts, a smaller batch or "
    "target"
)
DEVICE = "see that its driver is sound (`nvidia-smi`), then run it again"


@pytest.mark.parametrize(
    ("kind", "message", "what", "helps"),
    [
        *(
            (named(name), "odd", "not as it should be", "see what stands there, or make it anew")
            for name in (
                *("SafetensorError", "JSONDecodeError", "TOMLDecodeError", "UnicodeDecodeError"),
                *("BadZipFile", "BadGzipFile", "LZMAError", "EOFError", "UnpicklingError"),
                *("ParserError", "ArrowInvalid", "error", "Error"),
            )
        ),
        (named("MemoryError"), "x", "out of memory", LESS),
        (named("OutOfMemoryError"), "x", "out of memory", LESS),
        (RuntimeError, "can't allocate memory", "out of memory", LESS),
        (RuntimeError, "cannot allocate memory", "out of memory", LESS),
        (RuntimeError, "GPU out of memory", "out of memory", LESS),
        (ImportError, "failed to map segment", "out of memory", LESS),
        (
            RuntimeError,
            "no home directory",
            "this user has no home",
            "set the environment variables USER and HOME",
        ),
        *(
            (RuntimeError, f"{word} failed", "the device fails", DEVICE)
            for word in ("CUDA", "cuDNN", "CUDNN", "CUBLAS_STATUS", "NVIDIA", "NCCL")
        ),
        (named("DeferredCudaCallError"), "CUDA call", "the device fails", DEVICE),
        (RecursionError, "x", "something is nested too deeply", "see what it reads"),
        (
            named("UnicodeEncodeError"),
            "x",
            "no text of that encoding",
            "set PYTHONIOENCODING=utf-8",
        ),
    ],
)
def test_every_kind_says_what_happened_and_what_helps(kind, message, what, helps):
    assert told(kind(message)) == f"{what}: {message} (nowhere); {helps}"


@pytest.mark.parametrize("kind", [ValueError, LookupError, named("Other")])
def test_only_its_own_classes_are_of_a_kind(kind):
    for message in ("out of memory", "CUDA failed", "home directory"):
        assert not told(kind(message)).startswith(("out of memory", "the device", "this user"))


@pytest.mark.parametrize(
    "module",
    [
        *("socket", "ssl", "http", "urllib", "urllib3", "requests", "httpx", "aiohttp"),
        *("botocore", "fsspec", "s3fs", "gcsfs", "adlfs", "azure", "google", "paramiko"),
        "huggingface_hub",
    ],
)
def test_errors_of_the_way_to_a_server_are_told_as_such(module):
    error = named("Odd", module=f"{module}.inner")("x")
    assert not told(error).startswith(module)
    assert "(Odd: x, nowhere); " in told(error)
    # What names a file is of that file, whoever raises it.
    of_file = named("Odd", OSError, module)(errno.ENOENT, "No such file", "f")
    assert told(of_file).startswith((f"{module} fails: Odd: ", "f: No such file"))


def test_a_connection_that_breaks_is_of_the_server():
    for error in (ConnectionResetError(), TimeoutError(), ConnectionRefusedError()):
        assert f"({type(error).__name__}, nowhere); " in told(error)
    assert told(TimeoutError(errno.ETIMEDOUT, "timed out", "f")).startswith("f: ")


def test_the_place_may_be_in_any_of_our_packages():
    cache = import_module("cache")
    error = raised(lambda: cache.canonical_json({"a": object()}))
    assert re.search(r"\(cache/\w+\.py:\d+\)", told(error))
    error = raised(lambda: cache.sha256_hex(3))
    assert re.search(r"\(cache/\w+\.py:\d+\)", told(error))


def test_what_is_no_exception_is_named():
    assert told(SystemExit(0)) == "SystemExit: 0 (nowhere) ended it before it was done"
    assert told(GeneratorExit()) == "GeneratorExit (nowhere) ended it before it was done"


def test_a_message_of_several_lines_is_one():
    assert told(ValueError(" a\n  b\t c ")).startswith("ValueError: a b c (nowhere)")
