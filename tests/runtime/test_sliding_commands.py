"""The commands one after another for a drafter with sliding layers, on a tiny target."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from maskgen.cli import main as maskgen
from runtime.dflash.decoding.speculate import DraftSession
from runtime.dflash.folder.saved_drafter import load_published
from runtime.evaluate import main as evaluate
from runtime.export import main as export
from runtime.generate import main as generate
from runtime.prepare import main as prepare
from runtime.target.model import Target
from runtime.train import main as train
from runtime.training.metrics import read_metrics
from tests.runtime.plain_drafter import first_block
from tests.runtime.tiny_root import command, make_root

ENTRY = """
[[masks.entry]]
name = "{name}"
family = "dflash"
kind = "{kind}"
context = [32, 64]
anchors = 8
draft_block_size = 4
"""
SLIDES = 'layer = "sliding"\nwindow = 12\n'
LAYERS = (
    "--set",
    'drafter.layers=["sliding","full"]',
    "--set",
    "drafter.sliding_window=12",
    "--set",
    "evaluate.every=3",
    "--set",
    "train.lr=0.01",
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = make_root(tmp_path_factory.mktemp("sliding"))
    path = folder / "run.toml"
    text, sections = path.read_text(), ""
    sections += ENTRY.format(name="dflash-data", kind="parametric")
    sections += ENTRY.format(name="dflash-sliding", kind="layouts")
    sections += SLIDES + 'drawn_as = "dflash"\ndraws = 4\n'
    sections += ENTRY.format(name="dflash-sliding-data", kind="parametric") + SLIDES
    path.write_text(text.replace("[drafter]", sections + "[drafter]"))
    command(maskgen, "build", path)
    return folder


@pytest.fixture(scope="module")
def trained(root):
    return command(train, "--config", root / "run.toml", *LAYERS)


def test_training_says_which_layers_slide_and_builds_nothing(root, trained):
    assert "after freeze: 0 compiles, 0 FX traces, 0 host mask builds, 6 steps" in trained.stdout
    assert "sliding full, window 12" in trained.stdout
    rows = read_metrics(root / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "heldout_tau" in row] == [3, 6]


def test_the_folder_is_read_alike_by_a_reader_of_its_own(root, trained):
    folder = root / "run" / "drafter"
    config = json.loads((folder / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert (config["sliding_window"], config["use_sliding_window"]) == (12, True)
    target = Target.load(str(root / "target"), device=torch.device("cpu"), dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(root / "target", dtype=torch.float32).eval()
    prompt = [1 + i % 24 for i in range(30)]
    found = DraftSession(target, load_published(folder, dtype=torch.float32)).first_block(prompt)
    plain = first_block(folder, model, prompt)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-4)
    for wrong in ("window one more", "window one less", "sliding both ways", "sliding as full"):
        moved = (first_block(folder, model, prompt, wrong) - found).abs().max()
        assert moved > 10 * (plain - found).abs().max(), wrong


def test_it_is_evaluated_exported_and_drafts_the_targets_own_text(root, trained):
    run = ("--config", root / "run.toml", *LAYERS)
    result = json.loads(command(evaluate, *run, "--json").stdout)
    assert result["exact"] is True
    command(export, *run, "--out", root / "again")
    held, again = (
        (folder / "model.safetensors").read_bytes()
        for folder in (root / "run" / "drafter", root / "again")
    )
    assert held == again
    said = command(
        generate,
        "--drafter",
        root / "again",
        "--prompt",
        "tell me",
        "--max-new-tokens",
        20,
        "--json",
    )
    assert json.loads(said.stdout)["text"]


def test_a_run_that_says_nothing_of_layers_is_another_run(root, trained):
    done = command(train, "--config", root / "run.toml", code=1)
    assert 'drafter.layers ["sliding", "full"] -> []' in done.stderr


@pytest.mark.parametrize("door", [prepare, train])
def test_a_window_without_its_masks_is_refused_at_the_first_door(root, trained, door):
    other = ("--set", "drafter.sliding_window=20")
    done = command(door, "--config", root / "run.toml", *LAYERS, *other, code=2)
    assert "window must be 20, and is 12" in done.stderr
