import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from runtime.config import parse_config
from runtime.data.answer_store import AnswerStore
from runtime.data.dataset import Dataset
from runtime.data.folder import path_of, read_meta
from runtime.dflash import preparation as dflash_preparation
from runtime.dflash.settings import DFlashConfig
from runtime.dflash.step.buckets import run_specs
from runtime.errors import ConfigError
from runtime.prepare import main
from runtime.prompts.conversation import check_messages
from runtime.target.model import Target
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
answers = {json.dumps(str(tmp_path / "answers"))}
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
    place = f"{tmp_path / 'prompts.jsonl'}:9"
    assert f"dropped: no messages                 1  {place}\n" in result.stdout
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


def test_answers_that_are_shipped_are_not_made_again(run, tmp_path):
    """One folder packs its answers; another, without kept ones, takes all of them from the file."""
    file = tmp_path / "shipped" / "answers.jsonl.xz"
    packed = rows(run("--pack-answers", str(file), "--json"))
    assert packed["answers"] == 8
    assert packed["bytes"] == file.stat().st_size
    assert not (tmp_path / "data").exists()
    first = run()
    apart = (
        "--set",
        f"data.folder={tmp_path / 'other'}",
        "--set",
        f"data.answers={tmp_path / 'no'}",
    )
    second = run(*apart, "--set", f"data.shipped={json.dumps(str(file))}")
    assert f"8 answers from {file}, 0 to make\n" in second.stderr
    assert "answering" not in second.stderr
    assert not (tmp_path / "no").exists()
    assert folder_bytes(tmp_path / "other") == folder_bytes(tmp_path / "data")
    assert "up to date" in run("--set", f"data.shipped={json.dumps(str(file))}").stdout
    assert "train samples" in first.stdout


def test_what_shipped_answers_lack_is_answered(run, tmp_path):
    file = tmp_path / "answers.jsonl.xz"
    run("--set", "data.max_new_tokens=4", "--pack-answers", str(file))
    apart = ("--set", f"data.answers={tmp_path / 'no'}")
    result = run(*apart, "--set", f"data.shipped={json.dumps(str(file))}")
    assert f"0 answers from {file}, 8 to make\n" in result.stderr
    assert "answering 8 prompts: 100 %" in result.stderr


def test_shipped_answers_that_are_not_there_are_refused_at_once(run):
    result = run("--set", "data.shipped=nowhere.xz", code=2)
    assert "data.shipped = 'nowhere.xz': must name files that are there" in result.stderr
    assert "loading" not in result.stderr


@pytest.mark.parametrize(
    ("place", "said", "code"),
    [
        ("prompts.jsonl", "found a file that holds no packed answers", 2),
        ("run.toml", "found a file that holds no packed answers", 2),
        ("", "found a folder", 2),
        ("run.toml/below", "must take the answers (", 1),
        (None, "--pack-answers = '': must name a file", 2),
    ],
)
def test_a_place_for_packed_answers_is_tried_first(run, tmp_path, monkeypatch, place, said, code):
    monkeypatch.setattr(Target, "load", None)
    before = folder_bytes(tmp_path)
    result = run("--pack-answers", "" if place is None else str(tmp_path / place), code=code)
    assert said in result.stderr
    assert "loading" not in result.stderr
    assert folder_bytes(tmp_path) == before


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


def test_what_is_up_to_date_is_told_without_transformers(run, tmp_path):
    run()
    code = "import sys; from runtime.prepare import main; main(standalone_mode=False); "
    code += "sys.exit('transformers' in sys.modules)"
    command = [sys.executable, "-c", code, "--config", str(tmp_path / "run.toml")]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "up to date" in found.stdout


def test_second_preparation_is_equal_bit_for_bit(run, tmp_path):
    run()
    run("--set", f"data.folder={tmp_path / 'again'}")
    assert folder_bytes(tmp_path / "data") == folder_bytes(tmp_path / "again")


def folder_bytes(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "change",
    [
        "data.max_new_tokens=4",
        "data.features=online",
        "data.min_answer_tokens=2",
        "data.min_distinct_4grams=0.1",
        "target.num_features=1",
        f"masks.entry=[{{context = 96, {ENTRY}}}]",
    ],
)
def test_other_samples_are_made_of_the_same_answers(run, change):
    run()
    again = run("--set", change)
    assert "up to date" not in again.stdout
    assert "answering 0 prompts (8 answers are there)" in again.stderr
    assert "up to date" in run("--set", change).stdout


