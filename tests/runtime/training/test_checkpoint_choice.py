"""Which of several checkpoints is found, used, put into place, kept and dropped."""

import os

import pytest
import torch
from safetensors import SafetensorError

from runtime.errors import CheckpointError
from runtime.training import checkpoint
from runtime.training.checkpoint import (
    check_writable,
    find_checkpoints,
    has_checkpoints,
    heal,
    newest_good,
    own_checkpoints,
    remove_checkpoints,
    save_checkpoint,
)
from runtime.training.saved_state import write_checkpoint

OURS, THEIRS = "a" * 64, "b" * 64
UNASKED = {}.__getitem__


def save(root, step, fingerprint=OURS, keep=99, value=None):
    state = {"x": torch.tensor(float(step if value is None else value))}
    return save_checkpoint(root, state, step=step, fingerprint=fingerprint, published={}, keep=keep)


def is_ours(checkpoint):
    return checkpoint.fingerprint == OURS


def damage(folder, name="state.safetensors"):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-2])


def steps(root):
    return [item.step for item in find_checkpoints(root)]


def name(step):
    return f"step-{step:08d}"


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_the_newest_is_that_of_the_largest_number(tmp_path):
    """Not of the last name, nor of the last written."""
    for step in (100_000_000, 9, 99_999_999, 123_456_789):
        assert save(tmp_path, step) == tmp_path / name(step)
    assert steps(tmp_path) == [123_456_789, 100_000_000, 99_999_999, 9]
    save(tmp_path, 10, keep=2)
    assert steps(tmp_path) == [123_456_789, 100_000_000, 10]


def test_of_several_runs_only_the_own_are_gone_on_with(tmp_path):
    for step, run in ((10, OURS), (20, THEIRS), (30, OURS), (40, THEIRS)):
        save(tmp_path, step, run)
    assert [item.step for item in own_checkpoints(tmp_path, is_ours, print, UNASKED)] == [30, 10]
    assert own_checkpoints(tmp_path / "none", is_ours, print, UNASKED) == []


def test_what_differs_is_asked_of_the_newest_of_another_run(tmp_path):
    for step, run in ((10, "c" * 64), (20, THEIRS)):
        save(tmp_path, step, run)
    with pytest.raises(CheckpointError) as caught:
        own_checkpoints(tmp_path, is_ours, print, lambda other: f"{other[:3]} is not yours")
    assert str(caught.value) == (
        f"{tmp_path} holds checkpoints of another run; changed: bbb is not yours; use --fresh to "
        "start over there, or another run.folder"
    )


def test_the_first_that_is_not_refused_is_used_and_no_other_is_tried(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    tried, said = [], []

    def use(item):
        tried.append(item.step)
        if item.step > 20:
            raise CheckpointError(f"{item.step} is damaged")
        return 0

    assert newest_good(find_checkpoints(tmp_path), use, said.append) == 0
    assert tried == [40, 30, 20]
    assert said == [f"passing over a checkpoint: {step} is damaged" for step in (40, 30)]
    assert newest_good([], use, said.append) is None
    assert newest_good(find_checkpoints(tmp_path)[:2], use, said.append) is None


def test_what_is_passed_over_is_said_on_standard_error_unless_told_otherwise(tmp_path, capsys):
    save(tmp_path, 10)
    damage(save(tmp_path, 20), "meta.json")
    (found,) = find_checkpoints(tmp_path)
    damage(found.folder)
    assert newest_good([found], lambda item: item.check()) is None
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"passing over a checkpoint: {tmp_path}/{name(20)}/meta.json is dam")
    assert second.startswith(f"passing over a checkpoint: {tmp_path}/{name(10)}/state.safetensors ")


def test_any_folder_that_is_named_as_one_counts_as_a_checkpoint(tmp_path):
    assert not has_checkpoints(tmp_path / "none")
    for other in (f".{name(10)}.tmp-x", "step-10", "notes"):
        (tmp_path / other).mkdir()
    assert not has_checkpoints(tmp_path)
    damage(save(tmp_path, 20), "meta.json")
    assert has_checkpoints(tmp_path)
    with pytest.raises(OSError, match="Not a directory"):
        has_checkpoints(tmp_path / name(20) / "meta.json")


def left_by_a_killed_save(root, step, *, new=None, old=None, damaged=()):
    """A staging folder with a new checkpoint of some value, and with the one that it replaces."""
    staging = root / f".{name(step)}.tmp-{step}x"
    for which, value in (("new", new), ("old", old)):
        if value is not None:
            folder = (staging if which == "new" else staging / "replaced") / name(step)
            folder.parent.mkdir(parents=True, exist_ok=True)
            state = {"x": torch.tensor(float(value))}
            write_checkpoint(folder, state, step=step, fingerprint=OURS, published={})
            if which in damaged:
                damage(folder)
    staging.mkdir(exist_ok=True)


