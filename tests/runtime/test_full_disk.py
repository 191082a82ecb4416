"""A disk that is full, met by every file that a command writes: no file may grow past a limit."""

import contextlib
import errno
import json
import os
import re
import shutil

import pytest
from click.testing import CliRunner

from maskgen.cli import main as maskgen
from runtime.evaluate import main as evaluate
from runtime.export import main as export
from runtime.prepare import main as prepare
from runtime.train import main as train
from runtime.training.checkpoint import find_checkpoints
from runtime.training.metrics import read_metrics
from tests.full_disk import full_disk
from tests.runtime.test_train import root as root  # the fixtures: a target, prompts, a run file
from tests.runtime.test_train import trained as trained

FULL = "File too large; raise the limit"


def refused(command, *options, room=0):
    """Run a command on a full disk; returns the line that ends it, and the result."""
    with full_disk(room):
        result = CliRunner().invoke(command, [str(option) for option in options])
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.stderr
    *_, line = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line, result


def files(folder):
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.fixture
def config(root, trained):
    return ["--config", root / "run.toml"]


def test_prepare_names_the_answers(root, config, tmp_path):
    settings = [f"data.folder={tmp_path}/data", f"data.answers={tmp_path}/answers"]
    line, _ = refused(prepare, *config, *(f"--set={setting}" for setting in settings))
    assert f"{tmp_path}/answers" in line


def test_prepare_names_the_folder_and_leaves_what_was_there(root, config):
    before = files(root / "data")
    line, _ = refused(prepare, *config, "--set", "data.heldout=2")
    assert f"{root}/data" in line
    assert FULL in line
    assert files(root / "data") == before


def test_the_start_of_a_run_names_its_record(root, config, tmp_path):
    line, result = refused(train, *config, "--set", f"run.folder={tmp_path}/run")
    assert f"{tmp_path}/run/run.json: {FULL}" in line
    assert result.stdout == ""


def test_a_checkpoint_that_cannot_be_saved_ends_the_run_and_says_what_stands(
    root, config, tmp_path
):
    folder = tmp_path / "run"
    room = (root / "run" / "run.json").stat().st_size + 4096
    line, result = refused(train, *config, "--set", f"run.folder={folder}", room=room)
    assert re.search(r"training stopped after step 3: cannot save \S+/step-00000003: ", line)
    assert f"{FULL} (`ulimit -f`) or choose another file system, then run the same command" in line
    assert "could not save the last step: " in result.stderr
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [2, 3]
    assert find_checkpoints(folder / "checkpoints") == []
    again = CliRunner().invoke(train, [*map(str, config), "--set", f"run.folder={folder}"])
    assert again.exit_code == 0, again.output
    assert files(folder / "drafter") == files(root / "run" / "drafter")


@pytest.fixture
def finished(root, config, tmp_path):
    """A copy of the finished run, as ``--set`` names it."""
    shutil.copytree(root / "run", tmp_path / "run", copy_function=shutil.copy2)
    return [*config, "--set", f"run.folder={tmp_path}/run"]


def test_a_run_whose_export_fails_shows_its_table(finished, tmp_path):
    shutil.rmtree(tmp_path / "run" / "drafter")
    line, result = refused(train, *finished)
    assert re.search(rf"Error: {tmp_path}/run/drafter/\S+: {FULL}", line)
    assert line.endswith("(the result stands above)")
    assert "\nsteps " in result.stdout
    assert list((tmp_path / "run" / "drafter").iterdir()) == []
    _, result = refused(train, *finished, "--json")
    assert json.loads(result.stdout)["steps"] == 6


def test_an_export_keeps_the_drafter_that_was_there(finished, tmp_path):
    before = files(tmp_path / "run" / "drafter")
    line, _ = refused(export, *finished)
    assert f"{tmp_path}/run/drafter/model.safetensors: {FULL}" in line
    assert files(tmp_path / "run" / "drafter") == before
    line, _ = refused(export, *finished, "--out", tmp_path / "elsewhere")
    assert f"{tmp_path}/elsewhere/model.safetensors: {FULL}" in line


@pytest.mark.parametrize("command", [train, evaluate], ids=["train", "evaluate"])
@pytest.mark.parametrize("what", ["full", "a folder there", "matplotlib"])
def test_a_picture_that_cannot_be_drawn_costs_no_run(
    finished, tmp_path, monkeypatch, command, what
):
    picture = tmp_path / "run" / "metrics.png"
    picture.unlink()
    if what == "a folder there":
        picture.mkdir()
        # As if it were from before the last checkpoint, so that train draws it again.
        os.utime(picture, (0, 0))
    if what == "matplotlib":

        def fail(*_, **__):
            raise ZeroDivisionError("no axis")

        monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    # evaluate.json is smaller than any picture.
    with full_disk(8192) if what == "full" else contextlib.nullcontext():
        result = CliRunner().invoke(command, [*map(str, finished)])
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stderr.splitlines() if "picture" in line]
    assert line.startswith("no picture of the run: ")
    assert ("ZeroDivisionError: no axis" if what == "matplotlib" else str(picture)) in line


def test_evaluate_shows_what_it_measured(finished, tmp_path):
    line, result = refused(evaluate, *finished)
    assert f"{tmp_path}/run/evaluate.json: {FULL}" in line
    assert line.endswith("(the result stands above)")
    assert "tau" in result.stdout
    _, result = refused(evaluate, *finished, "--json")
    assert json.loads(result.stdout)["prompts"] > 0


def test_the_masks_commands_name_their_files(root, config, tmp_path):
    line, _ = refused(maskgen, "build", *config, "--cache", tmp_path / "new.zarr")
    assert f"cannot write {tmp_path}/new.zarr" in line
    line, result = refused(maskgen, "show", "dflash/ctx32", *config, "--png", tmp_path / "m.png")
    assert f"{tmp_path}/m.png: {FULL}" in line
    assert result.stdout.startswith("dflash/ctx32: ")
    line, _ = refused(maskgen, "report", tmp_path / "r.html", *config)
    assert f"{tmp_path}/r.html: {FULL}" in line
    line, _ = refused(maskgen, "pack", tmp_path / "p.zip", *config)
    assert f"{tmp_path}/p.zip" in line
    line, _ = refused(maskgen, "pull", root / "masks.zarr", "--cache", tmp_path / "pulled.zarr")
    assert f"{tmp_path}/pulled.zarr" in line


def test_a_build_that_cannot_be_made_current_shows_its_table(root, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "zarr.json"))

    monkeypatch.setattr("cache.store.Store.use", fail)
    result = CliRunner().invoke(
        maskgen,
        ["build", "--config", str(root / "run.toml"), "--cache", f"{tmp_path}/m.zarr"],
    )
    assert result.exit_code == 1
    assert "dflash/ctx32" in result.stdout
    (*_, line) = result.stderr.splitlines()
    assert line.startswith(f"Error: {tmp_path}/zarr.json: No space left on device; make room ")
    assert line.endswith("(the result stands above)")
