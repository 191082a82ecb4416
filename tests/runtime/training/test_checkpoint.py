import errno
import json
import os
import shutil

import pytest
import torch

from runtime.errors import CheckpointError, LaterFormatError
from runtime.files.sealed import json_digest
from runtime.training import saved_state
from runtime.training.checkpoint import (
    check_writable,
    find_checkpoints,
    newest_good,
    own_checkpoints,
    remove_checkpoints,
    save_checkpoint,
)
from runtime.training.saved_state import Checkpoint

UNASKED = {}.__getitem__
"""For a run's own checkpoints nobody asks what differs."""


def latest_state(root, fingerprint="a" * 64, report=print, what_differs=UNASKED):
    """Step and state that a run of this fingerprint goes on from."""
    found = own_checkpoints(
        root, lambda item: item.fingerprint == fingerprint, report, what_differs
    )
    return newest_good(found, lambda item: (item.step, item.load()), report)


def steps(root):
    return [item.step for item in find_checkpoints(root)]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def flip(path, at=-3):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def save(root, step, fingerprint="a" * 64, keep=9):
    state = {"master.fc.weight": torch.full((2, 3), float(step)), "step": torch.tensor(float(step))}
    return save_checkpoint(
        root, state, step=step, fingerprint=fingerprint, published={"block_size": 4}, keep=keep
    )


def test_the_newest_checkpoint_comes_back_as_saved(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    step, state = latest_state(tmp_path)
    assert step == 20
    assert find_checkpoints(tmp_path)[0].published == {"block_size": 4}
    assert torch.equal(state["master.fc.weight"], torch.full((2, 3), 20.0))
    assert state["step"].item() == 20.0


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert [item.step for item in find_checkpoints(tmp_path)] == [4, 3]


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("damaged", ["state.safetensors", "meta.json"])
def test_a_damaged_one_costs_no_older_one_its_place(tmp_path, keep, damaged):
    for step in (10, 20, 90):
        save(tmp_path, step)
    flip(tmp_path / "step-00000090" / damaged)
    # As a process does that has seen none of them.
    saved_state._whole.clear()
    save(tmp_path, 30, keep=keep)
    left = [90, 30, 20, 10][: keep + 1]
    assert names(tmp_path) == [f"step-{step:08d}" for step in reversed(left)]
    assert latest_state(tmp_path)[0] == 30
    # Once there are enough good ones after it, it goes.
    for step in (100, 110):
        save(tmp_path, step, keep=keep)
    assert steps(tmp_path) == [110, 100][:keep]


def test_what_was_damaged_since_this_process_wrote_it_costs_none_its_place(tmp_path):
    for step in (10, 20):
        save(tmp_path, step, keep=2)
    flip(tmp_path / "step-00000020" / "state.safetensors")
    save(tmp_path, 30, keep=2)
    assert steps(tmp_path) == [30, 20, 10]


def test_another_runs_checkpoint_costs_none_its_place(tmp_path):
    save(tmp_path, 90, fingerprint="b" * 64)
    save(tmp_path, 10, keep=1)
    save(tmp_path, 20, keep=1)
    assert steps(tmp_path) == [90, 20]


@pytest.mark.parametrize(
    "damage",
    [
        lambda meta: meta.unlink(),
        lambda meta: meta.write_text(""),
        lambda meta: meta.write_text(meta.read_text()[:-20]),
        lambda meta: meta.write_text("[]"),
        lambda meta: meta.write_text("[" * 100_000),
        lambda meta: meta.write_text(json.dumps({"format": 1, "step": 20})),
        lambda meta: (meta.unlink(), meta.mkdir()),
        lambda meta: meta.parent.rename(meta.parent.with_name("step-00000021")),
    ],
)
def test_a_checkpoint_without_a_whole_meta_is_passed_over_aloud(tmp_path, damage):
    save(tmp_path, 10)
    damage(save(tmp_path, 20) / "meta.json")
    said = []
    assert latest_state(tmp_path, report=said.append)[0] == 10
    (line,) = said
    assert line.startswith(f"passing over a checkpoint: {tmp_path}/step-0000002")
    assert "\n" not in line


def test_every_bit_of_meta_is_seen(tmp_path):
    """Whichever is flipped: refused, passed over aloud, or the same value in other words."""
    save(tmp_path, 10)
    meta = save(tmp_path, 20) / "meta.json"
    data = meta.read_bytes()
    (expected, _) = find_checkpoints(tmp_path)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        meta.write_bytes(flipped)
        said = []
        try:
            found = find_checkpoints(tmp_path, said.append)
        except LaterFormatError:
            continue
        assert (len(found) == 1 and said) or (found[0] == expected and not said)


@pytest.mark.parametrize("version", [4, 5, 1000])
def test_a_checkpoint_of_a_later_release_is_refused_and_kept(tmp_path, version):
    save(tmp_path, 10)
    meta = save(tmp_path, 20) / "meta.json"
    meta.write_text(json.dumps({"format": version, "steps": 20}))
    for look in (find_checkpoints, latest_state):
        with pytest.raises(LaterFormatError, match=rf"{meta} is of format {version}, .* later rel"):
            look(tmp_path)
    save(tmp_path, 30, keep=1)
    assert names(tmp_path) == ["step-00000020", "step-00000030"]


@pytest.mark.parametrize("written", [0, -1, "1", None, 2.0, True, [2]])
def test_what_is_no_format_is_damage(tmp_path, written):
    save(tmp_path, 10)
    meta = save(tmp_path, 20) / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": written}))
    assert steps(tmp_path) == [10]


def test_a_checkpoint_of_before_the_digest_is_read(tmp_path):
    """As releases up to the first wrote it."""
    save(tmp_path, 10)
    meta = tmp_path / "step-00000010" / "meta.json"
    document = json.loads(meta.read_text())
    del document["document_sha256"]
    before = {**document, "drafter": document["published"]}
    del before["published"]
    meta.write_text(json.dumps({**before, "format": 1}, indent=1))
    step, state = latest_state(tmp_path)
    assert step == state["step"].item() == 10
    # Later formats must have it.
    meta.write_text(json.dumps(document, indent=1))
    assert steps(tmp_path) == []


def test_a_reformatted_meta_is_the_same(tmp_path):
    meta = save(tmp_path, 10) / "meta.json"
    document = json.loads(meta.read_text())
    meta.write_text(json.dumps(document, sort_keys=True, indent=7))
    assert steps(tmp_path) == [10]
    assert document.pop("document_sha256") == json_digest(document)


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
    step, state = latest_state(tmp_path, report=said.append)
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
        latest_state(tmp_path, "b" * 64, what_differs=lambda other: f"{other[:4]} of it")


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 10)
    state = {"step": torch.tensor(0.0)}
    save_checkpoint(tmp_path, state, step=10, fingerprint="a" * 64, published={}, keep=2)
    assert set(find_checkpoints(tmp_path)[0].load()) == {"step"}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_a_save_that_fails_while_it_replaces_leaves_the_old_one(tmp_path, monkeypatch):
    save(tmp_path, 10)
    rename = os.rename

    def refuse(source, target):
        if "replaced" not in str(target) and str(target).endswith("step-00000010"):
            monkeypatch.setattr(os, "rename", rename)
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match=r"cannot save .*: No space left .*; make room"):
        save_checkpoint(tmp_path, {}, step=10, fingerprint="a" * 64, published={}, keep=2)
    assert latest_state(tmp_path)[1]["step"].item() == 10
    assert names(tmp_path) == ["step-00000010"]


