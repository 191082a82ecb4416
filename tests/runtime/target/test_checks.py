"""Files of a target that are spoilt, quantised or foreign: the refusal, word by word."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from runtime.target.checks import check_files
from runtime.target.files import find_target
from tests.runtime.target.test_finding import AGAIN, said_by
from tests.runtime.target.test_finding import folder as folder


def header(tensors, size):
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[:7],
        lambda data: struct.pack("<Q", 2**40) + data[8:],
        lambda data: data[:8] + b"x" + data[9:],
        lambda data: header(
            {"a.weight": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, 8
        ),
        lambda data: header(
            {"a.weight": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}}, 8
        ),
        lambda data: header(
            {"a.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}, 8
        ),
    ],
)
def test_spoilt_safetensors_are_told_with_their_size(folder, spoil):
    path = folder / "model.safetensors"
    path.write_bytes(spoil(path.read_bytes()))
    said = said_by(check_files, find_target(folder))
    size = f"{path.stat().st_size:,}"
    assert said.startswith(f"{path}: it is damaged or cut, {size} bytes long (")
    assert said.endswith(f"; {AGAIN}")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_whichever_shard_is_spoilt_is_named(folder, place):
    (folder / "model.safetensors").unlink()
    shards = [folder / f"s{i}.safetensors" for i in range(3)]
    for i, shard in enumerate(shards):
        save_file({f"{i}.weight": torch.ones(2)}, shard)
    index = {"weight_map": {f"{i}.weight": shard.name for i, shard in enumerate(shards)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    check_files(find_target(folder))
    save_file({"q.weight": torch.ones(2, dtype=torch.int8)}, shards[place])
    assert said_by(check_files, find_target(folder)) == (
        f"{shards[place]}: q.weight is I8, quantised, and config.json has no quantization_config; "
        "choose a copy of the model that is not quantised"
    )
    shards[place].write_bytes(b"")
    assert said_by(check_files, find_target(folder)) == f"{shards[place]}: it is empty; {AGAIN}"


@pytest.mark.parametrize(
    ("start", "is_one"), [(b"GGUF", True), (b"FUGG", True), (b"GGU", False), (b"gguf", False)]
)
def test_gguf_files_of_either_order_of_bytes_are_left_to_their_reader(tmp_path, start, is_one):
    path = tmp_path / "a.gguf"
    path.write_bytes(start + b"\3\0\0\0")
    if is_one:
        check_files(find_target(path))
    else:
        assert said_by(check_files, find_target(path)) == f"{path}: it is no GGUF file; {AGAIN}"


def test_scales_beside_weights_are_no_weights(folder):
    """Only what is named a weight must be of floats."""
    path = folder / "model.safetensors"
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        tensors = {
            "a.weight": torch.ones(2, dtype=dtype),
            "a.mask": torch.ones(2, dtype=torch.bool),
        }
        save_file(tensors, path)
        check_files(find_target(folder))
    save_file({"a.b": torch.ones(1), "b.weight": torch.ones(2, dtype=torch.bool)}, path)
    assert "b.weight is BOOL, quantised" in said_by(check_files, find_target(folder))


@pytest.mark.parametrize("method", [None, "gptq", "bitsandbytes"])
def test_a_quantisation_is_read_of_the_text_model_too(folder, method):
    said = {} if method is None else {"quant_method": method}
    for config in ({"quantization_config": said}, {"text_config": {"quantization_config": said}}):
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
        check_files(find_target(folder))


def test_an_adapter_is_refused_with_what_to_do(folder):
    (folder / "adapter_config.json").touch()
    assert said_by(check_files, find_target(folder)) == (
        f"{folder}/adapter_config.json: an adapter lies beside the model; merge it into the "
        "weights, or remove it"
    )
    (folder / "config.json").write_text('{"model_type": "own", "auto_map": {}}')
    (folder / "adapter_config.json").unlink()
    assert said_by(check_files, find_target(folder)) == (
        f"{folder}/config.json: model type 'own' comes with code of its own (auto_map), which is "
        "never run; choose a model that transformers has"
    )
