"""The border to transformers: what is passed to it, what is made of its faults, what stays."""

import io
import json
import logging as python_logging
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from runtime.errors import ConfigError, TargetNotFoundError
from runtime.target.files import TargetFiles, find_target
from runtime.target.model import Target
from runtime.target.reader import quiet_transformers, read_model, read_outline, resolve_dtype
from tests.runtime.tiny_llama import LAYERS, save_target, tiny_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    save_target(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "target")


def said_by(call, *args, **options):
    with pytest.raises(TargetNotFoundError) as caught:
        call(*args, **options)
    return str(caught.value)


def change(folder, values):
    path = folder / "model.safetensors"
    tensors = {
        **load_file(path),
        **{key.replace("__", "."): value for key, value in values.items()},
    }
    kept = {key: value for key, value in tensors.items() if value is not None}
    save_file(kept, path, metadata={"format": "pt"})


@pytest.mark.parametrize("hub", [False, True])
def test_no_code_is_trusted_and_no_network_asked_for_files(folder, monkeypatch, hub):
    asked = {}
    for kind in (AutoConfig, AutoTokenizer, AutoModelForCausalLM):
        real = kind.from_pretrained

        def recorded(source, *args, real=real, kind=kind, **options):
            # transformers itself asks for the config once more.
            asked.setdefault(kind.__name__, (source, dict(options)))
            options.pop("local_files_only", None)
            return real(str(folder), *args, **options)

        monkeypatch.setattr(kind, "from_pretrained", recorded)
    files = TargetFiles(folder=folder, gguf_file=None, hub_name="some/model" if hub else None)
    model = read_model(files, read_outline(files, "mine"), CPU, "bfloat16")
    assert model.dtype == torch.bfloat16
    assert asked.keys() == {"AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"}
    for source, options in asked.values():
        assert source == ("some/model" if hub else str(folder))
        assert options["trust_remote_code"] is False
        assert options.get("local_files_only", False) is not hub
        assert "gguf_file" not in options


