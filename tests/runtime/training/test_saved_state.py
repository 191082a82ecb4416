"""One saved state by itself: what its files say, what is refused, and what is read how often."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime.errors import CheckpointError, LaterFormatError
from runtime.files.sealed import seal
from runtime.training import saved_state
from runtime.training.saved_state import Checkpoint, folder_name, read_checkpoint, write_checkpoint

DRAFTER = {"block_size": 4, "feature_scale": [0.5, 2.0]}


def write(root, step=12, **state):
    folder = root / folder_name(step)
    write_checkpoint(
        folder, state or {"x": torch.ones(3)}, step=step, fingerprint="f" * 64, published=DRAFTER
    )
    return folder


def rewrite(folder, **changes):
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    del meta["document_sha256"]
    kept = {key: value for key, value in {**meta, **changes}.items() if value != "missing"}
    path.write_bytes(seal(kept))


@pytest.fixture
def digests(monkeypatch):
    """Files that are read whole, by a process that has seen none."""
    found, real = [], saved_state.sha256_of_file

    def sha256_of_file(path):
        found.append(Path(path))
        return real(path)

    monkeypatch.setattr(saved_state, "sha256_of_file", sha256_of_file)
    monkeypatch.setattr(saved_state, "_whole", set())
    return found


@pytest.mark.parametrize(
    ("step", "name"),
    [(0, "step-00000000"), (99999999, "step-99999999"), (123456789, "step-123456789")],
)
def test_a_folder_is_named_by_its_step(step, name):
    assert folder_name(step) == name


def test_a_checkpoint_says_what_it_is_of(tmp_path):
    folder = write(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["meta.json", "state.safetensors"]
    sha256 = hashlib.sha256((folder / "state.safetensors").read_bytes()).hexdigest()
    assert read_checkpoint(folder) == Checkpoint(folder, 12, "f" * 64, sha256, DRAFTER)
    meta = json.loads((folder / "meta.json").read_text())
    del meta["document_sha256"]
    assert meta == {
        "format": 3,
        "step": 12,
        "fingerprint": "f" * 64,
        "published": DRAFTER,
        "sha256": sha256,
    }


def test_views_are_written_whole_and_in_their_dtypes(tmp_path):
    flat = torch.arange(12.0)
    state = {"turned": flat.view(3, 4).T, "part": flat[2:5], "half": flat.bfloat16(), "n": flat[7]}
    found = read_checkpoint(write(tmp_path, **state)).load()
    assert set(found) == set(state)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == tensor.dtype
    assert load_file(tmp_path / "step-00000012" / "state.safetensors").keys() == state.keys()


def test_a_folder_that_is_there_is_not_written_over(tmp_path):
    folder = write(tmp_path)
    with pytest.raises(FileExistsError):
        write(tmp_path, y=torch.zeros(1))
    assert set(read_checkpoint(folder).load()) == {"x"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": "missing"}, "it must say 'step'"),
        ({"fingerprint": "missing"}, "it must say 'fingerprint'"),
        ({"sha256": "missing"}, "it must say 'sha256'"),
        ({"published": "missing"}, "it must say 'published'"),
        ({"step": "twelve"}, "it must say invalid literal"),
        ({"step": None}, r"it must say int\(\) argument"),
        ({"published": 5}, "it must say 'int' object is not iterable"),
        ({"published": "abc"}, "it must say dictionary update"),
    ],
)
def test_a_meta_that_says_too_little_is_named(tmp_path, changes, said):
    folder = write(tmp_path)
    rewrite(folder, **changes)
    with pytest.raises(CheckpointError, match=rf"^{folder}/meta\.json is damaged: {said}"):
        read_checkpoint(folder)


def test_a_meta_of_another_step_than_its_folder_is_damage(tmp_path):
    folder = write(tmp_path)
    rewrite(folder, step=13)
    with pytest.raises(CheckpointError, match=rf"^{folder} is damaged: it holds step 13$"):
        read_checkpoint(folder)


def test_a_meta_that_is_not_there_or_of_a_later_release_is_named(tmp_path):
    with pytest.raises(
        CheckpointError, match=rf"^{tmp_path}/meta\.json cannot be read \(No such file"
    ):
        read_checkpoint(tmp_path)
    folder = write(tmp_path)
    rewrite(folder, format=4)
    with pytest.raises(
        LaterFormatError, match=r"start over with --fresh, or in another run\.folder$"
    ):
        read_checkpoint(folder)


def test_a_state_that_another_stands_for_is_named_by_both_digests(tmp_path):
    folder = write(tmp_path)
    other = write(tmp_path, 13, x=torch.zeros(3))
    digests = [read_checkpoint(item).sha256[:12] for item in (folder, other)]
    shutil.copy(other / "state.safetensors", folder / "state.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(folder).check()
    assert str(caught.value) == (
        f"{folder}/state.safetensors is damaged: its SHA-256 must be {digests[0]}..., found "
        f"{digests[1]}..."
    )


def test_a_state_whose_digest_is_right_and_that_is_none_is_named(tmp_path):
    """As where a disk refuses between the check and the read, or another program wrote it."""
    folder = write(tmp_path)
    (folder / "state.safetensors").write_bytes(b"no tensors")
    rewrite(folder, sha256=hashlib.sha256(b"no tensors").hexdigest())
    found = read_checkpoint(folder)
    found.check()
    with pytest.raises(CheckpointError, match=rf"^{folder}/state\.safetensors cannot be read: "):
        found.load()


def test_a_disk_that_refuses_after_the_check_is_named(tmp_path, monkeypatch):
    found = read_checkpoint(write(tmp_path))

    def refuse(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(saved_state, "load_file", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be read: .*Input/output error"):
        found.load()


def test_a_state_is_read_whole_once_and_again_only_when_it_was_touched(tmp_path, digests):
    folder = write(tmp_path)
    path = folder / "state.safetensors"
    assert digests == [path]
    # Written by this process, and then moved: it is still the same file.
    for _ in range(2):
        read_checkpoint(folder).check()
    folder = folder.rename(tmp_path / "moved")
    Checkpoint(folder, 12, "f" * 64, "0" * 64, {}).check()
    assert digests == [path]
    # Found by another process: read once.
    saved_state._whole.clear()
    folder = folder.rename(tmp_path / "step-00000012")
    for _ in range(2):
        read_checkpoint(folder).check()
    assert digests == [path, path]
    path.write_bytes(path.read_bytes())
    read_checkpoint(folder).check()
    assert digests == [path, path, path]


def test_what_was_found_damaged_is_not_taken_for_whole_later(tmp_path, digests):
    folder = write(tmp_path)
    path = folder / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):
        with pytest.raises(CheckpointError, match="is damaged"):
            read_checkpoint(folder).check()
