"""A run whose drafter has sliding layers: what it asks of its masks, resumes, and old run files."""

import json
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import cache
from maskgen.entry import load_entry
from runtime.config import parse_config
from runtime.dflash.network.drafter import Drafter
from runtime.dflash.settings import DFlashConfig
from runtime.dflash.step.buckets import sliding_specs
from runtime.dflash.step.samples import bucket_masks, sliding_entry
from runtime.errors import BucketMissingError, ConfigError
from runtime.shaping import shaping_settings
from runtime.static.attention import flex_attention_over
from runtime.training.checkpoint import find_checkpoints
from tests.runtime.tiny_run import (
    build_masks,
    drafter_config,
    inputs_of,
    make_config,
    make_data,
    make_trainer,
    network_of,
    train,
)

LENGTHS = [14, 30, 16, 27, 32, 9]
SLIDING = {"num_layers": 2, "layers": ["sliding", "full"], "sliding_window": 6}


@pytest.fixture(autouse=True)
def quiet(capsys):
    yield
    capsys.readouterr()


def prepared(tmp_path, *, drafter=SLIDING, **sections):
    config = make_config(tmp_path, drafter=drafter, **sections)
    make_data(tmp_path / "data", LENGTHS)
    build_masks(config)
    return config


@pytest.mark.parametrize("anchors", ["layouts", "data"])
def test_nothing_is_built_after_freeze_and_a_resume_is_bit_exact(tmp_path, anchors):
    config = prepared(tmp_path, train={"anchors": anchors}, evaluate={"every": 2})
    result, rows, weights = train(config)
    assert "0 compiles, 0 FX traces, 0 host mask builds, 6 steps" in result.summary
    assert [row["step"] for row in rows if "heldout_tau" in row] == [2, 4, 6]
    saved = {item.step: item for item in find_checkpoints(tmp_path / "run" / "checkpoints")}
    _, again, resumed = train(config, first_step=3, state=saved[3].load())
    timed = ("step_ms", "tokens_per_s")
    untimed = [
        [{k: v for k, v in row.items() if k not in timed} for row in found if "loss" in row]
        for found in (rows, again)
    ]
    assert untimed[0] == untimed[1]
    for name, weight in weights.items():
        assert torch.equal(weight, resumed[name]), name


def test_both_masks_of_a_step_are_over_the_same_draft_blocks(tmp_path):
    inputs = inputs_of(prepared(tmp_path))
    drafter = Drafter(drafter_config())
    for context, entry in inputs.entries.items():
        sliding = sliding_entry(inputs.beside, entry)
        assert sliding.name == f"dflash-sliding/ctx{context}"
        assert sliding.bucket == entry.bucket
        both = [bucket_masks(drafter, which, 2) for which in (entry, sliding)]
        for layouts in ([0, 5], [7, 1]):
            for masks in both:
                masks.update({"layout": torch.tensor(layouts)})
            full, near = (masks.dense() for masks in both)
            anchors, n_valid = (both[0].params[name] for name in ("anchors", "n_valid"))
            assert torch.equal(both[1].params["anchors"], anchors)
            assert not (near & ~full).any()
            for row, drawn in enumerate(anchors):
                for block in range(int(n_valid[row])):
                    for slot in range(4):
                        seen = near[row, 0, block * 4 + slot, :context].nonzero().flatten()
                        anchor = int(drawn[block])
                        first = max(0, anchor + slot - 5)
                        assert seen.tolist() == list(range(first, anchor))


def test_one_compiled_layer_serves_both_masks(tmp_path):
    """Dynamo's count of forms, on the CPU, with the attention that GPUs compile."""
    config = prepared(tmp_path)
    inputs, drafter, counter = inputs_of(config), Drafter(network_of(config)), CompileCounter()
    for layer in drafter.layers:
        layer.compile(fullgraph=True, dynamic=False, backend=counter)
    for done, entry in enumerate(inputs.entries.values(), start=1):
        twin = sliding_entry(inputs.beside, entry)
        masks = [bucket_masks(drafter, which, 1) for which in (entry, twin)]
        full, near = (flex_attention_over(each.block_mask()) for each in masks)
        S = entry.spec.KV_LEN - entry.spec.Q_LEN
        x = torch.randn(1, entry.spec.Q_LEN, drafter.config.hidden_size)
        with torch.no_grad():
            F = torch.randn(1, S, drafter.config.hidden_size)
            positions = torch.arange(entry.spec.Q_LEN)
            for _ in range(2):
                drafter(x, F, torch.arange(S), positions, full, near)
        assert counter.frame_count == done
    assert done == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "other"}, "there is none of the size of 'dflash/ctx16': add it and build"),
        ({"window": 7}, "window must be 6, and is 7"),
        ({"drawn_as": None}, "drawn_as must name 'dflash'"),
        ({"layer": "full", "window": None}, "layer must be sliding, and is full"),
        ({"convention": "speculators"}, "convention must be sglang or vllm"),
        ({"convention": "modelopt"}, "convention must be sglang or vllm"),
        ({"in_block": "bidirectional"}, "convention must be sglang or vllm"),
        ({"BLOCK_SIZE": 32}, r"BLOCK_SIZE must be \[16, 16\], and is \[32, 32\]"),
        ({"kind": "parametric", "draws": None, "drawn_as": None}, "kind must be layouts, and is"),
    ],
)
def test_masks_that_are_not_the_others_twins_are_refused(tmp_path, change, message):
    config = prepared(tmp_path)
    entry = config.masks["entry"][2]
    assert entry["name"] == "dflash-sliding"
    for key, value in change.items():
        entry[key] = value
        if value is None:
            del entry[key]
    needed = r"drafter\.layers = \['sliding', 'full'\]: needs entries 'dflash-sliding' in \[masks\]"
    with pytest.raises(
        ConfigError, match=f"{needed} that are 'dflash' but for .*, drawn_as = 'dflash'; {message}"
    ):
        inputs_of(config)