@pytest.mark.parametrize("place", ["link", "dangling", "plain"])
def test_the_folder_of_checkpoints_may_be_a_link(tmp_path, place):
    root = tmp_path / "run" / "checkpoints"
    root.parent.mkdir()
    if place == "link":
        (tmp_path / "disk").mkdir()
    if place != "plain":
        root.symlink_to(tmp_path / "disk")
    check_writable(root)
    for step in (1, 2, 3):
        save(root, step, keep=2)
    assert latest_state(root)[0] == 3
    (root / "notes.txt").write_text("mine")
    remove_checkpoints(root)
    assert names(root) == ["notes.txt"]
    assert root.is_symlink() == (place != "plain")
    remove_checkpoints(tmp_path / "none")


def test_names_that_are_none_of_a_checkpoint_are_left_alone(tmp_path):
    save(tmp_path, 10)
    for name in ("step-00000010.bak", "step-00000009-mine", "step-5"):
        shutil.copytree(tmp_path / "step-00000010", tmp_path / name)
    save(tmp_path, 20, keep=1)
    assert steps(tmp_path) == [20]
    assert len(names(tmp_path)) == 4


def test_a_folder_that_cannot_be_written_is_refused_before_the_steps(tmp_path):
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "link"):
        if root.name == "link":
            root.symlink_to("/proc/checkpoints")
        with pytest.raises(CheckpointError, match=rf"{root} must take checkpoints: "):
            check_writable(root)
    check_writable(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_read_is_no_empty_one(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/file cannot be read"):
        find_checkpoints(tmp_path / "file")


def test_a_killed_start_over_goes_on_from_the_newest(tmp_path, monkeypatch):
    for step in (10, 20, 30):
        save(tmp_path, step)
    rename = os.rename
    left = 2

    def killed(source, target):
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        remove_checkpoints(tmp_path)
    monkeypatch.undo()
    assert steps(tmp_path) == [30]


def test_checking_reads_what_is_there(tmp_path):
    save(tmp_path, 10)
    (found,) = find_checkpoints(tmp_path)
    Checkpoint.check(found)
    flip(found.folder / "state.safetensors")
    with pytest.raises(CheckpointError, match="is damaged"):
        Checkpoint.check(found)
