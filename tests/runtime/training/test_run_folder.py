"""What a run says of a folder that holds another run's checkpoints."""

import dataclasses
import errno
import json
import re
from pathlib import Path

import pytest
import torch

from runtime.errors import BucketMissingError, CheckpointError, LaterFormatError, TrainingError
from runtime.training.checkpoint import save_checkpoint
from runtime.training.run_folder import starting_point, taken, write_run_file
from tests.runtime.tiny_run import build_masks, inputs_of, make_config, make_data

LENGTHS = [14, 30, 16, 12]


@pytest.fixture
def folder(tmp_path):
    """A run folder with a checkpoint of step 3."""
    make_data(tmp_path / "data", LENGTHS)
    config = make_config(tmp_path)
    build_masks(config)
    session = inputs_of(config, "run.toml")
    write_run_file(tmp_path / "run", config, session)
    save_checkpoint(
        tmp_path / "run" / "checkpoints",
        {"step": torch.tensor(3.0)},
        step=3,
        fingerprint=session.fingerprint,
        published={},
        keep=2,
    )
    return tmp_path / "run"


def resumed(config):
    session = inputs_of(config, "run.toml")
    return starting_point(Path(config.run.folder), session, print)


def changed(config):
    """What the refusal names."""
    with pytest.raises(CheckpointError, match=r"another run; changed: .*; use --fresh") as caught:
        resumed(config)
    (found,) = re.findall(r"changed: (.*); use --fresh", str(caught.value))
    return found


def test_reports_and_places_may_change(folder):
    moved = {"devices": "cpu,cpu", "threads": 2}
    config = make_config(folder.parent, run=moved, train={"log_every": 3, "keep": 5})
    found, state = resumed(config)
    assert found.step == state["step"].item() == 3


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"train": {"gamma": 7.0, "log_every": 5}}, "train.gamma 4.0 -> 7.0"),
        ({"train": {"gamma": 7.0, "steps": 7}}, "train.gamma 4.0 -> 7.0"),
        (
            {"train": {"lr": 5e-4}, "target": {"model": "b"}, "drafter": {"num_layers": 3}},
            "train.lr 0.01 -> 0.0005, drafter.num_layers 4 -> 3",
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
    after = inputs_of(config, "run.toml").mask_version
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
    assert changed(make_config(folder.parent, train={"gamma": 7.0})) == "settings, data or masks"


def test_every_bit_of_the_run_file_is_seen(folder):
    path, config = folder / "run.json", make_config(folder.parent, train={"gamma": 7.0})
    data, expected = path.read_bytes(), changed(config)
    session = inputs_of(config, "run.toml")
    # All would take a minute.
    for bit in range(0, 8 * len(data), 29):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        said = []
        with pytest.raises((CheckpointError, LaterFormatError)) as caught:
            starting_point(folder, session, said.append)
        seen = f"passing over the record of the last run: {path} is damaged" in "".join(said)
        assert seen or caught.type is LaterFormatError or expected in str(caught.value)


def test_a_run_file_of_a_later_release_is_refused(folder):
    (folder / "run.json").write_text('{"format": 3}')
    with pytest.raises(LaterFormatError, match=r"run\.json is of format 3, .*--fresh"):
        resumed(make_config(folder.parent))


def test_a_run_file_of_before_the_digest_is_read(folder):
    record = json.loads((folder / "run.json").read_text())
    del record["format"], record["document_sha256"]
    (folder / "run.json").write_text(json.dumps(record, indent=1))
    assert changed(make_config(folder.parent, train={"gamma": 7.0})) == "train.gamma 4.0 -> 7.0"


def test_where_no_checkpoint_can_be_used_that_is_told(folder):
    config = make_config(folder.parent)
    session = inputs_of(config, "run.toml")
    (folder / "checkpoints" / "step-00000003" / "state.safetensors").write_bytes(b"")
    said = []
    assert starting_point(folder, session, said.append) is None
    assert "passing over a checkpoint" in said[0]
    assert said[1] == f"no checkpoint in {folder}/checkpoints can be used: starting at step 1"
    assert starting_point(folder.parent / "none", session, said.append) is None
    assert len(said) == 2


@pytest.mark.parametrize(
    "broken", [{"config": []}, {"config": {}}, {"masks": 1}, {"masks": {"x": ""}}]
)
def test_a_run_file_of_other_content_is_no_failure(folder, broken):
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | broken))
    assert changed(make_config(folder.parent, train={"gamma": 7.0})) == "settings, data or masks"