def test_every_bucket_needs_one(tmp_path):
    config = prepared(tmp_path)
    config.masks["entry"][2]["context"] = 16
    with pytest.raises(ConfigError, match="there is none of the size of 'dflash/ctx32'"):
        inputs_of(config)


def test_scores_need_the_entries_that_take_any_anchors(tmp_path):
    config = prepared(tmp_path, evaluate={"every": 1})
    config.masks["entry"].pop()
    with pytest.raises(ConfigError, match="needs entries 'dflash-sliding-data' in") as caught:
        inputs_of(config)
    assert "drawn_as" not in str(caught.value)
    inputs_of(replace(config, evaluate=replace(config.evaluate, every=0)))


@pytest.mark.parametrize("convention", ["sglang", "vllm", "specforge"])
def test_conventions_with_the_served_cells_will_do(tmp_path, convention):
    config = prepared(tmp_path)
    config.masks["entry"][2] |= {"convention": convention, "in_block": "causal"}
    for heldout, name in (({}, "dflash-sliding"), ({"heldout": True}, "dflash-sliding-data")):
        found = {context: spec.name for context, spec in sliding_specs(config, **heldout).items()}
        assert found == {16: f"{name}/ctx16", 32: f"{name}/ctx32"}


def test_a_cache_without_them_is_named(tmp_path):
    config = prepared(tmp_path)
    config.masks["entry"][2]["window"] = 7
    other = replace(config, drafter=replace(config.drafter, sliding_window=7))
    with pytest.raises(BucketMissingError, match=r"mask .dflash-sliding/ctx16. .* window: asked 7"):
        inputs_of(other)


def test_masks_of_other_layouts_are_refused(tmp_path):
    store = cache.open_store(prepared(tmp_path).cache)
    full, other = (load_entry(store, f"{name}/ctx16") for name in ("dflash", "dflash-sliding"))
    moved = replace(other, params={**other.params, "anchors": other.params["anchors"] + 1})
    with pytest.raises(BucketMissingError, match="must have the anchors of 'dflash/ctx16'"):
        sliding_entry({"sliding": {16: moved}}, full)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"layers": ["sliding"]}, r"layers = \['sliding'\]: must be full or sliding for each of"),
        ({"layers": ["sliding", "flat"], "num_layers": 2}, "must be full or sliding for each of"),
        ({"layers": 3}, "drafter.layers = 3: must be a list of strings"),
        ({"sliding_window": 0}, "sliding_window = 0: must be at least 1"),
        ({"sliding_window": 2**30 + 1}, "sliding_window = 1073741825: must be at most 1073741824"),
    ],
)
def test_layers_that_cannot_be(drafter, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"drafter": drafter}, DFlashConfig)


def test_a_window_below_a_draft_block_is_refused(tmp_path):
    config = make_config(tmp_path, drafter={**SLIDING, "sliding_window": 3})
    with pytest.raises(ConfigError, match="sliding_window = 3: must be at least draft_block_size"):
        sliding_specs(config)
    assert sliding_specs(make_config(tmp_path, drafter={**SLIDING, "sliding_window": 4}))


def test_a_drafter_of_other_layers_than_the_masks_is_refused(tmp_path):
    config = prepared(tmp_path)
    with pytest.raises(ConfigError, match=r"must be the drafter's own, \['full', 'full'\]"):
        make_trainer(config, network=drafter_config())


def test_full_layers_and_a_window_alone_are_a_run_as_before(tmp_path):
    """No further masks are asked for, and what shapes the run does not change."""
    plain = make_config(tmp_path)
    for drafter in ({"layers": ["full"] * 4}, {"sliding_window": 64}):
        config = make_config(tmp_path, drafter=drafter)
        assert sliding_specs(config) == {}
        assert network_of(config) == drafter_config()
    kept = json.loads(json.dumps(plain.as_dict()))
    assert kept["drafter"]["layers"] == []
    for settings in (plain.as_dict(), kept):
        shapes = shaping_settings(settings, DFlashConfig)["drafter"]
        assert shapes.keys().isdisjoint({"layers", "sliding_window"})


def test_the_two_masks_train_another_drafter_than_one(tmp_path):
    """The sliding mask reaches the layer that slides: the loss is another one."""
    found = []
    for name, drafter in (("full", {}), ("sliding", SLIDING)):
        (tmp_path / name).mkdir()
        found.append(train(prepared(tmp_path / name, drafter=drafter))[1][0]["loss"])
    assert abs(found[0] - found[1]) > 1e-3
