"""Whatever is raised under any command ends it in one line, with the right exit code."""

import csv
import errno
import json
import os
import pickle
import re
import socket
import ssl
import struct
import subprocess
import sys
import tomllib
import zipfile
import zlib
from importlib import import_module
from pathlib import Path

import aiohttp
import click
import numpy as np
import pytest
import torch
import zarr
from click.testing import CliRunner
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from cache.causes import naming
from cache.errors import StoreWriteError
from maskgen.border import Command, after_result
from maskgen.cli import main as maskgen
from maskgen.errors import MaskSpecError
from runtime.errors import DatasetError, WorkerError

RUNTIME = ("prepare", "train", "evaluate", "export", "generate", "compare")
COMMANDS = {
    **{f"maskgen {name}": verb for name, verb in maskgen.commands.items()},
    **{f"runtime.{name}": import_module(f"runtime.{name}").main for name in RUNTIME},
}


def raised(function, *arguments):
    """What a call raises."""
    try:
        function(*arguments)
    except BaseException as error:
        return error.with_traceback(None)
    raise AssertionError


def of_system(number, *files):
    return OSError(number, os.strerror(number), *files)


def named(error, path):
    """The error as it leaves a block that names its file."""

    def block():
        with naming(path):
            raise error

    return raised(block)


def caused(error, cause):
    error.__cause__ = cause
    return error


ERRORS = {
    # of the system: what, about which file, and what helps
    "full": (of_system(errno.ENOSPC, "a b.bin"), "a b.bin: No space left.*; make room"),
    "quota": (named(of_system(errno.EDQUOT), "q.json"), "q.json: .*quota.*; make room"),
    "read only": (of_system(errno.EROFS, "x/y"), "x/y: Read-only.*; choose a folder"),
    "not allowed": (of_system(errno.EACCES, "/locked/x"), "/locked/x: .*denied; see that its perm"),
    "missing": (of_system(errno.ENOENT, "gone"), "gone: .*; see that it is there"),
    "files": (of_system(errno.EMFILE), r"Too many open files \(.*\); close files"),
    "long": (of_system(errno.ENAMETOOLONG, "n" * 300), "nnn: .*; choose a shorter path"),
    "no folder": (of_system(errno.ENOTDIR, "f/g"), "f/g: Not a directory; see what"),
    "folder": (of_system(errno.EISDIR, "d"), "d: Is a directory; see what stands there"),
    "busy": (of_system(errno.EBUSY, "a", None, "b"), "a -> b: .*; choose a folder that is n"),
    "disk": (named(of_system(errno.EIO), "disk"), "disk: .*; see that its disk"),
    "mount": (of_system(errno.ETIMEDOUT, "/mnt/x"), "/mnt/x: .* timed out; see that its disk"),
    "too large": (named(of_system(errno.EFBIG), "big"), "big: File too large; raise the limit"),
    "handle": (of_system(errno.ESTALE, "nfs"), "nfs: Stale.*; see that its disk or mount"),
    "silent": (TimeoutError(), r"no answer for 30 s .*; see that the server is up"),
    "refused": (of_system(errno.ECONNREFUSED), "no connection .*; see that the server is up"),
    "no number": (OSError("no such model"), r"no such model \(.*\); see what stands there"),
    "host": (socket.gaierror(-2, "Name unknown"), "its host is not known .*check the host's name"),
    "certificate": (ssl.SSLError(1, "bad cert"), "no connection that can be trusted .*certificate"),
    "memory": (MemoryError(), "out of memory: .*; close other programs, or ask for less"),
    "arrays": (raised(np.ones, (1 << 45,)), "out of memory: Unable to allocate .*; close"),
    "device": (torch.OutOfMemoryError("CUDA out of memory"), "out of memory: CUDA .*; close"),
    "host memory": (raised(torch.empty, 1 << 50), "out of memory: .*can't allocate.*; close"),
    "driver": (torch.AcceleratorError("CUDA error: x"), "the device fails: .*nvidia-smi"),
    "no driver": (
        RuntimeError("Found no NVIDIA driver"),
        "the device fails: Found no .*nvidia-smi",
    ),
    "no user": (KeyError("getpwuid(): uid not found: 9"), "this user has no home: .*; set the env"),
    "no home": (RuntimeError("Could not determine home directory."), "this user has no home: "),
    # of libraries
    "tensors": (
        named(raised(load, b"[]"), "w.safetensors"),
        r"not as it should be: .* \(in w.safetensors\)$",
    ),
    "tensors full": (
        named(SafetensorError("I/O error: No space left (os error 28)"), "w.safetensors"),
        "w.safetensors: No space left on device; make room",
    ),
    "json": (named(raised(json.loads, "{"), "x.json"), r"Expecting.*\(in x.json\)$"),
    "toml": (named(raised(tomllib.loads, "="), "x.toml"), r"not as.*\(in x.toml\)$"),
    "text": (named(raised(b"\xff".decode), "x.txt"), r"can't decode.*\(in x.txt\)$"),
    "zip": (named(zipfile.BadZipFile("no zip"), "x.zip"), r"no zip.*\(in x.zip\)$"),
    "zlib": (raised(zlib.decompress, b"x"), "not as it should be: Error -5.*; see what"),
    "struct": (raised(struct.unpack, "i", b""), "not as it should be: unpack requires"),
    "csv": (csv.Error("line contains NUL"), "not as it should be: line contains NUL"),
    "pickle": (pickle.UnpicklingError("bad"), "not as it should be: bad"),
    "zarr": (zarr.errors.NodeNotFoundError("no group"), "zarr fails: NodeNotFoundError: no group"),
    "http": (aiohttp.InvalidURL("x:y"), "what answers there .*InvalidURL: x:y.*; check"),
    "broken off": (
        aiohttp.ServerDisconnectedError(),
        "the connection broke off .*ServerDis.*; run",
    ),
    "package": (
        raised(import_module, "s3fs_of_another_world.x"),
        "the package s3fs_of_another_world is not installed.*pip install s3fs_of_another_world$",
    ),
    "library": (ImportError("libcudart.so.13: cannot open"), "libcudart.*packages again$"),
    "no room for it": (ImportError("x.so: failed to map segment"), "out of memory: x.so.*; close"),
    "nested": (raised(json.loads, "[" * 100_000), "nested too deeply: .*; see what it reads"),
    # of ours
    "data": (DatasetError("no data"), "no data$"),
    "store": (StoreWriteError("f", "cannot write f: no\nroom"), "cannot write f: no room$"),
    "worker": (caused(WorkerError("stopped: no room"), KeyError(1)), "stopped: no room$"),
    # faults of this program
    "key": (KeyError("offsets"), "KeyError: 'offsets' .*: a fault of this program.*--debug"),
    "assertion": (AssertionError(), r"AssertionError \(.*: a fault of this program.*--debug"),
    "torch": (
        RuntimeError("shape '[1]' is invalid\nfor\n input"),
        r"shape '\[1\]' is inv.* for in",
    ),
    "group": (ExceptionGroup("both", [ValueError("a")]), "ExceptionGroup: both .* a fault"),
}


