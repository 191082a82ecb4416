"""Every command that a refusal advises works when it is pasted, and mends what was refused."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

import cache
from cache.advice import RUN_FILE as RUN_FILE_OPTIONS
from maskgen.cli import main as maskgen
from maskgen.runfile import setting, with_run_file
from tests.runtime.test_train import RUN_FILE
from tests.runtime.test_train import root as root  # the fixture: a target, prompts and a run file

ADVICE = re.compile(r"run: (python -m [^\n]+)")
ROUNDS = 5


def command_of(words):
    python, option, module, *arguments = words
    assert (python, option) == ("python", "-m")
    return maskgen if module == "maskgen" else import_module(module).main, arguments


def paste(line):
    """Run one command line as a shell would; returns the last result."""
    result = None
    for part in line.split(" && "):
        command, arguments = command_of(shlex.split(part))
        result = CliRunner().invoke(command, arguments)
        if result.exit_code:
            break
    return result


def follow(line):
    """Run a command, and what it advises until it works; returns what was said on the way."""
    said = []
    for _ in range(ROUNDS):
        result = paste(line)
        if result.exit_code == 0:
            return said
        message = result.stderr.splitlines()[-1]
        assert message not in said, "the same advice again"
        said.append(message)
        advised = ADVICE.search(message)
        assert advised, message
        assert follow(advised[1]) is not None
    raise AssertionError(said)


@pytest.fixture
def place(root, tmp_path, monkeypatch):
    """A folder of its own for each test, with a space in its name; the target is shared."""
    folder = tmp_path / "my runs"
    folder.mkdir()
    text = RUN_FILE.format(root=folder).replace(f"{folder}/target", f"{root}/target")
    text = text.replace(f"{folder}/prompts", f"{root}/prompts").replace("steps = 6", "steps = 1")
    (folder / "run.toml").write_text(text)
    monkeypatch.chdir(folder)
    return folder


def said_by(line):
    (first, *_) = follow(line)
    return first


def test_from_nothing_every_command_leads_to_the_next(place):
    said = follow("python -m runtime.evaluate --config run.toml")
    assert len(said) >= 2
    assert follow("python -m runtime.evaluate --config run.toml") == []


@pytest.fixture
def ready(place):
    for line in (
        "python -m runtime.prepare --config run.toml",
        "python -m maskgen build --config run.toml",
    ):
        assert paste(line).exit_code == 0
    return place


@pytest.mark.parametrize(
    "options",
    [
        "--set 'data.folder=other data'",
        "--set masks.cache=other.zarr",
        "--set masks.BLOCK_SIZE=32",
        "--set masks.BLOCK_SIZE=32 --set 'masks.cache=packed masks.zip'",
        "--set target.num_features=3",
        "--set data.features=online --set train.global_batch=4",
        "--devices cpu,cpu --set data.max_new_tokens=20 --set data.folder=d",
    ],
)
def test_what_train_advises_mends_what_it_refused(ready, options):
    message = said_by(f"python -m runtime.train --config run.toml {options}")
    for word in re.findall(r"[\w.]+=[\w.,]+", options):
        assert word in message, "the settings are repeated"


def test_another_target_needs_its_own_data(ready, root):
    said_by(f"python -m runtime.train --config run.toml --set target.model={root}/other")


@pytest.mark.parametrize("module", ["runtime.export", "runtime.evaluate"])
def test_a_run_without_a_drafter_is_trained(ready, module):
    said = said_by(f"python -m {module} --config run.toml --set run.folder=new/run")
    assert "run: python -m runtime.train --config run.toml --set run.folder=new/run" in said


def test_a_folder_that_somebody_named_is_not_trained_for(ready):
    result = paste("python -m runtime.evaluate --config run.toml --drafter nowhere")
    assert result.exit_code == 1
    assert "nowhere" in result.stderr
    assert "run: " not in result.stderr


@pytest.mark.parametrize(
    "line",
    [
        "list --config run.toml --set masks.cache=a.zarr",
        "list --config run.toml --cache 'b c.zarr'",
        "versions --config run.toml --cache d.zip",
        "verify --config run.toml --cache memory://advice/e.zarr",
        "pack f.zip --config run.toml",
        "pack g.zip --config run.toml --set masks.BLOCK_SIZE=32",
        "show dflash/ctx32 --config run.toml --set masks.cache=h.zarr",
    ],
)
def test_what_maskgen_advises_mends_what_it_refused(place, line):
    said_by(f"python -m maskgen {line}")


def test_a_folder_of_another_ending_is_named(place):
    result = paste("python -m maskgen list --cache masks")
    assert "name a folder that ends in .zarr" in result.stderr


def test_every_command_that_the_code_advises_leaves_room_for_the_options():
    root = Path(cache.__file__).parents[1]
    files = [
        file
        for package in ("cache", "maskgen", "runtime")
        for file in (root / package).rglob("*.py")
    ]
    advised = [
        (file.name, found[0])
        for file in files
        for found in re.finditer(r"run: python -m [^\n]+", file.read_text())
    ]
    assert len(advised) >= 3
    for name, line in advised:
        assert RUN_FILE_OPTIONS in line or "{RUN_FILE}" in line, (name, line)


def test_without_a_run_file_the_advice_leaves_room_for_one():
    assert with_run_file("run: x --config FILE", None) == "run: x --config FILE"


@pytest.mark.parametrize("value", ["cpu,cpu", "a b", "123", "true", 'say "x"', "1e3", "ü \\", ""])
def test_a_setting_is_read_back_as_it_was_given(tmp_path, value):
    from maskgen.runfile import read_document

    (tmp_path / "x.toml").write_text("")
    document = read_document(tmp_path / "x.toml", [setting("run.devices", value)])
    assert document == {"run": {"devices": value}}


def test_build_takes_one_run_file(place):
    assert paste("python -m maskgen build").exit_code == 2
    assert paste("python -m maskgen build run.toml --config run.toml").exit_code == 2
    assert paste("python -m maskgen build run.toml --set masks.BLOCK_SIZE=64").exit_code == 0
    store = cache.open_store("masks.zarr")
    assert all(info.spec["BLOCK_SIZE"] == [64, 64] for info in store.version().entries.values())