@pytest.mark.parametrize(
    ("left", "found"),
    [
        ({"new": 1}, 1),
        ({"old": 2}, 2),
        ({"new": 1, "old": 2}, 1),
        ({"new": 1, "old": 2, "damaged": ("new",)}, 2),
        ({"new": 1, "old": 2, "damaged": ("new", "old")}, None),
        ({"new": 1, "damaged": ("new",)}, None),
        ({}, None),
    ],
)
def test_what_a_killed_save_left_whole_is_put_into_place(tmp_path, left, found):
    left_by_a_killed_save(tmp_path, 20, **left)
    heal(tmp_path)
    assert names(tmp_path) == ([] if found is None else [name(20)])
    if found is not None:
        assert find_checkpoints(tmp_path)[0].load()["x"].item() == found


def test_what_is_in_its_place_stays_and_every_leftover_goes(tmp_path):
    left_by_a_killed_save(tmp_path, 10, new=1)
    left_by_a_killed_save(tmp_path, 20, new=1, old=2)
    left_by_a_killed_save(tmp_path, 30, damaged=("new",), new=1)
    # A save heals the folder before it writes; what is of no checkpoint is left alone.
    save(tmp_path, 40)
    assert names(tmp_path) == [name(10), name(20), name(40)]
    (tmp_path / ".notes.tmp-1").mkdir()
    left_by_a_killed_save(tmp_path, 40, new=5)
    assert [item.step for item in own_checkpoints(tmp_path, is_ours, print, UNASKED)] == [
        40,
        20,
        10,
    ]
    assert find_checkpoints(tmp_path)[0].load()["x"].item() == 40
    assert names(tmp_path) == [".notes.tmp-1", name(10), name(20), name(40)]


def test_starting_over_forgets_leftovers_as_well(tmp_path):
    save(tmp_path, 10)
    left_by_a_killed_save(tmp_path, 20, new=1)
    (tmp_path / ".notes.tmp-1").mkdir()
    remove_checkpoints(tmp_path)
    assert names(tmp_path) == [".notes.tmp-1"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_as_many_are_kept_as_were_asked_for_and_those_the_newest(tmp_path, keep):
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep=keep)
    assert steps(tmp_path) == [40, 30, 20, 10][:keep]


def test_what_was_just_saved_stays_even_behind_as_many_as_are_kept(tmp_path):
    for step in (30, 40):
        save(tmp_path, step)
    save(tmp_path, 10, keep=2)
    assert steps(tmp_path) == [40, 30, 10]
    save(tmp_path, 20, keep=2)
    assert steps(tmp_path) == [40, 30, 20]


def test_older_ones_of_another_run_go_once_there_are_enough(tmp_path):
    for step, run in ((10, THEIRS), (20, OURS), (30, THEIRS)):
        save(tmp_path, step, run)
    save(tmp_path, 40, keep=2)
    assert steps(tmp_path) == [40, 30, 20]
    save(tmp_path, 50, keep=2)
    assert steps(tmp_path) == [50, 40]


@pytest.mark.parametrize("error", [SafetensorError("no room"), OSError(5, "Input/output error")])
def test_a_save_that_the_disk_refuses_names_its_checkpoint_and_the_way_on(
    tmp_path, monkeypatch, error
):
    save(tmp_path, 10)

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(checkpoint, "write_checkpoint", refuse)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 20, keep=1)
    assert str(caught.value).startswith(f"cannot save {tmp_path}/{name(20)}: ")
    assert str(caught.value).endswith(
        "then run the same command again: it goes on from the newest checkpoint"
    )
    assert caught.value.__cause__ is error
    assert names(tmp_path) == [name(10)]


def test_an_old_one_that_cannot_be_dropped_does_not_undo_the_save(tmp_path, monkeypatch):
    save(tmp_path, 10)

    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(checkpoint, "_remove", refuse)
    assert save(tmp_path, 20, keep=1) == tmp_path / name(20)
    assert steps(tmp_path) == [20, 10]
    with pytest.raises(CheckpointError, match=rf"^cannot remove {tmp_path}: .*Permission denied"):
        remove_checkpoints(tmp_path)


def test_a_folder_that_may_not_be_written_is_refused_before_the_steps(tmp_path, monkeypatch):
    asked = []

    def access(path, mode):
        asked.append((path, mode))
        return False

    monkeypatch.setattr(os, "access", access)
    check_writable(tmp_path / "none")
    assert asked == []
    with pytest.raises(
        CheckpointError, match=rf"^{tmp_path} must take checkpoints: .*Permission denied"
    ):
        check_writable(tmp_path)
    assert asked == [(tmp_path, os.R_OK | os.W_OK | os.X_OK)]
    # A link that leads nowhere yet names a folder to be made.
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "checkpoints")
    monkeypatch.undo()
    check_writable(tmp_path / "link")
    assert (tmp_path / "disk" / "checkpoints").is_dir()


def test_a_folder_that_cannot_be_healed_must_take_checkpoints(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/file must take checkpoints: "):
        own_checkpoints(tmp_path / "file", is_ours, print, UNASKED)
    with pytest.raises(CheckpointError, match=rf"^cannot save {tmp_path}/file/{name(5)}: "):
        save(tmp_path / "file", 5)