def call(name, error, monkeypatch, *options):
    """Run a command whose work raises."""
    command = COMMANDS[name]

    def work(*_, **__):
        raise error

    monkeypatch.setattr(command, "callback", work)
    given = [
        text
        for parameter in command.params
        if parameter.required
        for text in (*parameter.opts[: isinstance(parameter, click.Option)], "x")
    ]
    return CliRunner().invoke(command, [*given, *options])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_in_one_line_whatever_is_raised(name, monkeypatch):
    for error, expected in ERRORS.values():
        result = call(name, error, monkeypatch)
        (line,) = result.stderr.splitlines()
        assert re.search(f"^Error: .*{expected}", line), line
        assert (result.exit_code, result.stdout) == (1, "")
    for error, code in ((MaskSpecError("a", 1, "must be 2"), 2), (KeyboardInterrupt(), 130)):
        result = call(name, error, monkeypatch)
        assert (result.exit_code, len(result.stderr.splitlines())) == (code, 1)
        assert "fault of this program" not in result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_debug_shows_the_traceback_and_changes_nothing_else(name, monkeypatch):
    for kind in ("full", "key", "json", "data", "nested"):
        error, _ = ERRORS[kind]
        plain = call(name, error, monkeypatch)
        result = call(name, error, monkeypatch, "--debug")
        assert result.exit_code == plain.exit_code
        assert result.stderr.endswith(plain.stderr)
        assert result.stderr.startswith("Traceback (most recent call last):\n")
        assert re.search(rf"^([\w.]+\.)?{type(error).__name__}: ", result.stderr, re.MULTILINE)


def test_no_traceback_shows_a_token(monkeypatch):
    error = ValueError("GET https://user:secret@host/x?token=secret failed")
    result = call("maskgen pull", error, monkeypatch, "--debug")
    assert "host/x" in result.stderr
    assert "secret" not in result.stderr