def test_another_template_or_keyword_is_prepared_again(run, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].content }}{{ mood }}|")
    options = ["--set", f"data.chat_template={path}"]
    run(*options)
    options += ["--set", "data.template.mood=calm"]
    assert "up to date" not in run(*options).stdout
    assert "up to date" in run(*options).stdout
    path.write_text("{{ messages[0].content }}{{ mood }}:")
    assert "up to date" not in run(*options).stdout
    assert json.loads((tmp_path / "data" / "meta.json").read_text())["template"] == {
        "chat_template": "mine.jinja",
        "keywords": {"mood": "calm"},
        "text": path.read_text(),
    }


@pytest.mark.parametrize("change", ["run.seed=2", "data.heldout=3", "data.heldout_from={prompts}"])
def test_another_split_asks_the_target_nothing(run, tmp_path, monkeypatch, change):
    change = change.format(prompts=tmp_path / "prompts.jsonl")
    fresh = tmp_path / "fresh"
    run("--set", change, "--set", f"data.folder={fresh}")
    run()
    monkeypatch.setattr(Target, "load", None)
    again = run("--set", change)
    assert "up to date" not in again.stdout
    assert folder_bytes(tmp_path / "data") == folder_bytes(fresh)
    assert "up to date" in run("--set", change).stdout
    run()
    assert "up to date" in run().stdout


def test_another_dtype_has_answers_and_samples_of_its_own(run):
    run()
    change = ("--set", "target.dtype=bfloat16")
    again = run(*change)
    assert "up to date" not in again.stdout
    assert "answering 8 prompts: 100 %" in again.stderr
    assert "up to date" in run(*change).stdout


def test_longer_answers_are_asked_for(run):
    run()
    assert "answering 8 prompts: 100 %" in run("--set", "data.max_new_tokens=9").stderr


def test_one_more_prompt_is_one_more_answer(run, tmp_path):
    run()
    with (tmp_path / "prompts.jsonl").open("a") as stream:
        stream.write('{"prompt": "one more"}\n')
    again = run("--json")
    assert rows(again)["train samples"] == 7
    assert "answering 1 prompts (8 answers are there): 100 %" in again.stderr


@pytest.mark.parametrize("kept", [1, 2])
def test_a_stopped_run_goes_on_where_it_was(run, tmp_path, monkeypatch, kept):
    batches = ["--set", "data.batch=3"]
    whole = ["--set", f"data.folder={tmp_path / 'whole'}"]
    run(*batches, *whole, "--set", f"data.answers={tmp_path / 'apart'}")
    add, added = AnswerStore.add, []

    def stop_at(store, *args):
        if len(added) == kept:
            raise KeyboardInterrupt
        added.append(args)
        add(store, *args)

    with monkeypatch.context() as patch:
        patch.setattr(AnswerStore, "add", stop_at)
        run(*batches, code=130)
    again = run(*batches)
    assert f"answering {8 - 3 * kept} prompts ({3 * kept} answers are there)" in again.stderr
    assert folder_bytes(tmp_path / "data") == folder_bytes(tmp_path / "whole")


SLOWLY = """
import time
from runtime.prepare import main
from runtime.target.model import Target
extend = Target.extend
Target.extend = lambda *args, **options: (time.sleep(0.1), extend(*args, **options))[1]
main()
"""


def test_a_killed_run_goes_on_where_it_was(run, tmp_path):
    run_file = ["--config", str(tmp_path / "run.toml"), "--set", "data.batch=3"]
    killed = subprocess.Popen([sys.executable, "-c", SLOWLY, *run_file], stderr=subprocess.DEVNULL)
    while (
        not any(tmp_path.glob("answers/*.jsonl"))
        or not next(tmp_path.glob("answers/*.jsonl")).stat().st_size
    ):
        assert killed.poll() is None
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    assert not (tmp_path / "data").exists()
    again = run("--set", "data.batch=3")
    assert "3 answers are there" in again.stderr or "6 answers are there" in again.stderr
    apart = [
        "--set",
        f"data.answers={tmp_path / 'apart'}",
        "--set",
        f"data.folder={tmp_path}/whole",
    ]
    run("--set", "data.batch=3", *apart)
    assert folder_bytes(tmp_path / "data") == folder_bytes(tmp_path / "whole")


