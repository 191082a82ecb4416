"""Folders of earlier formats, written by the releases of then, are read forever."""

import shutil
from pathlib import Path

import pytest
import torch

from runtime.data.dataset import Dataset, Sample, open_splits, write_dataset
from runtime.data.folder import read_meta
from runtime.errors import DatasetError
from runtime.training.checkpoint import find_checkpoints, save_checkpoint

GOLDEN = Path(__file__).parent / "golden" / "format1"
META = {
    "features": "stored",
    "context": 16,
    "layer_ids": [1, 3],
    "feature_scale": [0.5, 2.0],
    "target": {"name": "tiny", "digest": "d" * 64},
}


@pytest.fixture
def golden(tmp_path):
    """A copy, for some tests write there."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


def samples(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        Sample(
            input_ids=torch.randint(50, (length,), generator=generator).int(),
            loss_mask=(torch.arange(length) >= 3).byte(),
            prompt_len=3,
            features=torch.randn(length, 16, generator=generator),
        )
        for length in lengths
    ]


def test_a_checkpoint(golden):
    root = golden / "checkpoints"
    (found,) = find_checkpoints(root)
    assert (found.step, found.fingerprint) == (10, "a" * 64)
    assert found.published == {"block_size": 4, "feature_scale": [0.5, 2.0]}
    state = found.load()
    assert state["step"].item() == 10.0
    assert torch.equal(state["master.fc.weight"], torch.full((2, 3), 10.0))
    # It counts as good beside those of now.
    save_checkpoint(root, state, step=20, fingerprint="a" * 64, published={}, keep=2)
    save_checkpoint(root, state, step=30, fingerprint="a" * 64, published={}, keep=2)
    assert [item.step for item in find_checkpoints(root)] == [30, 20]


def test_a_checkpoint_of_format_2_which_called_what_is_published_a_drafter(tmp_path):
    root = shutil.copytree(GOLDEN.parent / "format2" / "checkpoints", tmp_path / "checkpoints")
    (found,) = find_checkpoints(root)
    assert (found.step, found.fingerprint) == (20, "a" * 64)
    assert found.published == {"block_size": 4, "feature_scale": [0.5, 2.0]}
    assert torch.equal(found.load()["master.fc.weight"], torch.full((2, 3), 20.0))


def test_data(golden):
    train, heldout = open_splits(golden / "data")
    for found, lengths, seed in ((train, [5, 9], 0), (heldout, [6], 1)):
        assert found.lengths == lengths
        for i, expected in enumerate(samples(lengths, seed)):
            sample = found.sample(i)
            assert torch.equal(sample.input_ids, expected.input_ids)
            assert torch.equal(sample.features, expected.features.bfloat16())
    # What a run's fingerprint is made of is as it was.
    meta = dict(train.meta)
    assert meta.pop("sha256").keys() == {
        f"{split}{kind}.safetensors" for split in ("train", "heldout") for kind in ("", ".features")
    }
    assert meta == {"format": 1, **META}


def test_damaged_data(golden):
    path = golden / "data" / "train.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DatasetError, match=r"/train\.safetensors is not the file"):
        Dataset.open(golden / "data", "train")


def test_data_that_are_written_anew_leave_none_of_the_old_files(golden):
    write_dataset(golden / "data", {"train": samples([7], 2), "heldout": []}, META)
    assert Dataset.open(golden / "data", "train").lengths == [7]
    assert read_meta(golden / "data")["format"] == 2
    assert len(list((golden / "data").iterdir())) == 4
