"""The fine-tuned model's folder: whole or not, of this run or not, replaced as a whole."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.errors import CheckpointError, LaterFormatError
from runtime.packed.published import RECORD, is_of, read_record, save_model
from runtime.target.model import Target
from tests.runtime.tiny_llama import tiny_model, tiny_tokenizer

RUN = {"fingerprint": "a" * 64, "step": 3}


def target():
    return Target(tiny_model(), tiny_tokenizer(), name="tiny")


def weights(value=None):
    found = {name: weight.detach().clone() for name, weight in tiny_model().named_parameters()}
    return found if value is None else {k: torch.full_like(w, value) for k, w in found.items()}


@pytest.fixture
def folder(tmp_path):
    return save_model(tmp_path / "model", target(), weights(), RUN)


def test_transformers_loads_the_weights_in_bfloat16_and_the_tokenizer(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    wanted = weights()
    for name, weight in model.named_parameters():
        assert torch.equal(weight.float(), wanted[name].bfloat16().float()), name
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoTokenizer.from_pretrained(folder)("w3 w4").input_ids == [3, 4]
    assert is_of(folder, RUN)
    assert not is_of(folder, {**RUN, "step": 4})


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", RECORD])
@pytest.mark.parametrize("how", ["flipped", "short", "gone"])
def test_a_damaged_folder_is_of_no_run(folder, name, how):
    path = folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data if how == "flipped" else data[:-1])
    assert read_record(folder) is None
    assert not is_of(folder, RUN)


def test_a_folder_without_a_record_is_of_no_run(tmp_path):
    assert read_record(tmp_path / "none") is None
    tiny_model().save_pretrained(tmp_path / "plain")
    assert not is_of(tmp_path / "plain", RUN)


def test_a_folder_of_a_later_release_says_so(folder):
    (folder / RECORD).write_text('{"format": 2}')
    with pytest.raises(LaterFormatError, match="is of format 2"):
        read_record(folder)
    assert not is_of(folder, RUN)


def test_another_model_takes_the_place_of_the_whole_folder(folder):
    (folder / "left.txt").write_text("of another time")
    save_model(folder, target(), weights(0.5), {**RUN, "step": 9})
    assert is_of(folder, {**RUN, "step": 9})
    assert not (folder / "left.txt").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert all(bool((weight == 0.5).all()) for weight in model.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, "must be the .* parameters of 'tiny'; 1 differ, first model"),
        ({"other": torch.ones(1)}, "1 differ, first other"),
        ({"model.norm.weight": torch.ones(1)}, "1 differ, first model.norm.weight"),
        ({"model.norm.weight": torch.full((32,), torch.nan)}, "must be finite, and model.norm"),
    ],
)
def test_weights_that_are_not_the_models_leave_what_is_there(folder, change, message):
    given = {k: v for k, v in {**weights(), **change}.items() if v is not None}
    with pytest.raises(CheckpointError, match=message):
        save_model(folder, target(), given, {**RUN, "step": 9})
    assert is_of(folder, RUN)


def test_a_full_disk_leaves_what_is_there(folder, monkeypatch):
    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save_model(folder, target(), weights(0.5), {**RUN, "step": 9})
    assert is_of(folder, RUN)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
