import ast
import os
import signal
from importlib import import_module

import click
import pytest
from click.testing import CliRunner

from runtime.data.folder import PREPARE
from runtime.errors import DatasetError
from runtime.options import DEFAULT_CONFIG, Command, config_options, devices_option, overriding


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
    of_generate = "runtime.dflash.decoding.generation.read_network"
    for called_first in ("runtime.methods.read_run", of_generate):
        monkeypatch.setattr(called_first, stop)
    options = ["--drafter", "x", "--prompt", "x"] if name == "generate" else []
    result = CliRunner().invoke(import_module(f"runtime.{name}").main, options)
    assert result.exit_code == 128 + number
    assert result.stderr == f"stopped by {number.name}\n"
    assert signal.getsignal(number) is before


def shown(*options):
    """What a command is called with."""

    @click.command(cls=Command)
    @devices_option
    @config_options
    def command(**given):
        click.echo(repr(sorted(given.items())))

    result = CliRunner().invoke(command, options)
    assert result.exit_code == 0, result.output
    return dict(ast.literal_eval(result.stdout))


def test_the_options_of_a_command_and_their_defaults():
    assert DEFAULT_CONFIG == "configs/demo.toml"
    assert shown() == {"config_path": DEFAULT_CONFIG, "settings": (), "devices": None}
    for name in ("--devices", "--device"):
        assert shown(name, "cpu,cpu")["devices"] == "cpu,cpu"
    given = ("--config", "a.toml", "--set", "run.seed=1", "--set", "run.folder=b")
    assert shown(*given) == {
        "config_path": "a.toml",
        "settings": ("run.seed=1", "run.folder=b"),
        "devices": None,
    }


def test_help_names_the_default_run_file():
    @click.command(cls=Command)
    @config_options
    def command(**given):
        pass

    assert f"[default: {DEFAULT_CONFIG}]" in CliRunner().invoke(command, ["--help"]).stdout


def test_an_option_is_a_setting_that_comes_after_the_others():
    options = {"run.devices": None, "run.folder": "runs/a b", "run.seed": "7"}
    found = []

    @click.command(cls=Command)
    def command():
        found.append(overriding("my.toml", ("run.seed=1", "train.steps=2"), options))
        found.append(overriding("my.toml", ()))
        raise DatasetError(f"no data; {PREPARE}")

    result = CliRunner().invoke(command)
    # A text that would be read as a number is quoted.
    assert found == [
        ["run.seed=1", "train.steps=2", "run.folder=runs/a b", 'run.seed="7"'],
        [],
    ]
    assert result.stderr.endswith("--config my.toml\n"), "the last call's"


def test_advice_repeats_the_options_too():
    @click.command(cls=Command)
    def command():
        overriding("my.toml", ["run.seed=1"], {"run.devices": "cpu,cpu", "run.folder": None})
        raise DatasetError(f"no data; {PREPARE}")

    line = CliRunner().invoke(command).stderr
    assert "--config my.toml --set run.seed=1 --set " in line
    assert "run.devices" in line
    assert "run.folder" not in line


@pytest.mark.parametrize("own", [None, "ACTIVE"])
def test_what_torch_reads_at_its_start_is_set_unless_the_user_did(monkeypatch, own):
    names = {"OMP_WAIT_POLICY": "PASSIVE", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    for name in names:
        monkeypatch.delenv(name, raising=False)
        if own is not None:
            monkeypatch.setenv(name, own)
    found = {}

    @click.command(cls=Command)
    def command():
        found.update({name: os.environ.get(name) for name in names})

    CliRunner().invoke(command)
    assert found == (names if own is None else dict.fromkeys(names, own))
