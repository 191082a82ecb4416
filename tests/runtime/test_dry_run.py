"""``train --dry-run`` against counts made by hand from the data, the cache and a trained run."""

import json
import re
import shutil
from collections import Counter
from statistics import median

import pytest
import torch
from safetensors.torch import load_file, save_file

import cache
from maskgen.cli import main as maskgen
from maskgen.entry import load_entry
from maskgen.tables import TABLE_FIELDS
from runtime.data.dataset import Dataset
from runtime.train import main as train
from tests.runtime.tiny_root import command, make_root, options

PACKED = """
[run]
method = "packed"
folder = "{root}/packed"
devices = "cpu"
[target]
model = "{root}/target"
[data]
folder = "{root}/nowhere"
[masks]
cache = "{root}/masks.zarr"
[[masks.entry]]
name = "packed"
family = "document"
kind = "parametric"
Q_LEN = 64
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = make_root(tmp_path_factory.mktemp("dry"), prompts=16)
    path = folder / "run.toml"
    # Samples fall into three buckets, of which one stays empty.
    path.write_text(path.read_text().replace("[32, 64]", "[16, 48, 64]"))
    command(maskgen, "build", path)
    return folder


def planned(root, name="new", **settings):
    given = options(root, name, **{key.replace("__", "."): v for key, v in settings.items()})
    return json.loads(command(train, *given, "--dry-run", "--json").stdout)


def page(root, name="new", *more, code=0):
    done = command(train, *options(root, name), "--dry-run", *more, code=code)
    return done.stdout if code == 0 else done.stderr


def test_buckets_padding_and_epochs(root):
    lengths = list(Dataset.open(root / "data", "train").lengths)
    bucket_of = [min(b for b in (16, 48, 64) if b >= length) for length in lengths]
    rows = Counter(bucket_of)
    found = planned(root, train__global_batch=4, train__steps=10)
    assert {use["length"]: use["rows"] for use in found["buckets"]} == rows
    assert found["samples"] == len(lengths)
    assert found["padding"] == pytest.approx(1 - sum(lengths) / sum(bucket_of))
    per_epoch = sum((count + 3) // 4 for count in rows.values())
    assert found["steps_an_epoch"] == per_epoch == sum(use["steps"] for use in found["buckets"])
    assert found["empty_rows"] == 4 * per_epoch - len(lengths)
    assert found["epochs"] == 10 / per_epoch
    assert found["rows_a_device"] == 4
    halves = planned(root, train__global_batch=4, train__accumulate=2, run__devices="cpu,cpu")
    assert (halves["rows_a_device"], halves["devices"]) == (1, ["cpu", "cpu"])


def test_parameters_memory_and_time_of_a_run_that_was(root):
    command(train, *options(root, "trained"))
    found = planned(root, "trained")
    weights = load_file(root / "trained" / "drafter" / "model.safetensors")
    assert sum(found["parameters"].values()) == sum(w.numel() for w in weights.values())
    layers = sum(w.numel() for name, w in weights.items() if name.startswith("layers."))
    assert found["parameters"]["layers"] == layers
    aligned = sum(-(-w.numel() // 8) * 8 for w in weights.values())
    memory = found["memory"]
    assert memory["fp32 weights"] == memory["fp32 gradients"] == 4 * aligned
    assert memory["moments"] == 8 * aligned
    rows = map(json.loads, (root / "trained" / "metrics.jsonl").read_text().splitlines())
    assert found["step_ms"] == median(row["step_ms"] for row in rows)
    assert found["seconds"] == pytest.approx(6 * found["step_ms"] / 1e3)
    (activations,) = found["unknown"]
    assert "activations" in activations


def test_time_of_other_settings_says_which(root):
    command(train, *options(root, "before"))
    found = planned(root, "before", train__global_batch=4, train__steps=12)
    assert found["unknown"][-1].endswith("measured with another train.global_batch")


def test_bfloat16_keeps_fp32_masters_beside_what_it_computes_with(root):
    memory, plain = (
        planned(root, target__dtype=dtype)["memory"] for dtype in ("bfloat16", "float32")
    )
    assert memory["bfloat16 weights"] == memory["fp32 weights"] // 2
    assert memory["frozen embedding"] == plain["frozen embedding"] // 2
    assert not any(name.startswith("bfloat16") for name in plain)


def test_memory_of_masks_by_the_arrays_in_the_cache(root):
    found = planned(root, train__global_batch=4)
    used = {use["length"] for use in found["buckets"]}
    expected = 0
    store = cache.open_store(root / "masks.zarr")
    for name in (f"dflash/ctx{length}" for length in used):
        entry = load_entry(store, name)
        spans = [entry.spans.starts, entry.spans.ends, *entry.params.values()]
        tables = [getattr(entry.tables, field) for field in TABLE_FIELDS]
        # All layouts of what dense attention reads, and a batch of 4 of everything.
        expected += sum(tensor.nbytes for tensor in spans)
        expected += sum(tensor[:1].nbytes * 4 for tensor in (*spans, *tables))
    assert found["memory"]["masks"] == expected


def test_what_of_the_target_stays(root):
    target = load_file(root / "target" / "model.safetensors")
    whole = 4 * sum(weight.numel() for weight in target.values())
    stored = planned(root)["memory"]
    embedding = target["model.embed_tokens.weight"]
    assert stored["frozen embedding"] == 4 * embedding.numel()
    online = ["--set", f"data.folder={root}/none", "--set", "data.features=online"]
    found = json.loads(command(train, *options(root, "o"), *online, "--dry-run", "--json").stdout)
    assert found["memory"]["frozen target"] == whole
    apart = command(
        train, *options(root, "o"), *online, "--dry-run", "--json", "--target-devices", "cpu"
    )
    found = json.loads(apart.stdout)
    assert found["memory_apart"] == {"target": whole}
    assert "frozen target" not in found["memory"]


def test_graphs_of_a_gpu(root, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    wide = {"masks__cache": root / "wide.zarr", "masks__BLOCK_SIZE": 128}
    sets = [f"--set={key.replace('__', '.')}={value}" for key, value in wide.items()]
    command(maskgen, "build", root / "run.toml", *sets)
    found = planned(root, run__devices="cuda:0", train__accumulate=2, **wide)
    assert (found["dtype"], found["devices"]) == ("bfloat16", ["cuda:0"])
    assert found["graphs"] == 2 * len(found["buckets"])
    assert found["compiled"] == ["a layer of the drafter", "the loss"]
    # FlexAttention reads the block tables of every layout, too.
    assert found["memory"]["masks"] > planned(root, **wide)["memory"]["masks"]


def test_no_weights_are_read_and_nothing_is_written(root, tmp_path):
    shutil.copytree(root / "target", tmp_path / "target")
    # A target that is loaded is refused for these.
    path = tmp_path / "target" / "model.safetensors"
    weights = {name: torch.full_like(w, torch.nan) for name, w in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})
    before = sorted(root.rglob("*"))
    found = planned(root, target__model=tmp_path / "target")
    assert sum(found["parameters"].values()) > 0
    assert sorted(root.rglob("*")) == before


def test_the_page(root):
    shown = page(root)
    assert re.search(r"^bucket +rows +padding +steps an epoch$", shown, re.MULTILINE)
    assert re.search(r"^layers +\d+,\d+$", shown, re.MULTILINE)
    assert re.search(r"^sum +[\d.]+ KiB$", shown, re.MULTILINE)
    assert "captured graphs  none, the CPU runs eagerly" in shown
    assert f"- time of a step: {root}/new has no run yet" in shown


def test_what_is_missing_is_said_with_the_command_that_makes_it(root):
    missing = ["--set", f"data.folder={root}/none", "--set", f"masks.cache={root}/none.zarr"]
    shown = page(root, "new", *missing)
    assert re.search(rf"- buckets, .*runtime.prepare --config {root}/run.toml --set", shown)
    assert re.search(rf"- memory of the masks: .*maskgen build --config {root}/run.toml", shown)
    assert "steps an epoch" not in shown
    assert re.search(r"^layers +\d+,\d+$", shown, re.MULTILINE)


def test_what_train_refuses_is_refused(root):
    assert "must be a multiple" in page(root, "new", "--devices", "cpu,cpu,cpu", code=2)
    assert "asks for" in page(root, "new", "--devices", "cuda:9", code=1)
    assert "nowhere" in page(root, "new", "--set", f"target.model={root}/nowhere", code=1)


def test_a_packed_run(root, tmp_path):
    (tmp_path / "packed.toml").write_text(PACKED.format(root=root))
    run_file = ["--config", tmp_path / "packed.toml"]
    found = json.loads(command(train, *run_file, "--dry-run", "--json").stdout)
    target = load_file(root / "target" / "model.safetensors")
    assert sum(found["parameters"].values()) == sum(weight.numel() for weight in target.values())
    assert found["buckets"] == []
