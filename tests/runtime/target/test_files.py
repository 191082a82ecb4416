"""Which files of a target count, and that its digest covers every byte of them."""

import shutil

import pytest
from transformers.utils import hub

from runtime.target.files import find_target
from tests.runtime.tiny_llama import save_target

READ = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "source.spm",
    "qwen.tiktoken",
    "tokenizer.v3.json",
    "tekken.json",
    "bpe.codes",
    "additional_chat_templates/tool_use.jinja",
)
UNREAD = (
    "README.md",
    "optimizer.pt",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.safetensors.index.json",
    "consolidated.safetensors",
    "model.fp16.safetensors",
    "model-Q4.gguf",
    "tf_model.h5",
    "trainer_state.json",
    "training_args.bin",
    "own.py",
    "onnx/model.onnx",
    "original/config.json",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    save_target(folder)
    for name in READ:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_text('{"a": 1}')
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "target")


def digest(folder):
    return find_target(folder).digest


@pytest.mark.parametrize("name", READ)
def test_every_byte_of_every_file_that_is_read_counts(folder, name):
    before, path = digest(folder), folder / name
    data = bytearray(path.read_bytes())
    # config.json must stay JSON: a digit becomes another.
    place = data.index(b"256") if name == "config.json" else len(data) // 2
    data[place] ^= 1
    path.write_bytes(data)
    assert digest(folder) != before
    data[place] ^= 1
    path.write_bytes(data)
    assert digest(folder) == before


def test_the_middle_of_large_weights_counts(folder):
    path = folder / "model.safetensors"
    path.write_bytes(bytes(7 << 20))
    before = digest(folder)
    for place in (0, 2 << 20, 3_500_001, (7 << 20) - 1):
        with path.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"x")
        assert digest(folder) != before
        with path.open("r+b") as stream:
            stream.seek(place)
            stream.write(b"\0")
    assert digest(folder) == before


@pytest.mark.parametrize("name", READ[2:])
def test_a_file_that_comes_or_goes_counts(folder, name):
    before = digest(folder)
    (folder / name).unlink()
    assert digest(folder) != before


def test_it_counts_which_file_holds_what(folder):
    before = digest(folder)
    first, second = folder / "vocab.json", folder / "added_tokens.json"
    first.write_text('{"b": 2}')
    changed = digest(folder)
    (folder / "aside").write_bytes(first.read_bytes())
    second.replace(first)
    (folder / "aside").replace(second)
    assert len({before, changed, digest(folder)}) == 3


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_read_does_not_count(folder, name):
    before, path = digest(folder), folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"weight_map": {"a": "gone.safetensors"}}')
    assert digest(folder) == before


def test_what_counts_moves_with_the_weights_that_are_read(folder):
    (folder / "pytorch_model.bin").write_text("other")
    before = digest(folder)
    (folder / "model.safetensors").unlink()
    assert digest(folder) != before
    (folder / "pytorch_model.bin").write_text("others")
    assert digest(folder) != before


def test_the_same_target_elsewhere_has_the_same_digest(folder, tmp_path):
    moved = shutil.copytree(folder, tmp_path / "elsewhere" / "of another name")
    (tmp_path / "link").symlink_to(moved)
    assert digest(folder) == digest(moved) == digest(tmp_path / "link")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF" + bytes(3 << 20))
    assert digest(tmp_path / "a.gguf") == digest(tmp_path / "b.gguf") != digest(folder)


def test_a_hub_name_counts_what_the_load_used(folder, monkeypatch, tmp_path):
    hub_cache = tmp_path / "hub"
    snapshot = hub_cache / "models--some--model" / "snapshots" / "abc123"
    shutil.copytree(folder, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc123")
    real = hub.cached_file
    monkeypatch.setattr(
        "transformers.utils.cached_file",
        lambda name, file: real(name, file, cache_dir=hub_cache, local_files_only=True),
    )
    assert find_target("some/model").digest == digest(folder)
    (snapshot / "model.safetensors").unlink()
    assert find_target("some/model").weights() == ()
    assert find_target("some/model").digest != digest(folder)
