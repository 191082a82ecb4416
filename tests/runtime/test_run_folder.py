"""What a run says of a folder that holds another run's checkpoints."""

import dataclasses
import errno
import json
import re
from pathlib import Path

import pytest
import torch

from runtime.checkpoint import save_checkpoint
from runtime.errors import CheckpointError, TrainingError
from runtime.run_folder import held, starting_point, write_run_file
from runtime.session import open_session
from tests.runtime.tiny_run import build_masks, make_config, make_data

LENGTHS = [14, 30, 16, 12]


@pytest.fixture
def folder(tmp_path):
    """A run folder with a checkpoint of step 3."""
    make_data(tmp_path / "data", LENGTHS)
    config = make_config(tmp_path)
    build_masks(config)
    session = open_session(config, "run.toml")
    write_run_file(tmp_path / "run", config, session)
    save_checkpoint(
        tmp_path / "run" / "checkpoints",
        {"step": torch.tensor(3.0)},
        step=3,
        fingerprint=session.fingerprint,
        drafter={},
        keep=2,
    )
    return tmp_path / "run"


def resumed(config):
    session = open_session(config, "run.toml")
    return starting_point(Path(config.run.folder), session, config.train.steps, print)


def changed(config):
    """What the refusal names."""
    with pytest.raises(CheckpointError, match=r"another run; changed: .*; use --fresh") as caught:
        resumed(config)
    (found,) = re.findall(r"changed: (.*); use --fresh", str(caught.value))
    return found


def test_reports_and_places_may_change(folder):
    moved = {"devices": "cpu,cpu", "threads": 2}
    config = make_config(folder.parent, run=moved, train={"log_every": 3, "keep": 5})
    step, _ = resumed(config)
    assert step == 3


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"train": {"steps": 7, "log_every": 5}}, "train.steps 6 -> 7"),
        (
            {"train": {"lr": 5e-4}, "target": {"model": "b", "num_features": 3}},
            "target.num_features 5 -> 3, train.lr 0.01 -> 0.0005",
        ),
        (
            {"run": {"seed": 2}, "train": dict.fromkeys(("lr", "beta1", "beta2", "clip"), 0.5)},
            "run.seed 1 -> 2, train.lr 0.01 -> 0.5, train.beta1 0.9 -> 0.5, "
            "train.beta2 0.95 -> 0.5, 1 more",
        ),
    ],
)
def test_settings_that_changed_are_named(folder, sections, expected):
    assert changed(make_config(folder.parent, **sections)) == expected


def test_masks_that_changed_are_named(folder):
    config = make_config(folder.parent, anchors=4)
    build_masks(config)
    before = json.loads((folder / "run.json").read_text())["mask_version"]
    after = open_session(config, "run.toml").mask_version
    expected = f"the masks of context 16, 32 (cache version {before[:12]} -> {after[:12]})"
    assert changed(config) == expected


def test_data_that_changed_are_named(folder):
    make_data(folder.parent / "data", LENGTHS, seed=1)
    config = make_config(folder.parent)
    assert changed(config) == "the prepared data"


@pytest.mark.parametrize(
    "text", [None, "{", "[]", "{}", '{"fingerprint": "of a third run"}', '{"config": 1}']
)
def test_without_a_run_file_of_that_run_the_message_stays_general(folder, text):
    (folder / "run.json").unlink()
    if text is not None:
        (folder / "run.json").write_text(text)
    assert changed(make_config(folder.parent, train={"steps": 7})) == "settings, data or masks"


@pytest.mark.parametrize(
    "broken", [{"config": []}, {"config": {}}, {"masks": 1}, {"masks": {"x": ""}}]
)
def test_a_run_file_of_other_content_is_no_failure(folder, broken):
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | broken))
    assert changed(make_config(folder.parent, train={"steps": 7})) == "settings, data or masks"


@pytest.mark.parametrize("number", ["ENOLCK", "ENOTSUP", "EOPNOTSUPP", "EPERM", "ENOSYS"])
def test_a_file_system_without_locks_is_said_and_trained_on(tmp_path, monkeypatch, capsys, number):
    def refuse(*_arguments):
        raise OSError(getattr(errno, number), "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    with held(str(tmp_path / "run")):
        (tmp_path / "run" / "metrics.jsonl").touch()
    assert (
        "has no locks (no locks here): see that no other process trains" in capsys.readouterr().err
    )


@pytest.mark.timeout(60)
def test_a_folder_that_is_held_is_refused_at_once(tmp_path):
    with held(str(tmp_path / "run")):
        for _ in range(2):
            with pytest.raises(TrainingError, match="another process trains in"):
                held(str(tmp_path / "run")).__enter__()
    with held(str(tmp_path / "run")):
        pass


def test_the_record_of_a_run_holds_no_token(folder, tmp_path):
    config = make_config(tmp_path)
    session = open_session(config, "run.toml")
    masks = {**config.masks, "cache": "https://someone:hidden@host/m.zarr?token=hidden"}
    write_run_file(folder, dataclasses.replace(config, masks=masks), session)
    text = (folder / "run.json").read_text()
    assert "hidden" not in text
    assert json.loads(text)["config"]["masks"]["cache"] == "https://***@host/m.zarr?token=***"