def test_the_place_of_a_fault_is_in_our_code(lengths, monkeypatch):
    monkeypatch.setattr("maskgen.lengths.MAX_SAMPLES", "many")
    result = CliRunner().invoke(maskgen, ["plan", str(lengths / "lengths.txt")])
    assert re.match(r"Error: TypeError: .* \(maskgen/lengths.py:\d+\): a fault of", result.stderr)


def test_a_block_names_its_file_once_and_changes_no_other_name():
    with pytest.raises(OSError, match="'inner'") as caught, naming("outer"), naming("inner"):
        raise of_system(errno.EIO)
    assert caught.value.filename == "inner"
    with pytest.raises(OSError, match="'own'"), naming("outer"):
        raise of_system(errno.EIO, "own")


def test_safetensors_names_the_file_that_it_cannot_write(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, naming(tmp_path / "none" / "x"):
        save_file({"a": torch.zeros(1)}, tmp_path / "none" / "x")
    assert caught.value.filename == str(tmp_path / "none" / "x")


@pytest.fixture
def lengths(tmp_path):
    (tmp_path / "lengths.txt").write_text("".join(f"{n}\n" for n in range(1, 200)))
    return tmp_path


@click.command(cls=Command)
@click.option("--fail", default="")
def command(fail):
    """Shows a result and writes it."""

    def show():
        if fail == "show":
            raise of_system(errno.ENOSPC, "shown")
        click.echo("the result")

    with after_result(show):
        if fail == "write":
            raise of_system(errno.ENOSPC, "written")
        click.echo("wrote it", err=True)


def test_a_result_is_shown_before_it_is_written():
    result = CliRunner().invoke(command, ["--fail", "write"])
    assert (result.exit_code, result.stdout) == (1, "the result\n")
    assert re.match(r"Error: written: No space .*\(the result stands above\)$", result.stderr)


def test_a_result_that_cannot_be_shown_is_written():
    result = CliRunner().invoke(command, ["--fail", "show"])
    assert (result.exit_code, result.stdout) == (1, "")
    wrote, line = result.stderr.splitlines()
    assert wrote == "wrote it"
    assert line.startswith("Error: shown: No space left on device; ")
    assert "above" not in line


PLAN = [sys.executable, "-m", "maskgen", "plan", "lengths.txt"]


def shell(line, folder):
    """Run a shell line with our command as $PLAN."""
    root = str(Path(import_module("maskgen").__file__).parents[1])
    environ = {**os.environ, "PYTHONPATH": root, "PLAN": " ".join(PLAN)}
    # Else nothing is left in a buffer that is written once more at the end.
    environ.pop("PYTHONUNBUFFERED", None)
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_reader_that_is_gone_is_no_error(lengths):
    done = shell("(sleep 1; $PLAN) | true", lengths)
    assert (done.returncode, done.stdout, done.stderr) == (141, "", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a full device")
def test_an_output_that_is_full_is_named(lengths):
    done = shell("$PLAN > /dev/full", lengths)
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: the output: No space left on device; make room")
    assert done.returncode == 1
    assert shell("$PLAN > /dev/full 2> /dev/full", lengths).returncode == 1


def test_an_output_that_is_closed_is_none(lengths):
    done = shell("$PLAN >&-", lengths)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = shell("$PLAN --config x >&- 2>&-", lengths)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")
    done = shell(f"{sys.executable} -m maskgen list --cache none.zarr >&-", lengths)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: there is no cache at none.zarr")
    assert len(done.stderr.splitlines()) == 1


def test_a_line_of_progress_that_cannot_be_shown_costs_nothing(lengths):
    (lengths / "run.toml").write_text(
        '[masks]\n[[masks.entry]]\nname = "m"\nfamily = "causal"\nQ_LEN = 128\n'
    )
    build = f"{sys.executable} -m maskgen build run.toml --cache"
    assert shell(f"{build} quiet.zarr 2> /dev/full", lengths).returncode == 0
    assert shell(f"({build} broken.zarr 2>&1 >table) | true", lengths).returncode == 0
    assert "is current in broken.zarr" in (lengths / "table").read_text()


def test_text_that_the_output_cannot_show_is_told(lengths):
    code = (
        "import click\nfrom maskgen.border import Command\n"
        "@click.command(cls=Command)\ndef main():\n    click.echo('\u2713')\nmain()\n"
    )
    (lengths / "show.py").write_text(code)
    done = shell(f"PYTHONIOENCODING=latin-1 {sys.executable} show.py", lengths)
    assert done.returncode == 1
    assert re.match(r"Error: .*\(the output\); set PYTHONIOENCODING=utf-8$", done.stderr)