def test_what_a_hub_name_has_downloaded_is_looked_at(folder):
    """Before there are weights only the rest is; after that they are as those of a folder."""
    files = TargetFiles(folder=folder, gguf_file=None, hub_name=str(folder))
    outline = read_outline(files, "mine")
    change(folder, {"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    assert "quantised, and config.json has no" in said_by(
        read_model, files, outline, CPU, "float32"
    )


@pytest.mark.parametrize(
    ("count", "more"), [(1, ""), (5, ""), (6, " and 1 more"), (7, " and 2 more")]
)
def test_so_many_tensors_are_named_in_order_and_the_others_counted(folder, count, more):
    names = sorted(key for key in load_file(folder / "model.safetensors") if "proj" in key)[:count]
    change(folder, dict.fromkeys(names))
    assert said_by(Target.load, folder) == (
        f"target {str(folder)!r}: its files lack {', '.join(names[:5])}{more}; fetch the model "
        "again, or set config.json right"
    )


@pytest.mark.parametrize(("extra", "index"), [(0, LAYERS), (1, LAYERS + 1), (2, LAYERS + 2)])
def test_layers_behind_the_last_are_passed_over_as_far_as_the_config_says(folder, extra, index):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": extra}))
    if extra:
        change(folder, {f"model.layers.{index - 1}.mlp.up_proj.weight": torch.ones(4)})
        assert Target.load(folder).num_layers == LAYERS
    name = f"model.layers.{index}.mlp.up_proj.weight"
    change(folder, {name: torch.ones(4)})
    assert f"hold what config.json does not name {name};" in said_by(Target.load, folder)


def test_the_tensors_that_are_not_finite_are_counted_and_the_first_named(folder):
    bad = torch.tensor([float("inf")] * 32)
    change(folder, {"model.norm.weight": bad})
    change(folder, {"model.layers.3.input_layernorm.weight": -bad})
    assert said_by(Target.load, folder) == (
        f"target {str(folder)!r}: 2 of its tensors hold NaN or infinity, first "
        "model.layers.3.input_layernorm.weight; fetch the model again"
    )


@pytest.mark.parametrize(
    ("ends", "is_one"),
    [
        (0, True), (23, True), ([0, 23], True), ([], True), (None, True), (24, False), (-1, False),
        ([2, 24], False), ([-1, 2], False), (2.0, False), ([True], False),
    ],
)  # fmt: skip
def test_end_tokens_are_rows_of_the_embedding(folder, ends, is_one):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": ends}))
    if is_one:
        given = ends if isinstance(ends, list) else [ends] * (ends is not None)
        assert read_outline(find_target(folder), "mine").eos_token_ids == {2, *given}
    else:
        assert said_by(read_outline, find_target(folder), "mine") == (
            f"{path}: eos_token_id must be token ids below 24, found {ends!r}; fetch the file again"
        )


@pytest.mark.parametrize(("length", "shown"), [(300, "x" * 300), (301, "x" * 300 + " ...")])
def test_a_long_fault_is_cut(folder, monkeypatch, length, shown):
    def broken(*args, **options):
        raise KeyError2("x" * length)

    class KeyError2(Exception):
        pass

    monkeypatch.setattr(AutoConfig, "from_pretrained", broken)
    assert said_by(read_outline, find_target(folder), "mine") == (
        f"target 'mine': config.json in {folder} must be of a causal language model that "
        f"transformers loads, without code of its own, and reading gave KeyError2: {shown}; fetch "
        "the model again or choose another one"
    )


@pytest.mark.parametrize(
    ("kind", "what"),
    [(AutoConfig, "config.json in"), (AutoTokenizer, "the tokenizer in"),
     (AutoModelForCausalLM, "the weights in")],
)  # fmt: skip
def test_what_could_not_be_read_is_named(folder, monkeypatch, kind, what):
    def broken(*args, **options):
        raise OSError("torn")

    monkeypatch.setattr(kind, "from_pretrained", broken)
    said = said_by(Target.load, folder)
    assert said.startswith(f"target {str(folder)!r}: {what} {folder} must be of a causal")


@pytest.mark.parametrize(
    ("message", "advice"),
    [("No module named 'tiktoken'", "what it names"), ("needs GGUF", "gguf accelerate")],
)
def test_a_package_that_is_missing_is_named(folder, monkeypatch, message, advice):
    def missing(*args, **options):
        raise ImportError(message)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", missing)
    assert said_by(read_outline, find_target(folder), "mine") == (
        f"target 'mine' needs packages that are not installed (ImportError: {message}); run: pip "
        f"install {advice}"
    )


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_what_is_no_fault_of_the_files_goes_through(folder, monkeypatch, error):
    def full(*args, **options):
        raise error

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", full)
    with pytest.raises(error):
        read_outline(find_target(folder), "mine")


@pytest.mark.parametrize("bars", [True, False])
@pytest.mark.parametrize("terminal", [True, False])
def test_transformers_is_quiet_for_so_long_and_then_as_before(monkeypatch, bars, terminal):
    class Stream(io.StringIO):
        def isatty(self):
            return terminal

    stream = Stream()
    monkeypatch.setattr(sys, "stderr", stream)
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if bars else logging.disable_progress_bar)()
    logging.set_verbosity(python_logging.DEBUG)
    try:
        for fault in (None, ZeroDivisionError()):
            try:
                with quiet_transformers():
                    assert logging.get_verbosity() == python_logging.ERROR
                    assert logging.is_progress_bar_enabled() == (bars and terminal)
                    print("a bar", file=sys.stderr)
                    if fault is not None:
                        raise fault
            except ZeroDivisionError:
                pass
            assert sys.stderr is stream
            assert logging.get_verbosity() == python_logging.DEBUG
            assert logging.is_progress_bar_enabled() == bars
        assert stream.getvalue() == ("a bar\n" * 2 if terminal else "")
    finally:
        logging.set_verbosity(before[0])
        (logging.enable_progress_bar if before[1] else logging.disable_progress_bar)()


def test_dtypes_of_a_run():
    for device in ("cpu", "cuda", "meta"):
        for name in ("float32", "bfloat16"):
            assert resolve_dtype(name, torch.device(device)) == getattr(torch, name)
    assert resolve_dtype("auto", torch.device("meta")) == torch.bfloat16
    for name in ("int8", "float16", "", "Float32"):
        with pytest.raises(ConfigError) as caught:
            resolve_dtype(name, CPU)
        assert str(caught.value) == (
            f"target.dtype = {name!r}: must be one of auto, float32, bfloat16"
        )


def test_the_outline_is_on_no_device_and_has_the_folders_tokenizer(folder):
    outline = read_outline(find_target(folder), "mine")
    assert {parameter.device.type for parameter in outline.model.parameters()} == {"meta"}
    assert outline.name == "mine"
    assert outline.tokenizer.get_vocab() == tiny_tokenizer().get_vocab()
    assert torch.empty(1).device.type == "cpu"


def test_tensors_that_the_config_does_not_name_come_by_name(folder):
    names = [f"model.layers.{LAYERS + i}.mlp.up_proj.weight" for i in (2, 0, 1)]
    change(folder, {name: torch.ones(4) for name in names})
    said = said_by(Target.load, folder)
    assert f"hold what config.json does not name {', '.join(sorted(names))};" in said