def test_prompts_saved_meanwhile_are_not_taken_for_those_that_were_read(run, tmp_path, monkeypatch):
    load = Target.load

    def saving(*args, **options):
        with (tmp_path / "prompts.jsonl").open("a") as stream:
            stream.write('{"prompt": "saved while the target loads"}\n')
        return load(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Target, "load", saving)
        assert rows(run("--json"))["records"] == 9
    again = run("--json")
    assert "up to date" not in again.stdout
    assert rows(again)["records"] == 10


def test_only_what_the_samples_depend_on_is_in_the_key(run, tmp_path):
    run()
    moved = tmp_path / "elsewhere" / "named.txt"
    moved.parent.mkdir()
    (tmp_path / "prompts.jsonl").rename(moved)
    os.utime(moved, (1, 1))
    options = ["--set", f"data.prompts={moved}", "--set", "data.batch=2"]
    assert "up to date" in run(*options, "--set", "data.answers=nowhere").stdout


def test_bad_lines_are_told_with_their_places(run, tmp_path):
    path = tmp_path / "prompts.jsonl"
    bad = [b"[" * 100_000, b'{"prompt": "\\ud800"}', b'{"prompt": "\xe9"}', b'{"instruction": "x"}']
    path.write_bytes(b"\n".join([*bad, path.read_bytes()]))
    result = run("--json")
    found = rows(result)
    assert found["train samples"] == 6
    assert found["dropped: nested too deeply"] == 1
    assert found["places"]["nested too deeply"] == [f"{path}:1"]
    assert found["places"]["text not UTF-8"] == [f"{path}:2 (half a surrogate pair)"]
    assert found["places"]["line not UTF-8"] == [f"{path}:3 (byte 13)"]
    assert found["places"]["neither messages nor prompt"] == [f"{path}:4 (found keys instruction)"]
    assert json.loads((tmp_path / "data" / "meta.json").read_text())["places"] == found["places"]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"PAR1\x15\x04", "found Parquet"),
        (b"prompt,answer\nwhy?,so\n", "found a table"),
        (b"\x80\x81\x82\n\xff", "found neither UTF-8 text nor"),
    ],
)
def test_a_file_that_is_not_read_is_refused_before_the_target_is_loaded(
    run, tmp_path, monkeypatch, content, found
):
    monkeypatch.setattr(Target, "load", None)
    (tmp_path / "more.jsonl").write_bytes(content)
    both = json.dumps([str(tmp_path / "prompts.jsonl"), str(tmp_path / "more.jsonl")])
    result = run("--set", f"data.prompts={both}", code=2)
    assert f"data.prompts = '{tmp_path / 'more.jsonl'}': must be JSON Lines" in result.stderr
    assert found in result.stderr
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "answers").exists()


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
    if name != "meta.json":
        path = path_of(path.parent, name, read_meta(path.parent))
    whole = path.read_bytes()
    # The last byte of meta.json is a line feed.
    path.write_bytes(whole[:-2] if name == "meta.json" else whole[:-1] + bytes([whole[-1] ^ 1]))
    again = run()
    assert "up to date" not in again.stdout
    assert f"preparing again: {path} " in again.stderr
    assert "runtime.prepare" not in again.stderr
    assert path.read_bytes() == whole
    assert "up to date" in run().stdout


@pytest.mark.parametrize("key", ["split", "counts", "places", "target"])
def test_a_folder_without_a_part_of_its_description_is_prepared_again(run, tmp_path, key):
    run()
    path = tmp_path / "data" / "meta.json"
    whole = path.read_bytes()
    meta = json.loads(whole)
    del meta[key]
    path.write_text(json.dumps(meta))
    assert "up to date" not in run().stdout
    assert path.read_bytes() == whole


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


