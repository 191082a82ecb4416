"""The fine-tuned model's folder: whole or not, of this run or not, replaced as a whole."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from runtime.errors import CheckpointError, LaterFormatError
from runtime.files.sealed import seal
from runtime.packed.published import RECORD, check_destination, is_of, read_record, save_model
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


def test_another_model_takes_the_place_and_what_others_put_there_stays(folder):
    (folder / "NOTES.md").write_text("mine")
    (folder / "plots").mkdir()
    (folder / "plots" / "a.png").write_bytes(b"png")
    (folder / "model-00009-of-00009.safetensors").write_bytes(b"of an earlier save")
    record = json.loads((folder / RECORD).read_text())
    record["files"]["model-00009-of-00009.safetensors"] = "0" * 64
    del record["document_sha256"]
    (folder / RECORD).write_bytes(seal(record))
    save_model(folder, target(), weights(0.5), {**RUN, "step": 9})
    assert is_of(folder, {**RUN, "step": 9})
    assert (folder / "NOTES.md").read_text() == "mine"
    assert (folder / "plots" / "a.png").read_bytes() == b"png"
    assert not (folder / "model-00009-of-00009.safetensors").exists()
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


def occupied(where, kind):
    if kind == "a file":
        where.write_text("{}")
    elif kind == "a run":
        (where / "checkpoints").mkdir(parents=True)
    elif kind == "a text":
        where.mkdir()
        (where / "thesis.txt").write_text("years")
    elif kind == "another model":
        tiny_model().save_pretrained(where)
    else:
        (where.parent / "real").mkdir()
        (where.parent / "real" / "thesis.txt").write_text("years")
        where.symlink_to(where.parent / "real")


@pytest.mark.parametrize("kind", ["a file", "a run", "a text", "another model", "a link to a text"])
def test_what_is_no_model_of_ours_is_not_replaced(tmp_path, kind):
    where = tmp_path / "out"
    occupied(where, kind)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="out must be a new or empty folder, or one that"):
        save_model(where, target(), weights(), RUN)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["nothing", "an empty folder", "a link to an empty folder"])
def test_an_empty_place_is_taken(tmp_path, kind):
    where = tmp_path / "new" / "out"
    if kind != "nothing":
        (tmp_path / "new" / "real").mkdir(parents=True)
        where = tmp_path / "new" / "real"
    if kind.startswith("a link"):
        (tmp_path / "link").symlink_to(where)
        where = tmp_path / "link"
    save_model(where, target(), weights(), RUN)
    assert is_of(where, RUN)
    assert where.is_symlink() == kind.startswith("a link")


def test_the_model_that_is_trained_stays_whatever_its_name(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    for where in (folder, tmp_path / "link", tmp_path / "x" / ".." / "model"):
        with pytest.raises(CheckpointError, match="is the model that is trained, which stays"):
            check_destination(where, folder)
    assert check_destination(tmp_path / "link", tmp_path / "other") == folder.resolve()
    assert is_of(folder, RUN)


def test_where_the_new_model_cannot_be_moved_in_the_old_one_is_put_back(folder, monkeypatch):
    def refuse(_source, _target):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("runtime.packed.published.move_folder", refuse)
    with pytest.raises(OSError, match="Input/output"):
        save_model(folder, target(), weights(0.5), {**RUN, "step": 9})
    assert is_of(folder, RUN)
