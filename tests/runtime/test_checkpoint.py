import json

import pytest
import torch

from runtime.checkpoint import find_checkpoints, latest_state, save_checkpoint
from runtime.errors import CheckpointError

UNASKED = {}.__getitem__
"""For a run's own checkpoints nobody asks what differs."""


def save(root, step, fingerprint="a" * 64, keep=9):
    state = {"master.fc.weight": torch.full((2, 3), float(step)), "step": torch.tensor(float(step))}
    return save_checkpoint(
        root, state, step=step, fingerprint=fingerprint, drafter={"block_size": 4}, keep=keep
    )


def test_the_newest_checkpoint_comes_back_as_saved(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    step, state = latest_state(tmp_path, "a" * 64, print, UNASKED)
    assert step == 20
    assert find_checkpoints(tmp_path)[0].drafter == {"block_size": 4}
    assert torch.equal(state["master.fc.weight"], torch.full((2, 3), 20.0))
    assert state["step"].item() == 20.0


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert [item.step for item in find_checkpoints(tmp_path)] == [4, 3]


def test_a_folder_without_meta_is_no_checkpoint(tmp_path):
    save(tmp_path, 10)
    half = save(tmp_path, 20)
    (half / "meta.json").unlink()
    assert latest_state(tmp_path, "a" * 64, print, UNASKED)[0] == 10


@pytest.mark.parametrize("written", [0, 2, "1", None])
def test_a_checkpoint_of_another_format_is_not_taken_for_one_of_this(tmp_path, written):
    save(tmp_path, 10)
    meta = save(tmp_path, 20) / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": written}))
    assert [item.step for item in find_checkpoints(tmp_path)] == [10]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "damaged"),
        (lambda data: data[: len(data) // 2], "damaged"),
        (lambda data: b"", "damaged"),
        (lambda data: data + b"1234", "damaged"),
        (lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], "damaged"),
    ],
)
def test_a_damaged_state_is_refused_by_name(tmp_path, damage, message):
    path = save(tmp_path, 10) / "state.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"state\.safetensors is {message}"):
        find_checkpoints(tmp_path)[0].load()


def test_a_damaged_newest_state_is_passed_over_aloud(tmp_path):
    save(tmp_path, 10)
    path = save(tmp_path, 20) / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    said = []
    step, state = latest_state(tmp_path, "a" * 64, said.append, UNASKED)
    assert step == 10
    assert state["step"].item() == 10.0
    assert "step-00000020" in said[0]


def test_a_missing_state_is_refused(tmp_path):
    (save(tmp_path, 10) / "state.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_checkpoints(tmp_path)[0].load()


def test_another_runs_checkpoints_are_refused_not_overwritten(tmp_path):
    save(tmp_path, 10)
    with pytest.raises(CheckpointError, match=r"another run; changed: aaaa of it; use --fresh"):
        latest_state(tmp_path, "b" * 64, print, lambda other: f"{other[:4]} of it")


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 10)
    state = {"step": torch.tensor(0.0)}
    save_checkpoint(tmp_path, state, step=10, fingerprint="a" * 64, drafter={}, keep=2)
    assert set(find_checkpoints(tmp_path)[0].load()) == {"step"}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
