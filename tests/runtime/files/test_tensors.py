"""Who may read what a run leaves behind: whoever may read the folders around it."""

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from runtime.dflash.folder.saved_drafter import save_published
from runtime.files.tensors import save_tensors
from tests.runtime.tiny_run import build_masks, first_drafter, make_config, make_data, train


@pytest.fixture(params=[0o022, 0o027, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_tensor_file_has_the_mode_of_any_new_file(tmp_path, umask):
    path = tmp_path / "a.safetensors"
    save_tensors({"a": torch.arange(3)}, path, {"format": "pt"})
    assert load_file(path)["a"].tolist() == [0, 1, 2]
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt", "a": "b"}])
def test_strings_of_the_header(tmp_path, metadata):
    path = tmp_path / "a.safetensors"
    tensors = {"b": torch.ones(2, 3, dtype=torch.bfloat16), "a": torch.tensor(7)}
    save_tensors(tensors, path, metadata)
    with safe_open(path, framework="pt") as stream:
        assert (stream.metadata() or {}) == (metadata or {})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        save_tensors({"a": torch.ones(1)}, tmp_path / "none" / "a.safetensors")


def test_whatever_a_run_writes_can_be_read_beside_it(tmp_path, umask):
    config = make_config(tmp_path, train={"steps": 2, "save_every": 1})
    make_data(tmp_path / "data", [20, 24, 30])
    build_masks(config)
    train(config)
    drafter = first_drafter()
    save_published(tmp_path / "drafter", drafter.config, drafter.state_dict())
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in Path(tmp_path).rglob("*")}
    files = {path: mode for path, mode in found.items() if path.is_file()}
    folders = {path: mode for path, mode in found.items() if path.is_dir()}
    assert len([path for path in files if path.suffix == ".safetensors"]) >= 4
    assert {path: oct(m) for path, m in files.items() if m & 0o777 != 0o666 & ~umask} == {}
    assert {path: oct(m) for path, m in folders.items() if m & 0o777 != 0o777 & ~umask} == {}
