"""The commands one after another on a run file of packed documents, as docs/packed.md has them."""

import json
import re
import shlex

import pytest
from transformers import AutoModelForCausalLM

from maskgen.cli import main as maskgen
from runtime.errors import ConfigError
from runtime.evaluate import main as evaluate
from runtime.export import main as export
from runtime.methods import read_run
from runtime.packed.published import read_record
from runtime.prepare import main as prepare
from runtime.train import main as train
from runtime.training.metrics import read_metrics
from tests.runtime.test_train import RUN_FILE
from tests.runtime.tiny_root import command
from tests.runtime.tiny_text import byte_target

PACKED_FILE = """
[run]
method = "packed"
folder = "{root}/run"
devices = "cpu"
threads = 1
[target]
model = "{root}/target"
[data]
prompts = ["{root}/answered.jsonl"]
folder = "{root}/data"
answers = "{root}/answers"
heldout = 3
min_answer_tokens = 4
[masks]
cache = "{root}/masks.zarr"
BLOCK_SIZE = 16
[[masks.entry]]
name = "packed"
family = "document"
kind = "parametric"
Q_LEN = [64, 128]
[packed]
max_documents = 4
[train]
steps = 6
global_batch = 2
lr = 1e-2
log_every = 2
save_every = 3
[evaluate]
documents = 2
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    target = byte_target()
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    answered = [{"prompt": f"{i}?", "answer": "so " * (1 + i % 9)} for i in range(24)]
    (folder / "answered.jsonl").write_text("\n".join(map(json.dumps, answered)))
    prompts = [{"prompt": f"tell me {'more ' * (i % 4)}{i}"} for i in range(12)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (folder / "packed.toml").write_text(PACKED_FILE.format(root=folder))
    (folder / "dflash.toml").write_text(
        RUN_FILE.format(root=folder).replace(f"{folder}/data", f"{folder}/dflash-data")
    )
    return folder


def call(main, root, *options, file="packed.toml", code=0):
    return command(main, "--config", root / file, *options, code=code)


@pytest.fixture(scope="module")
def trained(root):
    prepared = call(prepare, root)
    assert re.search(r"^train samples +21$", prepared.stdout, re.MULTILINE)
    assert "answering" not in prepared.stderr
    command(maskgen, "build", root / "packed.toml")
    return call(train, root)


def test_training_ends_with_the_line_and_names_the_next_commands(root, trained):
    line = "after freeze: 0 compiles, 0 FX traces, 0 host mask builds, 6 steps (eager)"
    assert trained.stdout.splitlines()[0] == line
    assert re.search(r"^steps +6 of 6$", trained.stdout, re.MULTILINE)
    assert trained.stderr.count("loss: mean cross entropy of the predicted tokens, in nats") == 1
    assert not re.search("drafter|tau|anchor", trained.output)
    (following,) = re.findall("^next: python -m (.*)$", trained.stdout, re.MULTILINE)
    name, *arguments = shlex.split(following)
    assert (name, arguments) == ("runtime.evaluate", ["--config", str(root / "packed.toml")])
    scored = command(evaluate, *arguments)
    before, after = map(float, re.findall(r"(?:before|after) ([\d.]+)", scored.stdout))
    assert after < before
    assert not re.search("drafter|next: ", scored.output)
    rows = read_metrics(root / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert json.loads((root / "run" / "evaluate.json").read_text())["documents"] == 2


def test_the_same_command_again_trains_nothing(root, trained):
    again = call(train, root)
    assert "this run is finished: 6 steps" in again.stderr
    assert len(read_metrics(root / "run" / "metrics.jsonl")) == 3


def test_a_checkpoint_is_exported_where_one_asks(root, trained):
    out = root / "step-3"
    done = call(export, root, "--step", 3, "--out", out)
    assert done.stdout == f"{out}: model of step 3\n"
    assert read_record(out)["step"] == 3
    AutoModelForCausalLM.from_pretrained(out)
    assert json.loads(call(evaluate, root, "--model", out, "--json").stdout)["documents"] == 2


def test_a_key_of_another_method_is_refused(root, trained):
    refused = call(train, root, "--set", "train.gamma=2.0", code=2)
    assert "train.gamma = 2.0: unknown key in [train]" in refused.stderr
    refused = call(train, root, "--anchors", "data", code=2)
    assert "train.anchors" in refused.stderr
    with pytest.raises(ConfigError, match=r"packed.*section is unknown"):
        read_run(root / "dflash.toml", ["packed.max_documents=4"])


def test_data_of_a_drafter_train_a_packed_run(root, trained):
    call(prepare, root, file="dflash.toml")
    options = [f"data.folder={root}/dflash-data", f"run.folder={root}/of-dflash"]
    options += ["data.max_new_tokens=24", "data.min_distinct_4grams=0.0"]
    given = [part for option in options for part in ("--set", option)]
    done = call(train, root, *given)
    assert "6 steps (eager)" in done.stdout
    call(evaluate, root, *given)


def test_data_of_a_packed_run_do_not_train_a_drafter(root, trained):
    call(prepare, root, file="dflash.toml")
    command(maskgen, "build", root / "dflash.toml")
    options = [f"data.folder={root}/data", f"run.folder={root}/of-packed"]
    options += ["data.max_new_tokens=128"]
    given = [part for option in options for part in ("--set", option)]
    refused = call(train, root, *given, file="dflash.toml", code=1)
    assert refused.stderr.startswith("Error: ")
    assert refused.stderr.count("\n") == 1
    assert "python -m runtime.prepare" in refused.stderr
