import os
import signal
from importlib import import_module

import click
import pytest
from click.testing import CliRunner

from runtime.data.folder import PREPARE
from runtime.errors import DatasetError
from runtime.options import Command, overriding


@pytest.mark.parametrize(
    ("run_file", "shown"),
    [
        ((), "no data; run: python -m runtime.prepare --config FILE"),
        (("my.toml", []), "no data; run: python -m runtime.prepare --config my.toml"),
        (("my run.toml", []), "no data; run: python -m runtime.prepare --config 'my run.toml'"),
        (
            ("my.toml", ["run.devices=cpu,cpu", "data.prompts=['a b']"]),
            "no data; run: python -m runtime.prepare --config my.toml --set run.devices=cpu,cpu "
            """--set 'data.prompts=['"'"'a b'"'"']'""",
        ),
    ],
)
def test_advice_names_the_run_file_and_the_settings(run_file, shown):
    @click.command(cls=Command)
    def command():
        if run_file:
            overriding(*run_file)
        raise DatasetError(f"no data; {PREPARE}")

    result = CliRunner().invoke(command)
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"Error: {shown}\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
@pytest.mark.parametrize("name", ["prepare", "train", "evaluate", "export", "generate"])
def test_a_signal_ends_every_command_as_a_shell_reports_it(monkeypatch, name, number):
    def stop(*args, **kwargs):
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    for called_first in ("runtime.methods.read_run", "runtime.ranks.devices.place"):
        monkeypatch.setattr(called_first, stop)
    options = ["--drafter", "x", "--prompt", "x"] if name == "generate" else []
    result = CliRunner().invoke(import_module(f"runtime.{name}").main, options)
    assert result.exit_code == 128 + number
    assert result.stderr == f"stopped by {number.name}\n"
    assert signal.getsignal(number) is before
