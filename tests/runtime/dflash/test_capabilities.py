"""The table of what cannot be done yet: every row, the doors that ask it, and what it lets pass."""

import re
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from maskgen.families import families
from maskgen.spec import read_specs
from runtime import evaluate, export, prepare, train
from runtime.config import parse_config
from runtime.dflash.capabilities import (
    DECODING,
    FREE,
    HIDDEN_STATES,
    LIMITS,
    Request,
    check_request,
)
from runtime.dflash.settings import DFlashConfig
from runtime.dflash.start.initialise import drafter_config as drafter_shape
from runtime.dflash.step.buckets import run_specs
from runtime.errors import ConfigError
from runtime.ranks.devices import Placement
from runtime.target.outline import TargetOutline
from runtime.training.limits import SHARING
from tests.runtime.tiny_llama import tiny_model, tiny_tokenizer

GPU = Placement((torch.device("cuda", 0),), torch.bfloat16, 1)
CPU = Placement((torch.device("cpu"),), torch.float32, 1)
ENTRY = {
    "name": "dflash",
    "family": "dflash",
    "kind": "layouts",
    "context": [128, 384],
    "anchors": 32,
    "draft_block_size": 4,
}
OTHER_VALUES = {
    "layer": [{"layer": "sliding", "window": 8}],
    "in_block": [{"in_block": "causal"}],
    "window": [{"layer": "sliding", "window": 300, "in_block": "bidirectional"}],
}
"""For each parameter of the family that a drafter does not follow yet, entries that say it."""


def asked(*entries, placement=CPU, ranks=1, features=None, block_size=128, **sections):
    entries = entries or (ENTRY,)
    raw = {"masks": {"BLOCK_SIZE": block_size, "entry": list(entries)}, **sections}
    config = parse_config(raw, DFlashConfig)
    specs = {spec.KV_LEN - spec.Q_LEN: spec for spec in read_specs(raw)}
    return Request(config=config, specs=specs, placement=placement, ranks=ranks, features=features)


def test_a_plain_run_passes_on_both_kinds_of_device():
    for placement in (CPU, GPU, None):
        check_request(asked(placement=placement))
        check_request(asked({**ENTRY, "in_block": "bidirectional"}, placement=placement))


@pytest.mark.parametrize("param", [p.name for p in families["dflash"].params if p.name not in FREE])
def test_every_parameter_that_a_drafter_does_not_follow_is_refused(param):
    assert OTHER_VALUES[param], "a new parameter needs an entry here"
    for values in OTHER_VALUES[param]:
        for kind in ("layouts", "parametric"):
            section = {"train": {"anchors": "data" if kind == "parametric" else "layouts"}}
            request = asked({**ENTRY, "kind": kind, **values}, **section)
            with pytest.raises(
                ConfigError, match=r"masks\.entry\.\w+ = .*: is not possible yet in "
            ):
                check_request(request)
            with pytest.raises(ConfigError, match=r"masks\.entry"):
                check_request(request, (DECODING,))
            check_request(request, (SHARING,))


