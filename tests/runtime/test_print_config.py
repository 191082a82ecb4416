"""``--print-config``: every key, its value and where it comes from, and nothing else done."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import typing

import pytest
from click.testing import CliRunner

from runtime.dflash.settings import DFlashConfig
from runtime.evaluate import main as evaluate
from runtime.packed.settings import PackedConfig
from runtime.prepare import main as prepare
from runtime.train import main as train

RUN_FILE = """
[run]
folder = "here"
[target]
model = "nowhere/no-such-target"
[data]
template = { enable_thinking = false }
[masks]
cache = "https://host/masks.zip?token=secret"
BLOCK_SIZE = 16
[[masks.entry]]
name = "dflash"
family = "dflash"
kind = "layouts"
context = [32, 64]
anchors = 8
draft_block_size = 4
draws = 4
[train]
steps = 6
lr = 0.25
"""
PACKED = """
[run]
method = "packed"
[masks]
[[masks.entry]]
name = "packed"
family = "document"
kind = "parametric"
Q_LEN = 64
[packed]
max_documents = 3
"""


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    return path


def printed(command, path, *options, code=0):
    result = CliRunner().invoke(command, ["--config", str(path), "--print-config", *options])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def as_json(command, path, *options):
    found = json.loads(printed(command, path, "--json", *options))
    return {item["key"]: item for item in found["settings"]}, found["masks"]


def keys_of(kind):
    hints = typing.get_type_hints(kind)
    sections = {item.name: hints[item.name] for item in dataclasses.fields(kind)}
    del sections["masks"]
    keys = {f"{name}.{f.name}" for name, s in sections.items() for f in dataclasses.fields(s)}
    return keys | {"masks.cache", "masks.BLOCK_SIZE"}


def test_every_key_has_its_value_and_where_it_comes_from(run_file):
    options = ["--set", "train.lr=0.5", "--set", "data.template.more=1", "--set", "run.devices=x"]
    keys, _ = as_json(train, run_file, *options, "--devices", "cpu")
    assert set(keys) == keys_of(DFlashConfig)
    expected = {
        "train.steps": (6, 1000, "run file"),
        "train.lr": (0.5, 0.001, "--set"),
        "run.devices": ("cpu", "auto", "option"),
        "train.clip": (1.0, 1.0, "default"),
        "data.template": ({"enable_thinking": False, "more": 1}, {}, "--set"),
        "drafter.num_layers": (4, 4, "default"),
        "masks.BLOCK_SIZE": (16, 128, "run file"),
    }
    found = {
        key: (keys[key]["value"], keys[key]["default"], keys[key]["origin"]) for key in expected
    }
    assert found == expected
    assert (keys["train.beta1"]["rule"], keys["train.loss"]["rule"]) == (
        "at least 0, below 1",
        "one of decay, dpace",
    )
    shaping = {key for key in ("train.lr", "train.keep", "data.batch") if keys[key]["shapes"]}
    assert shaping == {"train.lr"}


def test_a_default_that_other_keys_decide_says_so(run_file):
    keys, _ = as_json(train, run_file, "--set", "drafter.init=folder")
    assert keys["drafter.num_layers"]["origin"] == "other keys"


def test_a_method_has_its_own_sections(run_file):
    run_file.write_text(PACKED)
    keys, masks = as_json(prepare, run_file)
    assert set(keys) == keys_of(PackedConfig)
    assert (keys["packed.max_documents"]["value"], keys["train.lr"]["default"]) == (3, 2e-5)
    assert keys["masks.cache"]["origin"] == "default"
    assert [mask["name"] for mask in masks] == ["packed/q64-kv64"]


@pytest.mark.parametrize("command", [train, prepare, evaluate])
def test_the_table_shows_keys_and_masks_and_no_secret(run_file, command):
    table = printed(command, run_file)
    assert re.search(r"^train\.lr +0\.25 +0\.001 +run file +above 0$", table, re.MULTILINE)
    assert re.search(r"^train\.clip +1\.0 +default +at least 0$", table, re.MULTILINE)
    assert re.search(r"^dflash/ctx64 +dflash +layouts +32 +96$", table, re.MULTILINE)
    assert "secret" not in table + printed(command, run_file, "--json")


def test_no_masks_are_said_and_faults_refused(run_file):
    run_file.write_text('[run]\nfolder = "x"\n')
    assert "there is no [[masks.entry]]" in printed(train, run_file)
    assert "did you mean 'steps'" in printed(train, run_file, "--set", "train.stepz=1", code=2)
    run_file.write_text(RUN_FILE.replace('"layouts"', '"layout"'))
    assert "layouts" in printed(train, run_file, code=2)


def test_it_makes_nothing_and_loads_no_transformers(run_file, tmp_path):
    program = (
        "import sys; from runtime.train import main\n"
        "main(['--config', 'run.toml', '--print-config'], standalone_mode=False)\n"
        "sys.exit('transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
