import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from runtime.chat import check_messages
from runtime.config import parse_config
from runtime.dataset import Dataset
from runtime.errors import ConfigError
from runtime.prepare import largest_context, main
from runtime.target import Target
from tests.runtime.tiny_text import byte_target

EXAMPLES = Path(__file__).parents[2] / "examples" / "prompts.jsonl"


OWN = {
    "name": "dflash",
    "family": "dflash",
    "kind": "layouts",
    "anchors": 4,
    "draft_block_size": 4,
}
ENTRY = ", ".join(f"{key} = {json.dumps(value)}" for key, value in OWN.items())


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    target = byte_target()
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run(tmp_path, target_folder):
    lines = [{"prompt": f"question {i}"} for i in range(8)]
    lines += [{"messages": []}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.toml").write_text(
        f"""
[run]
devices = "cpu"
threads = 1
[target]
model = {json.dumps(str(target_folder))}
num_features = 2
[data]
prompts = [{json.dumps(str(tmp_path / "prompts.jsonl"))}]
folder = {json.dumps(str(tmp_path / "data"))}
heldout = 2
max_new_tokens = 8
min_answer_tokens = 1
min_distinct_4grams = 0.0
[masks]
[[masks.entry]]
name = "dflash"
family = "dflash"
kind = "layouts"
anchors = 4
draft_block_size = 4
context = [48, 64]
"""
    )

    def invoke(*options, code=0):
        command = ["--config", str(tmp_path / "run.toml"), *options]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == code, result.output
        return result

    return invoke


def rows(result):
    return json.loads(result.stdout)


def test_prompts_become_a_dataset(run, tmp_path):
    result = run()
    assert "train samples                        6" in result.stdout
    assert "dropped: no messages                 1" in result.stdout
    assert "answering 8 prompts: 100 %" in result.stderr
    train, heldout = (Dataset.open(tmp_path / "data", name) for name in ("train", "heldout"))
    assert (len(train), len(heldout)) == (6, 2)
    assert train.has_features
    assert train.layer_ids == (1, 3)
    assert all(scale > 0 for scale in train.feature_scale)
    for i in range(len(train)):
        sample = train.sample(i)
        assert sample.loss_mask.tolist()[sample.prompt_len - 1 : sample.prompt_len + 1] == [0, 1]
        assert sample.features.shape == (sample.input_ids.numel(), 64)
        assert bool(sample.features.isfinite().all())


def test_same_input_is_not_prepared_again(run, tmp_path):
    first = rows(run("--json"))
    stamp = (tmp_path / "data" / "meta.json").stat().st_mtime_ns
    again = run("--json")
    assert rows(again)["folder"].endswith("(up to date)")
    assert {k: v for k, v in rows(again).items() if k != "folder"} == {
        k: v for k, v in first.items() if k not in ("folder", "seconds")
    }
    assert "loading" not in again.stderr
    assert (tmp_path / "data" / "meta.json").stat().st_mtime_ns == stamp