def test_features_are_computed_in_bfloat16_where_that_is_fast(run, tmp_path, monkeypatch):
    faster = ("--set", "data.features_dtype=bfloat16")
    run()
    plain = Dataset.open(tmp_path / "data", "train")
    before = [plain.sample(i) for i in range(len(plain))]
    monkeypatch.setattr(dflash_preparation, "multiplies_in_bfloat16", lambda device: False)
    assert "(up to date)" in run(*faster).stdout
    monkeypatch.setattr(dflash_preparation, "multiplies_in_bfloat16", lambda device: True)
    assert "features are computed in bfloat16" in run(*faster).stderr
    assert "(up to date)" in run(*faster).stdout
    assert read_meta(tmp_path / "data")["computed_in"] == "torch.bfloat16"
    faster_data = Dataset.open(tmp_path / "data", "train")
    for i, sample in enumerate(before):
        found, wanted = faster_data.sample(i), sample.features.double()
        assert torch.equal(found.input_ids, sample.input_ids)
        assert 0 < (found.features.double() - wanted).norm() < 0.06 * wanted.norm()


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


def test_nothing_left_is_an_error_with_counts(run, tmp_path):
    result = run("--set", "data.min_answer_tokens=20", code=1)
    assert "no sample came of 9 records (no messages: 1 from " in result.stderr
    assert f"too few supervised tokens: 8 from {tmp_path / 'prompts.jsonl'}:1)" in result.stderr


def test_everything_held_out_is_an_error(run):
    assert "data.heldout keeps 8 of 8 out" in run("--set", "data.heldout=8", code=1).stderr


def test_file_without_records(run, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("\n{}\n")
    result = run(code=1)
    assert f"hold nothing to use (blank line: 1 from {tmp_path / 'prompts.jsonl'}:1, neither" in (
        result.stderr
    )


def test_refused_sample_is_named(run, tmp_path):
    result = run(
        "--set", "data.too_long=refuse", "--set", f"masks.entry=[{{context = 32, {ENTRY}}}]", code=1
    )
    assert f"{tmp_path / 'prompts.jsonl'}:1 needs" in result.stderr


def test_context_beyond_the_target(run):
    result = run("--set", f"masks.entry=[{{context = [512], {ENTRY}}}]", code=2)
    assert 'masks.entry.context = "512, of the target\'s 256 positions"' in result.stderr


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


def test_the_contexts_are_those_of_the_runs_own_entries():
    entries = [
        {"name": "causal", "family": "causal", "Q_LEN": 9999},
        {**OWN, "context": [64, 256]},
        {**OWN, "name": "other", "context": 512},
    ]
    config = parse_config({"masks": {"entry": entries}}, DFlashConfig)
    assert list(run_specs(config)) == [64, 256]
    with pytest.raises(ConfigError, match="must name an entry of"):
        run_specs(parse_config({"masks": {"entry": entries[:1]}}, DFlashConfig))


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


OTHER_LIMIT = ("--set", "data.max_new_tokens=4")


@pytest.mark.parametrize(
    ("other", "code"), [((), 0), (OTHER_LIMIT, 1), (("--set", "run.seed=2"), 1)]
)
def test_another_prepare_meanwhile(run, tmp_path, monkeypatch, other, code):
    """What it wrote is used where it is the same, and not replaced where it is not."""
    load, nested = Target.load, []

    def load_after_another(*args, **options):
        monkeypatch.setattr(Target, "load", load)
        nested.append(run(*other))
        return load(*args, **options)

    monkeypatch.setattr(Target, "load", load_after_another)
    found = run(code=code)
    assert len(nested) == 1
    written = folder_bytes(tmp_path / "data")
    if code:
        assert "another prepare wrote other data to" in found.stderr
        assert "up to date" in run(*other).stdout
        assert "up to date" not in run().stdout
    assert "up to date" in run().stdout
    assert (folder_bytes(tmp_path / "data") == written) == (code == 0)


def test_a_data_folder_that_is_a_link_is_answered_for_once(run, tmp_path):
    (tmp_path / "data").symlink_to(tmp_path / "disk")
    run()
    assert "up to date" in run().stdout
    run("--set", "run.seed=2")
    assert (tmp_path / "data").is_symlink()
    assert len(list((tmp_path / "disk").iterdir())) == 5
