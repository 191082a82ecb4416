"""Targets whose files are torn, foreign or incomplete: one line that names the file."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from runtime.errors import ConfigError, TargetNotFoundError
from runtime.target.checks import check_files
from runtime.target.files import find_target
from runtime.target.model import Target, outline_target
from runtime.target.reader import resolve_dtype
from tests.runtime.tiny_llama import LAYERS, save_target, tiny_model, tiny_tokenizer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 538090408\n"
PAGE = b"\n<!DOCTYPE html><html><body>Sign in</body></html>"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    save_target(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "target")


def refusal(folder, *, early=False):
    """The line of ``Target.load``; ``early`` where it needs no weights."""
    with pytest.raises(TargetNotFoundError) as caught:
        Target.load(folder)
    if early:
        with pytest.raises(TargetNotFoundError):
            outline_target(folder)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 1000
    return line


def edit(folder, change, name="model.safetensors"):
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, metadata={"format": "pt"})


def set_json(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "it is empty"),
        (POINTER, "git-lfs pointer"),
        (PAGE, "web page"),
        (b"\x00\x01", ""),
        (b"[" * 50_000, ""),
        ("cut", ""),
    ],
)
def test_a_file_that_is_something_else(folder, name, content, what):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-7] if content == "cut" else content)
    line = refusal(folder, early=True)
    assert f"{path}: it" in line
    assert what in line


@pytest.mark.parametrize("name", FILES[1:])
@pytest.mark.parametrize("value", ["[]", "null", "3", '"text"', '[{"a": 1}]'])
def test_a_json_file_without_an_object(folder, name, value):
    (folder / name).write_text(value)
    assert f"{folder / name}: it must hold a JSON object" in refusal(folder, early=True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", '{"model": []}'),
        ("tokenizer.json", '{"version": "1.0"}'),
        ("tokenizer_config.json", '{"tokenizer_class": 7}'),
        ("config.json", '{"model_type": ["llama"]}'),
        ("config.json", '{"model_type": "llama", "hidden_size": "wide"}'),
        ("config.json", '{"model_type": "llama", "num_attention_heads": 0}'),
        ("config.json", '{"model_type": "t5"}'),
        ("config.json", '{"model_type": "no-such-model"}'),
        ("config.json", "{}"),
        ("generation_config.json", '{"eos_token_id": "</s>"}'),
        ("generation_config.json", '{"eos_token_id": [2, "5"]}'),
        ("generation_config.json", '{"eos_token_id": {"a": 1}}'),
        ("generation_config.json", '{"eos_token_id": true}'),
        ("generation_config.json", '{"eos_token_id": [2, 24]}'),
        ("generation_config.json", '{"eos_token_id": -1}'),
    ],
)
def test_an_object_that_is_no_such_file(folder, name, text):
    (folder / name).write_text(text)
    line = refusal(folder, early=True)
    assert str(folder) in line
    assert name.partition(".")[0].partition("_")[0] in line


def test_a_missing_tensor_is_named(folder):
    name = "model.layers.3.mlp.down_proj.weight"
    edit(folder, lambda tensors: tensors.pop(name))
    assert f"its files lack {name};" in refusal(folder)


def test_many_missing_tensors_are_counted(folder):
    def without_a_layer(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            del tensors[name]

    edit(folder, without_a_layer)
    assert "model.layers.2.input_layernorm.weight, " in refusal(folder)
    assert "and 4 more;" in refusal(folder)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_embedding_and_head_must_be_there_unless_they_are_tied(folder, tmp_path, name):
    edit(folder, lambda tensors: tensors.pop(name))
    assert f"lack {name};" in refusal(folder)
    tied = tiny_model(tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "tied")
    tiny_tokenizer().save_pretrained(tmp_path / "tied")
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    target = Target.load(tmp_path / "tied")
    assert torch.equal(target.head_weight, tied.get_input_embeddings().weight)


def test_shapes_that_config_does_not_say(folder):
    set_json(folder / "config.json", intermediate_size=50)
    line = refusal(folder)
    assert "have another shape than config.json says for model.layers.0.mlp.down_proj" in line
    assert "[32, 48] instead of [32, 50]" in line
    assert "and 13 more" in line


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.0.self_attn.k_norm.weight",
        f"model.layers.{LAYERS}.mlp.up_proj.weight",
        "model.norm.bias",
        "lm_head.bias",
    ],
)
def test_a_parameter_that_the_model_would_leave_out(folder, name):
    edit(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    assert f"hold what config.json does not name {name};" in refusal(folder)


def test_tensors_beside_the_layers_are_no_matter(folder):
    extra = {
        f"model.layers.{LAYERS}.mlp.up_proj.weight": torch.ones(4),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.self_attn.k_scale": torch.ones(1),
        "model.layers.0.attn.masked_bias": torch.ones(1),
        "vision_tower.layers.3.weight": torch.ones(4),
        "model.rotary_emb.inv_freq": torch.ones(4),
        "score.weight": torch.ones(2, 32),
    }
    edit(folder, lambda tensors: tensors.update(extra))
    set_json(folder / "config.json", num_nextn_predict_layers=1)
    assert Target.load(folder).num_layers == LAYERS


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_not_finite(folder, value, dtype):
    edit(folder, lambda tensors: tensors["model.layers.4.mlp.up_proj.weight"][3, 5:6].fill_(value))
    with pytest.raises(
        TargetNotFoundError, match=r"1 of its tensors hold NaN .* model.layers.4.ml"
    ):
        Target.load(folder, dtype=dtype)


SCALED = "model.layers.2.mlp.gate_proj.weight"


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn])
def test_quantised_weights_are_not_taken_for_plain_ones(folder, dtype):
    def quantise(tensors):
        tensors[SCALED] = (tensors[SCALED] * 9).to(dtype)
        tensors[f"{SCALED}_scale"] = torch.tensor(1 / 9)

    edit(folder, quantise)
    line = refusal(folder, early=True)
    assert f"model.safetensors: {SCALED} is " in line
    assert "quantised, and config.json has no quantization_config" in line


@pytest.mark.parametrize("within", [(), ("text_config",)])
def test_a_quantisation_that_transformers_passes_over(folder, within):
    said = {"quantization_config": {"quant_method": "modelopt"}}
    for key in within:
        said = {key: said}
    set_json(folder / "config.json", **said)
    assert "weights are quantised by 'modelopt', which" in refusal(folder, early=True)


@pytest.mark.parametrize("method", ["bitsandbytes", "fp8", "mxfp4", "gptq"])
def test_a_quantisation_that_transformers_reads_is_left_to_it(folder, method):
    edit(folder, lambda tensors: tensors.update({SCALED: tensors[SCALED].to(torch.int8)}))
    set_json(folder / "config.json", quantization_config={"quant_method": method})
    check_files(find_target(folder))


def test_floats_of_several_kinds_in_one_file_are_read(folder):
    kinds = [torch.float64, torch.float16, torch.bfloat16, torch.float32]
    edit(
        folder,
        lambda tensors: tensors.update(
            {
                **{name: t.to(kinds[i % 4]) for i, (name, t) in enumerate(tensors.items())},
                "model.layers.0.attn.masked_bias": torch.ones(1, dtype=torch.uint8),
            }
        ),
    )
    assert Target.load(folder).dtype == torch.float32


@pytest.fixture
def sharded(tmp_path):
    folder = tmp_path / "sharded"
    tiny_model().save_pretrained(folder, max_shard_size="40KB")
    tiny_tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def test_shards_are_loaded_and_counted(sharded):
    target = Target.load(sharded)
    expected = tiny_model().state_dict()
    found = target.model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    shard = sorted(sharded.glob("*.safetensors"))[1]
    before = find_target(sharded).digest
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    assert find_target(sharded).digest != before


def test_shards_that_are_not_there_or_torn(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[: len(data) // 2])
    assert f"{shard}: it is damaged or cut, {len(data) // 2:,} bytes long" in refusal(sharded)
    shard.unlink()
    line = refusal(sharded, early=True)
    assert f"index.json: it names 1 files that are not there: {shard.name}" in line


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", ""])
def test_an_index_of_shards_that_is_none(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json: " in refusal(sharded, early=True)


def test_a_pickled_checkpoint_whole_cut_or_foreign(folder):
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    torch.save(tiny_model().state_dict(), path)
    assert Target.load(folder).num_layers == LAYERS
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    assert f"{path}: it is cut, {len(data) - 100:,} bytes long" in refusal(folder, early=True)
    path.write_bytes(b"no pickle")
    assert str(folder) in refusal(folder)


@pytest.mark.parametrize("content", [b"", POINTER, PAGE, b"no model", b"GGUF", b"GGUF\3\0\0\0" * 9])
def test_a_gguf_file_that_is_none(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    said = refusal(path, early=True)
    assert str(path) in said
    if content.startswith(b"GGUF"):
        assert f"{path}, a GGUF file, must be of a causal" in said


def test_code_of_a_model_is_never_run(folder):
    marker = folder / "ran"
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
    own = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": "own.Own"}
    set_json(folder / "config.json", model_type="own", auto_map=own)
    assert "comes with code of its own (auto_map), which is never run" in refusal(
        folder, early=True
    )
    set_json(folder / "config.json", model_type="llama", auto_map=own)
    assert Target.load(folder).num_layers == LAYERS
    assert not marker.exists()


def test_an_adapter_beside_the_model_is_not_passed_over(folder):
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter_config.json: an adapter lies beside the model" in refusal(folder, early=True)


def test_end_tokens_come_from_the_generation_config(folder):
    set_json(folder / "generation_config.json", eos_token_id=[2, 7])
    assert Target.load(folder).eos_token_ids == outline_target(folder).eos_token_ids == {2, 7}
    (folder / "generation_config.json").unlink()
    assert Target.load(folder).eos_token_ids == {2}


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, TypeError, Exception])
def test_whatever_a_reader_raises_becomes_one_line(folder, monkeypatch, error):
    def broken(*args, **options):
        raise error("first\nsecond " + "x" * 5000)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", broken)
    assert f"{error.__name__}: first second xxx" in refusal(folder)


def test_want_of_memory_is_no_fault_of_the_files(folder, monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        Target.load(folder)


def test_missing_reader_names_the_packages(monkeypatch, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")

    def missing(*args, **kwargs):
        raise ImportError("gguf")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", missing)
    with pytest.raises(TargetNotFoundError, match="pip install gguf accelerate"):
        Target.load(tmp_path / "model.gguf")


def test_dtypes():
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype(torch.float16, torch.device("cpu")) == torch.float16
    with pytest.raises(ConfigError, match=r"target\.dtype = 'int8': must be one of"):
        resolve_dtype("int8", torch.device("cpu"))