def test_second_preparation_is_equal_bit_for_bit(run, tmp_path):
    run()
    run("--set", f"data.folder={tmp_path / 'again'}")
    for name in ("train.safetensors", "heldout.safetensors", "train.features.safetensors"):
        assert (tmp_path / "data" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize(
    "change", ["run.seed=2", "data.heldout=3", "data.max_new_tokens=4", "data.features=online"]
)
def test_other_settings_are_prepared_again(run, change):
    run()
    assert "up to date" not in run("--set", change).stdout
    assert "up to date" in run("--set", change).stdout


def test_other_prompts_are_prepared_again(run, tmp_path):
    run()
    with (tmp_path / "prompts.jsonl").open("a") as stream:
        stream.write('{"prompt": "one more"}\n')
    assert rows(run("--json"))["train samples"] == 7


@pytest.mark.parametrize(
    "name",
    [
        "meta.json",
        "train.safetensors",
        "heldout.safetensors",
        "train.features.safetensors",
        "heldout.features.safetensors",
    ],
)
def test_damaged_folder_is_prepared_again(run, tmp_path, name):
    run()
    path = tmp_path / "data" / name
    whole = path.read_bytes()
    # The last byte of meta.json is a line feed.
    path.write_bytes(whole[:-2] if name == "meta.json" else whole[:-1] + bytes([whole[-1] ^ 1]))
    again = run()
    assert "up to date" not in again.stdout
    assert f"preparing again: {path} " in again.stderr
    assert "runtime.prepare" not in again.stderr
    assert path.read_bytes() == whole
    assert "up to date" in run().stdout


def test_heldout_comes_from_one_file(run, tmp_path):
    first, book = tmp_path / "prompts.jsonl", tmp_path / "book.txt"
    book.write_text("The quick brown fox jumps over the lazy dog. " * 3)
    both = ["--json", "--set", f"data.prompts={json.dumps([str(first), str(book)])}"]
    found = rows(run(*both, "--set", f"data.heldout_from={tmp_path}/./book.txt"))
    assert (found["train samples"], found["held-out samples"]) == (9, 2)
    assert "held-out samples asked for" not in found
    heldout = Dataset.open(tmp_path / "data", "heldout")
    # Of plain text everything but the first token is supervised.
    assert all(heldout.sample(i).loss_mask.tolist()[:2] == [0, 1] for i in range(2))
    more = [*both, "--set", f"data.heldout_from={book}", "--set", "data.heldout=5"]
    found = rows(run(*more))
    assert (found["held-out samples"], found["held-out samples asked for"]) == (3, 5)


def test_heldout_from_another_file(run, monkeypatch):
    monkeypatch.setattr(Target, "load", None)
    result = run("--set", "data.heldout_from=none.jsonl", code=2)
    assert "data.heldout_from = 'none.jsonl': must be one of data.prompts (" in result.stderr


def test_online_features_leave_none_behind(run, tmp_path):
    run("--set", "data.features=online")
    train = Dataset.open(tmp_path / "data", "train")
    assert not train.has_features
    assert all(scale > 0 for scale in train.feature_scale)


def test_plain_text_needs_no_answers(run, tmp_path):
    (tmp_path / "book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    found = rows(run("--json", "--set", f"data.prompts={tmp_path / 'book.txt'}"))
    assert found["records"] == 1
    assert found["train samples"] == 900 // 64 + 1 - 2
    assert "noted: answered" not in found


def test_nothing_left_is_an_error_with_counts(run):
    result = run("--set", "data.min_answer_tokens=20", code=1)
    assert "no sample is left for training" in result.stderr
    assert "no messages: 1, too few supervised tokens: 8" in result.stderr


def test_everything_held_out_is_an_error(run):
    assert "data.heldout keeps 8 out" in run("--set", "data.heldout=8", code=1).stderr


def test_file_without_records(run, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n{}\n")
    result = run(code=1)
    assert "hold nothing to use (blank line: 1, neither messages nor prompt: 1)" in result.stderr


def test_refused_sample_is_named(run, tmp_path):
    result = run(
        "--set", "data.too_long=refuse", "--set", f"masks.entry=[{{context = 32, {ENTRY}}}]", code=1
    )
    assert f"{tmp_path / 'prompts.jsonl'}:1 needs" in result.stderr


def test_context_beyond_the_target(run):
    result = run("--set", f"masks.entry=[{{context = [512], {ENTRY}}}]", code=2)
    assert "masks.entry.context = 512: must be at most the target's 256" in result.stderr


def test_target_that_is_not_there(run, tmp_path):
    result = run("--target", str(tmp_path / "none"), code=1)
    assert "there is no such folder" in result.stderr


def test_missing_prompt_file(run):
    result = run("--set", "data.prompts=none.jsonl", code=2)
    assert "data.prompts = 'none.jsonl': must be a readable file" in result.stderr


def test_device_option(run):
    assert "must be cpu or cuda:N" in run("--device", "meta", code=2).stderr


@pytest.mark.parametrize("name", ["thesis.txt", "meta.json"])
def test_folder_of_other_files(run, tmp_path, monkeypatch, name):
    monkeypatch.setattr(Target, "load", None)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text('{"precious": 1}')
    result = run(code=1)
    assert "must be empty or hold prepared data" in result.stderr
    assert "preparing again" not in result.stderr
    assert (tmp_path / "data" / name).read_text() == '{"precious": 1}'


def test_the_largest_context_is_that_of_the_runs_own_entries():
    entries = [
        {"name": "causal", "family": "causal", "Q_LEN": 9999},
        {**OWN, "context": [64, 256]},
        {**OWN, "name": "other", "context": 512},
    ]
    assert largest_context(parse_config({"masks": {"entry": entries}})) == 256
    with pytest.raises(ConfigError, match="must name an entry of"):
        largest_context(parse_config({"masks": {"entry": entries[:1]}}))


def test_help_does_not_import_torch():
    code = "import sys, runtime.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_examples_are_varied_and_well_formed():
    lines = [json.loads(line) for line in EXAMPLES.read_text(encoding="ascii").splitlines()]
    talks = [
        line.get("messages") or [{"role": "user", "content": line["prompt"]}] for line in lines
    ]
    assert len(talks) == 320
    assert len({json.dumps(talk) for talk in talks}) == 320
    assert all(check_messages(talk)[-1]["role"] == "user" for talk in talks)
    assert sum(len(talk) > 1 for talk in talks) >= 25
