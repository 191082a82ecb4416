import fcntl
import importlib.metadata
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from runtime.errors import TargetNotFoundError
from runtime.target import gguf_copy
from runtime.target.files import find_target, read_object
from runtime.target.model import Target
from tests.full_disk import full_disk
from tests.runtime.tiny_llama import tiny_model, tiny_tokenizer


@pytest.fixture
def gguf(tmp_path, monkeypatch):
    """A GGUF file that transformers reads as a tiny Llama; and how often it did."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    read = []
    from_model, from_tokenizer = AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained
    from_config = AutoConfig.from_pretrained

    def model(source, **options):
        if "gguf_file" not in options:
            return from_model(source, **options)
        read.append(options["dtype"])
        packed = tiny_model().to(options["dtype"])
        packed.config.quantization_config = {"quant_method": "gguf"}
        packed.generation_config.eos_token_id = [2, 5]
        nothing = ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs")
        return packed, {what: set() for what in nothing}

    def tokenizer(source, **options):
        return tiny_tokenizer() if "gguf_file" in options else from_tokenizer(source, **options)

    def config(source, **options):
        return tiny_model().config if "gguf_file" in options else from_config(source, **options)

    monkeypatch.setattr(AutoConfig, "from_pretrained", config)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", tokenizer)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return file, read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_load_does_not_read_the_gguf_file(gguf, capsys, dtype):
    file, read = gguf
    first, second = Target.load(file, dtype=dtype), Target.load(file, dtype=dtype)
    assert read == [torch.float32]
    assert capsys.readouterr().err.count("unpacking model.gguf into") == 1
    expected = tiny_model().to(dtype).state_dict()
    for target in (first, second):
        found = target.model.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert target.dtype == dtype
        assert target.eos_token_ids == {2, 5}
        assert target.digest == find_target(file).digest
        assert target.tokenizer.chat_template == tiny_tokenizer().chat_template
        assert target.tokenizer("w3 w9").input_ids == [3, 9]


def flip_the_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("model.safetensors", flip_the_last_byte),
        ("generation_config.json", Path.unlink),
        ("tokenizer.json", lambda path: path.write_text(path.read_text() + " ")),
        (gguf_copy.WHOLE, lambda path: path.write_text("")),
        (gguf_copy.WHOLE, Path.unlink),
    ],
)
def test_a_damaged_copy_is_made_again(gguf, name, spoil):
    file, read = gguf
    Target.load(file)
    (copy,) = (path for path in gguf_copy.copies().iterdir() if path.is_dir())
    spoil(copy / name)
    expected = tiny_model().state_dict()
    for _ in range(2):
        target = Target.load(file)
        assert all(torch.equal(target.model.state_dict()[key], expected[key]) for key in expected)
        assert target.eos_token_ids == {2, 5}
    assert len(read) == 2


def test_another_file_or_another_transformers_has_another_copy(gguf, monkeypatch):
    file, read = gguf
    Target.load(file)
    file.write_bytes(b"GGUF2")
    Target.load(file)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.0.0")
    Target.load(file)
    assert len(read) == len(list(gguf_copy.copies().iterdir())) == 3


def test_a_cache_that_cannot_be_written_costs_time_only(gguf, tmp_path, capsys):
    file, read = gguf
    (tmp_path / "cache").write_text("in the way")
    target = Target.load(file)
    assert torch.equal(target.embed_weight, tiny_model().get_input_embeddings().weight)
    assert read == [torch.float32]
    assert (
        "no copy of model.gguf is kept, so each start unpacks it again" in capsys.readouterr().err
    )


@pytest.mark.parametrize("room", [0, 1024, 4096])
def test_a_full_disk_costs_time_only(gguf, capsys, room):
    file, read = gguf
    with full_disk(room):
        target = Target.load(file)
    assert torch.equal(target.embed_weight, tiny_model().get_input_embeddings().weight)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "no copy" in line]
    assert "File too large: '/" in line
    assert not [path for path in gguf_copy.copies().iterdir() if path.suffix != ".json"]
    before = len(read)
    Target.load(file)
    Target.load(file)
    assert len(read) == before + 1, "the copy is made once there is room"


def test_a_large_file_is_read_where_it_is(gguf, monkeypatch, tmp_path):
    file, read = gguf
    monkeypatch.setattr(gguf_copy, "LARGEST", 3)
    Target.load(file, dtype=torch.bfloat16)
    assert read == [torch.bfloat16]
    assert not (tmp_path / "cache").exists()


def folders():
    return sorted(path for path in gguf_copy.copies().iterdir() if path.is_dir())


def test_a_copy_lies_under_the_files_digest_and_transformers_version(gguf, tmp_path):
    file, _ = gguf
    Target.load(file)
    version = importlib.metadata.version("transformers")
    name = f"{find_target(file).digest[:16]}-transformers-{version}"
    assert folders() == [tmp_path / "cache" / "flex-mask-compiler" / "targets" / name]
    plain = find_target(folders()[0])
    assert (folders()[0] / gguf_copy.WHOLE).read_text() == plain.digest
    assert "quantization_config" not in read_object(folders()[0] / "config.json")


@pytest.mark.parametrize("more", [0, 1])
def test_a_file_of_just_the_largest_size_is_copied(gguf, monkeypatch, more):
    file, _ = gguf
    file.write_bytes(b"GGUF" + bytes(6 + more))
    monkeypatch.setattr(gguf_copy, "LARGEST", 10)
    files = find_target(file)
    copied = gguf_copy.unpacked(files, "mine")
    assert (copied == files) == (more == 1)
    assert (copied.gguf_file is None) == (more == 0)


def test_what_is_no_gguf_file_is_left_as_it_is(gguf, tmp_path):
    tiny_model().save_pretrained(tmp_path / "plain")
    files = find_target(tmp_path / "plain")
    assert gguf_copy.unpacked(files, "mine") is files
    assert not (tmp_path / "cache").exists()


def test_what_killed_processes_left_of_a_copy_goes_and_that_of_others_stays(gguf):
    file, _ = gguf
    Target.load(file)
    (copy,) = folders()
    left = copy.with_name(f".{copy.name}.tmp-abc")
    other = copy.with_name(".another-transformers-1.tmp-abc")
    for folder in (left, other):
        folder.mkdir()
        (folder / "model.safetensors").touch()
    Target.load(file)
    assert left.exists(), "nothing is made, so nothing is swept"
    (copy / gguf_copy.WHOLE).unlink()
    Target.load(file)
    assert folders() == [other, copy]
    assert not left.exists()


def test_without_a_lock_nothing_of_another_process_goes(gguf, monkeypatch):
    file, _ = gguf

    def refuse(*_arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    Target.load(file)
    (copy,) = folders()
    left = copy.with_name(f".{copy.name}.tmp-abc")
    left.mkdir()
    (copy / gguf_copy.WHOLE).unlink()
    Target.load(file)
    assert left.exists()


def test_a_copy_that_another_process_made_meanwhile_is_taken(gguf, tmp_path, monkeypatch):
    file, read = gguf
    Target.load(file)
    (copy,) = folders()
    copy.rename(tmp_path / "made elsewhere")
    flock = fcntl.flock

    def late(descriptor, kind):
        flock(descriptor, kind)
        if not copy.exists():
            (tmp_path / "made elsewhere").rename(copy)

    monkeypatch.setattr(fcntl, "flock", late)
    Target.load(file)
    assert len(read) == 1


def test_a_target_that_cannot_be_read_is_no_fault_of_the_cache(gguf, capsys, monkeypatch):
    file, _ = gguf

    def broken(*args, **options):
        raise RuntimeError("torn")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", broken)
    with pytest.raises(TargetNotFoundError, match="reading gave RuntimeError: torn"):
        Target.load(file)
    assert "no copy" not in capsys.readouterr().err
    assert folders() == []


def test_a_damaged_copy_is_replaced_whole(gguf):
    file, _ = gguf
    Target.load(file)
    (copy,) = folders()
    (copy / "added_tokens.json").write_text("{}")
    (copy / "mine").write_text("left by somebody")
    Target.load(file)
    assert folders() == [copy]
    assert not (copy / "added_tokens.json").exists()
    assert not (copy / "mine").exists()
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]