@pytest.mark.parametrize(
    ("request_", "field", "message"),
    [
        (asked({**ENTRY, "kind": "parametric"}), "train.masks", "dflash, parametric"),
        (
            asked({"name": "dflash", "family": "causal", "Q_LEN": 128, "KV_LEN": 256}),
            "train.masks",
            "causal, static",
        ),
        (asked(train={"anchors": "data"}), "train.masks", "parametric where it is 'data'"),
        (
            asked({**ENTRY, "draft_block_size": 1}),
            "masks.entry.draft_block_size",
            "= 1: .*at least 2",
        ),
        (
            asked(
                {**ENTRY, "context": 128},
                {**ENTRY, "name": "b", "context": 384, "draft_block_size": 8},
            ),
            "train.masks",
            r"\{'draft_block_size': \[4, 8\]\}",
        ),
        (
            asked(
                {**ENTRY, "context": [128, 256]},
                {**ENTRY, "name": "b", "context": 384, "convention": "vllm"},
            ),
            "train.masks",
            r"\{'convention': \['specforge', 'vllm'\]\}",
        ),
        (asked(placement=GPU, block_size=64), "masks.BLOCK_SIZE", r"= \[64, 64\]: .*= 128"),
        (asked(placement=GPU, block_size=[128, 96]), "masks.BLOCK_SIZE", r"\[128, 96\]"),
        (asked(placement=GPU, block_size=256), "masks.BLOCK_SIZE", r"\[256, 256\]"),
        (asked(ranks=3), "train.global_batch", "= 4: .*multiple of the number of devices, 3"),
        (
            asked(ranks=2, train={"accumulate": 4}),
            "train.global_batch",
            r"= 4: .*multiple of the number of devices times train\.accumulate, 2 x 4",
        ),
        (
            asked(features="stored", run={"target_devices": "cuda:1"}),
            "run.target_devices",
            "= 'cuda:1': .*online",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(request_, field, message):
    request_ = replace(request_, torch_version="2.13.0")
    with pytest.raises(ConfigError, match=message) as caught:
        check_request(request_)
    assert caught.value.field == field


def test_contexts_are_those_that_the_targets_positions_reach():
    tokenizer = tiny_tokenizer()
    for positions in (384, 383):
        model = tiny_model(max_position_embeddings=positions)
        outline = TargetOutline(model, tokenizer, name="tiny")
        request = replace(asked(drafter={"init": "random"}), outline=outline)
        if positions == 384:
            check_request(request)
            continue
        with pytest.raises(ConfigError, match="384, of the target's 383"):
            check_request(request)


def test_a_door_that_asks_for_some_parts_only_takes_entries_of_any_family():
    static = {"name": "dflash", "family": "causal", "Q_LEN": 128, "KV_LEN": 256}
    check_request(asked(static), (DECODING,))
    with pytest.raises(ConfigError, match=r"train\.masks"):
        check_request(asked(static))


def test_what_a_gpu_cannot_do_a_cpu_can():
    for size in (16, 64, 256):
        check_request(replace(asked(block_size=size), torch_version="2.11.0"))
        with pytest.raises(
            ConfigError, match="is not possible yet in attention on a GPU; set masks"
        ):
            check_request(asked(block_size=size, placement=GPU))
        check_request(replace(asked(block_size=size, placement=GPU), torch_version="2.14.0"))


def test_target_devices_are_taken_where_they_have_work():
    check_request(asked(features="online", run={"target_devices": "cuda:1"}))
    check_request(asked(features="stored"))


def test_a_batch_that_devices_cannot_share_is_refused_in_a_sentence():
    with pytest.raises(ConfigError) as caught:
        check_request(replace(asked(train={"global_batch": 5}), ranks=3))
    assert str(caught.value) == (
        "train.global_batch = 5: is not possible yet in sharing a batch among devices; it must be "
        "a multiple of the number of devices, 3"
    )


def test_every_rule_can_be_said():
    for limit in LIMITS:
        error = limit.error("x", asked())
        assert re.fullmatch(r"[\w.]+ = 'x': is not possible yet in .+; [^{}]+", str(error)), error


def run_file(tmp_path, **changes):
    entry = "\n".join(f"{key} = {value!r}" for key, value in {**ENTRY, **changes}.items())
    path = tmp_path / "my.toml"
    path.write_text(f"[data]\nfolder = 'data'\n[masks]\n[[masks.entry]]\n{entry}\n")
    return str(path)


@pytest.mark.parametrize("command", [prepare, train, evaluate, export])
def test_every_command_asks_before_it_reads_anything(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    path = run_file(tmp_path, layer="sliding", window=8)
    result = CliRunner().invoke(command.main, ["--config", path, "--set", "run.devices=cpu"])
    assert result.exit_code == 2, result.output
    assert "masks.entry.layer = 'sliding'" in result.stderr
    assert sorted(tmp_path.iterdir()) in (
        [tmp_path / "my.toml"],
        # The run folder that a training command keeps for itself.
        [tmp_path / "my.toml", tmp_path / "runs"],
    )


@pytest.mark.parametrize("command", [prepare, train])
def test_what_ranks_cannot_share_is_refused_before_data_are_prepared(
    tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    settings = ["--set", "run.devices=cpu,cpu,cpu"]
    result = CliRunner().invoke(command.main, ["--config", run_file(tmp_path), *settings])
    assert result.exit_code == 2, result.output
    assert "multiple of the number of devices, 3" in result.stderr


def test_specs_of_a_run_are_those_of_its_own_name():
    other = {**ENTRY, "name": "other", "in_block": "causal"}
    request = asked(ENTRY)
    config = parse_config({"masks": {"entry": [ENTRY, other]}}, DFlashConfig)
    assert run_specs(config) == request.specs
    check_request(Request(config=config, specs=run_specs(config)))


@pytest.fixture(scope="module")
def outline():
    """Of a Llama of six layers and 256 positions, on the meta device."""
    return TargetOutline(tiny_model().to("meta"), tiny_tokenizer(), name="tiny")


def drafter_of(outline, layers):
    shape = {"num_layers": layers, "draft_block_size": 4, "target_layer_ids": (1, 3)}
    return drafter_shape(outline, **shape, embedding="rows")


def test_a_target_that_can_do_all_that_is_asked(outline):
    short = {**ENTRY, "context": 256}
    request = replace(asked(short, drafter={"num_layers": 6}), outline=outline)
    check_request(request)
    check_request(replace(request, network=drafter_of(outline, 6)))


def test_contexts_end_where_the_targets_positions_do(outline):
    with pytest.raises(ConfigError, match=r"masks\.entry\.context = .*384, of the target's 256"):
        check_request(replace(asked(), outline=outline))


def test_a_drafter_starts_from_as_many_layers_as_there_are(outline):
    short = {**ENTRY, "context": 256}
    many = replace(asked(short, drafter={"num_layers": 7}), outline=outline)
    with pytest.raises(
        ConfigError, match=r"drafter\.num_layers = 7: .* in starting from the target's"
    ):
        check_request(many)
    random = asked(short, drafter={"num_layers": 7, "init": "random"})
    check_request(replace(random, outline=outline, network=drafter_of(outline, 7)))


def test_a_teacher_needs_a_norm_before_its_head(outline):
    short = {**ENTRY, "context": 256}
    bare = TargetOutline(tiny_model().to("meta"), tiny_tokenizer(), name="tiny")
    bare.final_norm = None
    request = asked(short, train={"distill": "kl"})
    check_request(replace(request, outline=outline))
    check_request(replace(asked(short), outline=bare))
    with pytest.raises(
        ConfigError, match=r"train\.distill = 'kl': .* distilling .* must be 'none'"
    ):
        check_request(replace(request, outline=bare))


def test_layers_unlike_a_drafters_can_be_read_but_not_started_from():
    model = tiny_model(hidden_act="gelu").to("meta")
    outline = TargetOutline(model, tiny_tokenizer(), name="tiny")
    short = {**ENTRY, "context": 256}
    request = replace(asked(short), outline=outline, network=drafter_of(outline, 2))
    with pytest.raises(ConfigError, match=r"drafter\.init = .*its activation is gelu.*random"):
        check_request(request)
    check_request(request, (HIDDEN_STATES, DECODING))
    config = parse_config({"drafter": {"init": "random"}}, DFlashConfig)
    check_request(replace(request, config=config))


def test_a_model_that_cannot_be_rewound_is_no_target():
    model = tiny_model().to("meta")
    model._is_stateful = True
    outline = TargetOutline(model, tiny_tokenizer(), name="tiny")
    for parts in (None, (DECODING,), (HIDDEN_STATES,)):
        with pytest.raises(ConfigError, match=r"target\.model = 'tiny: LlamaFor.* rewound"):
            check_request(replace(asked({**ENTRY, "context": 256}), outline=outline), parts)