@pytest.mark.parametrize("number", ["ENOLCK", "ENOTSUP", "EOPNOTSUPP", "EPERM", "ENOSYS"])
def test_a_file_system_without_locks_is_said_and_trained_on(tmp_path, monkeypatch, capsys, number):
    def refuse(*_arguments):
        raise OSError(getattr(errno, number), "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    with taken(str(tmp_path / "run")):
        (tmp_path / "run" / "metrics.jsonl").touch()
    assert (
        "has no locks (no locks here): see that no other process trains" in capsys.readouterr().err
    )


@pytest.mark.timeout(60)
def test_a_folder_that_is_held_is_refused_at_once(tmp_path):
    with taken(str(tmp_path / "run")):
        for _ in range(2):
            with pytest.raises(TrainingError, match="another process trains in"):
                taken(str(tmp_path / "run")).__enter__()
    with taken(str(tmp_path / "run")):
        pass


def test_the_record_of_a_run_holds_no_token(folder, tmp_path):
    config = make_config(tmp_path)
    session = inputs_of(config, "run.toml")
    masks = {**config.masks, "cache": "https://someone:hidden@host/m.zarr?token=hidden"}
    write_run_file(folder, dataclasses.replace(config, masks=masks), session)
    text = (folder / "run.json").read_text()
    assert "hidden" not in text
    assert json.loads(text)["config"]["masks"]["cache"] == "https://***@host/m.zarr?token=***"


def test_masks_of_one_version_are_told_by_their_digests(folder):
    """Two entries of one build, as where ``train.masks`` stays and the entries trade names."""
    config = make_config(folder.parent)
    record = json.loads((folder / "run.json").read_text())
    del record["document_sha256"], record["format"]
    record["masks"]["16"] = "ab" * 32
    (folder / "run.json").write_text(json.dumps(record))
    save_checkpoint(
        folder / "checkpoints",
        {"step": torch.tensor(4.0)},
        step=4,
        fingerprint="f" * 64,
        published={},
        keep=1,
    )
    record["fingerprint"] = "f" * 64
    (folder / "run.json").write_text(json.dumps(record))
    now = inputs_of(config, "run.toml").shaping["masks"]["16"]
    assert changed(config).startswith(f"the masks of context 16 (16: {'ab' * 6} -> {now[:12]})")
    assert "->" not in changed(config).partition(")")[2]


def test_keys_at_their_defaults_are_told_by_value(folder):
    settings = {"train": {"distill_share": 1.0}, "drafter": {"layers": ["full"] * 4}}
    assert changed(make_config(folder.parent, **settings)) == (
        'train.distill_share 0.9 -> 1.0, drafter.layers [] -> ["full", "full", "full", "full"]'
    )


def eighths(context):
    """The windows that were the defaults of November 2026."""
    return {
        "answer_starts": [0, context // 8, context // 4, context // 2],
        "answer_ends": [context * 5 // 8, context * 3 // 4, context * 7 // 8, context],
    }


def written_out(config, contexts):
    """The run file with one entry of layouts for each context, with these windows."""
    layouts, *others = config.masks["entry"]
    ours = [{**layouts, "context": context, **eighths(context)} for context in contexts]
    return dataclasses.replace(config, masks={**config.masks, "entry": [*ours, *others]})


def test_a_run_with_the_windows_of_before_is_told_what_to_write_and_goes_on(tmp_path):
    """Its run file leaves them out, so that it asks for the windows of today."""
    contexts = (40, 24)
    make_data(tmp_path / "data", [14, 38, 22, 12, 33])
    config = make_config(tmp_path, contexts=contexts)
    before = written_out(config, contexts)
    build_masks(before)
    session = inputs_of(before)
    write_run_file(tmp_path / "run", config, session)
    save_checkpoint(
        tmp_path / "run" / "checkpoints",
        {"step": torch.tensor(3.0)},
        step=3,
        fingerprint=session.fingerprint,
        published={},
        keep=2,
    )
    with pytest.raises(BucketMissingError) as missing:
        inputs_of(config)
    build_masks(config)
    for said in (str(missing.value), changed(config)):
        for context in contexts:
            lines = ", ".join(f"{key} = {value}" for key, value in eighths(context).items())
            assert f"dflash/ctx{context}: {lines}" in said
        assert "write a [[masks.entry]] for each context, with these lines" in said
    found, _ = resumed(before)
    assert found.step == 3


def test_a_run_that_asked_for_other_masks_is_told_nothing_to_write(folder):
    config = make_config(folder.parent, anchors=3)
    with pytest.raises(BucketMissingError) as missing:
        inputs_of(config)
    build_masks(config)
    assert "answer_starts = " not in str(missing.value) + changed(config)
