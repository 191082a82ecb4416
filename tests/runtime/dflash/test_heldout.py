"""tau on held-out text while a run trains, against a plain fp64 drafter at every position."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime.data.dataset import Sample, write_dataset
from runtime.dflash.step.heldout import whole_blocks
from runtime.errors import ConfigError, NoSamplesError
from runtime.training.checkpoint import find_checkpoints
from runtime.training.metrics import read_metrics
from runtime.training.saved_state import master_weights
from tests.runtime.reference_step import Reference
from tests.runtime.tiny_run import (
    HIDDEN,
    LAYERS,
    VOCAB,
    build_masks,
    first_drafter,
    frozen_target,
    inputs_of,
    make_config,
    make_trainer,
    network_of,
)

TOKENS = 3
"""Different tokens in the data: few, so that drafts are right at times, and in a row."""
BLOCK = 4
# Supervised from, to: several answers in a sample, more anchors than a row has, answers shorter
# than a block, none, an answer at the very end, and lengths at and off the buckets of 16 and 32.
HELDOUT = [
    (14, [(4, 14)]),
    (16, [(3, 7), (9, 16)]),
    (9, [(6, 9)]),
    (12, []),
    (32, [(1, 32)]),
    (27, [(2, 8), (20, 27)]),
    (3, [(0, 3)]),
    (21, [(17, 21)]),
]

SLIDING = {"num_layers": 2, "layers": ["full", "sliding"], "sliding_window": 5}
MARKOV = {"markov_rank": 5}


@pytest.fixture(autouse=True)
def quiet(capsys):
    yield
    capsys.readouterr()


def samples_of(layout, stored, seed):
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length, answers in layout:
        loss_mask = torch.zeros(length, dtype=torch.uint8)
        for start, stop in answers:
            loss_mask[start:stop] = 1
        input_ids = torch.randint(TOKENS, (length,), generator=generator).int()
        features = torch.randn(length, HIDDEN * len(LAYERS), generator=generator).bfloat16()
        features = features if stored else None
        samples.append(
            Sample(input_ids=input_ids, loss_mask=loss_mask, prompt_len=1, features=features)
        )
    return samples


def online_features(input_ids):
    generator = torch.Generator().manual_seed(17)
    table = torch.randn(VOCAB, HIDDEN * len(LAYERS), generator=generator)
    return table[input_ids].cumsum(dim=1) / 3


def target_of(stored):
    """Its head prefers the tokens of the data."""
    target = frozen_target()
    head = target.head_weight.clone()
    head[TOKENS:] /= 5
    return replace(target, head_weight=head, features=None if stored else online_features)


def make_data(folder, stored=True, heldout=HELDOUT):
    layout = [(length, [(3, length)]) for length in (14, 30, 16, 27, 32, 9)]
    meta = {
        "features": "stored" if stored else "online",
        "context": 32,
        "layer_ids": list(LAYERS),
        "feature_scale": [1.0, 2.0],
        "target": {"name": "tiny", "digest": "0" * 64},
    }
    held = samples_of(heldout, stored, 23)
    splits = {"train": samples_of(layout, stored, 11), "heldout": held}
    write_dataset(folder, splits, meta)
    return held


def prepared(tmp_path, *, stored=True, heldout=HELDOUT, **sections):
    sections = {"evaluate": {"every": 2}, **sections}
    config = make_config(tmp_path, **sections)
    held = make_data(tmp_path / "data", stored, heldout)
    build_masks(config)
    return config, held


def run(config, stored=True, *, first_step=0, state=None, network=None):
    trainer = make_trainer(config, target=target_of(stored), network=network)
    try:
        trainer.prepare()
        weights = None if state else first_weights(config)
        trainer.start_from(weights=weights, state=state)
        result = trainer.run(first_step)
        return result, read_metrics(trainer.folder / "metrics.jsonl"), trainer.weights()
    finally:
        trainer.teardown()


def first_weights(config):
    """No head is 0, as DSpark's begin."""
    generator = torch.Generator().manual_seed(5)
    weights = first_drafter(network_of(config)).state_dict()
    for name, weight in weights.items():
        if name.startswith("markov_head."):
            weight.normal_(generator=generator)
    return weights


def plain_tau(weights, samples, stored, network):
    """Sums of every sample, at one position after another, slot by slot as decoding drafts."""
    target = target_of(stored)
    reference = Reference(
        weights,
        embed=target.embed_weight,
        head=target.head_weight,
        feature_scale=[1.0, 2.0],
        network={
            "heads": network.num_attention_heads,
            "kv_heads": network.num_key_value_heads,
            "head_dim": network.head_dim,
            "layers": network.num_hidden_layers,
            "block": BLOCK,
            "mask_id": network.mask_token_id,
            "theta": network.rope_theta,
            "eps": network.rms_norm_eps,
            "embedding_scale": network.embedding_scale,
            "from_anchor": network.sample_from_anchor,
            "windows": [network.sliding_window if slides else None for slides in network.slides],
        },
        train={},
    )
    sums = []
    for sample in samples:
        ids, supervised = sample.input_ids.tolist(), sample.loss_mask.tolist()
        features = sample.features if stored else online_features(sample.input_ids[None])[0]
        memory = reference.memory(reference.fused(features))
        tokens = blocks = 0
        reach = BLOCK + network.sample_from_anchor
        for anchor in range(len(ids) - reach + 1):
            if not all(supervised[anchor : anchor + reach]):
                continue
            drafts = reference.decode(memory, ids[anchor], anchor)
            blocks, tokens = blocks + 1, tokens + 1
            for slot in range(1, reach):
                if drafts[slot] != ids[anchor + slot]:
                    break
                tokens += 1
        if blocks:
            sums.append((tokens, blocks))
    return np.array(sums, dtype=float)


def plain_interval(sums, seed):
    """A bootstrap with other draws, and many more of them."""
    generator = np.random.default_rng(seed + 1)
    found = []
    for _ in range(20_000):
        tokens, blocks = sums[generator.choice(len(sums), len(sums))].sum(axis=0)
        found.append(tokens / blocks)
    return np.percentile(found, [2.5, 97.5])


def scores(rows):
    return [row for row in rows if "heldout_tau" in row]


@pytest.mark.parametrize(
    ("stored", "anchors", "devices", "drafter"),
    [
        (True, "layouts", "cpu", {}),
        (False, "data", "cpu", {}),
        (True, "data", "cpu,cpu", {}),
        (True, "layouts", "cpu", SLIDING),
        (True, "data", "cpu", {**SLIDING, "layers": ["sliding", "sliding"]}),
        (True, "data", "cpu", MARKOV),
        (False, "layouts", "cpu,cpu", MARKOV),
        (True, "layouts", "cpu", {**SLIDING, **MARKOV}),
    ],
)
def test_it_is_tau_of_a_plain_drafter_over_all_positions(
    tmp_path, stored, anchors, devices, drafter
):
    """With a Markov head, too, where the score takes the true tokens before, and decoding its own
    drafts: up to the first wrong one they are the same."""
    train = {"anchors": anchors, "steps": 5, "save_every": 2}
    config, held = prepared(
        tmp_path, stored=stored, train=train, run={"devices": devices}, drafter=drafter
    )
    result, rows, weights = run(config, stored)
    assert "0 compiles, 0 FX traces, 0 host mask builds, 5 steps" in result.summary
    found = scores(rows)
    assert [row["step"] for row in found] == [2, 4, 5]
    saved = {item.step: item for item in find_checkpoints(tmp_path / "run" / "checkpoints")}
    for row, after in (
        (found[1], master_weights(saved[4].load())),
        (found[2], weights),
    ):
        sums = plain_tau(after, held, stored, network_of(config))
        assert len(sums) == 5
        tokens, blocks = sums.sum(axis=0)
        assert row["heldout_tau"] == pytest.approx(tokens / blocks, abs=1e-12)
        low, high = plain_interval(sums, 1)
        assert row["heldout_low"] == pytest.approx(low, abs=0.03)
        assert row["heldout_high"] == pytest.approx(high, abs=0.03)
        assert row["heldout_low"] < row["heldout_tau"] < row["heldout_high"]
    assert found[2]["heldout_tau"] > 1
    assert result.scores["held-out tau"].startswith(f"{found[2]['heldout_tau']:.3f} (")
    assert result.scores["scoring"].startswith("3 times, ")


@pytest.mark.parametrize("anchors", ["layouts", "data"])
def test_a_block_that_drafts_from_its_anchor_reaches_one_token_further(tmp_path, anchors):
    config, held = prepared(
        tmp_path, train={"anchors": anchors}, evaluate={"every": 6}, drafter=MARKOV
    )
    network = replace(network_of(config), sample_from_anchor=True)
    _, rows, weights = run(config, network=network)
    tokens, blocks = plain_tau(weights, held, True, network).sum(axis=0)
    shorter = plain_tau(weights, held, True, network_of(config)).sum(axis=0)
    assert blocks < shorter[1]
    assert scores(rows)[0]["heldout_tau"] == pytest.approx(tokens / blocks, abs=1e-12)


def test_only_so_many_samples(tmp_path):
    config, held = prepared(tmp_path, evaluate={"every": 6, "samples": 2})
    _, rows, weights = run(config)
    tokens, blocks = plain_tau(weights, held[:2], True, network_of(config)).sum(axis=0)
    assert scores(rows)[0]["heldout_tau"] == pytest.approx(tokens / blocks, abs=1e-12)


def test_scores_change_nothing_else(tmp_path):
    """Rows and weights of a run that is scored are those of one that is not."""
    runs = []
    for name, every in (("off", 0), ("on", 1)):
        (tmp_path / name).mkdir()
        config, _ = prepared(tmp_path / name, evaluate={"every": every})
        runs.append((inputs_of(config).fingerprint, *run(config)[1:]))
    (off, off_rows, off_weights), (on, on_rows, on_weights) = runs
    assert off == on
    assert not scores(off_rows)
    timed = ("step_ms", "tokens_per_s")
    plain = [
        [{k: v for k, v in row.items() if k not in timed} for row in rows if "loss" in row]
        for rows in (off_rows, on_rows)
    ]
    assert plain[0] == plain[1]
    assert len(plain[0]) == 6
    for name, weight in off_weights.items():
        assert torch.equal(weight, on_weights[name]), name


def test_a_resume_scores_the_same_steps_alike(tmp_path):
    config, _ = prepared(tmp_path)
    _, rows, _ = run(config)
    step_3 = find_checkpoints(tmp_path / "run" / "checkpoints")[1]
    assert step_3.step == 3
    _, again, _ = run(config, first_step=3, state=step_3.load())
    assert scores(again) == scores(rows)
    assert [row["step"] for row in scores(rows)] == [2, 4, 6]


def test_masks_that_take_any_anchors_are_asked_for(tmp_path):
    config, _ = prepared(tmp_path)
    config.masks["entry"].pop()
    message = r"evaluate\.every = 2: needs entries 'dflash-data' in \[masks\], of kind 'parametric'"
    with pytest.raises(ConfigError, match=message):
        inputs_of(config)


def test_masks_of_other_blocks_will_not_do(tmp_path):
    config, _ = prepared(tmp_path)
    config.masks["entry"][1]["draft_block_size"] = 8
    with pytest.raises(ConfigError, match=r"evaluate\.every = 2: needs entries 'dflash-data'"):
        inputs_of(config)


def test_features_from_afar_are_refused(tmp_path):
    config, _ = prepared(tmp_path, stored=False, run={"target_devices": "cpu"})
    with pytest.raises(ConfigError, match=r"evaluate\.every = 2: .* in scoring held-out text with"):
        inputs_of(config)


@pytest.mark.parametrize(
    ("heldout", "message"),
    [
        ([], r"must hold held-out samples to score; set data\.heldout and run"),
        ([(12, [(4, 7)])], r"must hold a held-out sample to score; .* \(without 4 supervised"),
    ],
)
def test_nothing_to_score_is_refused(tmp_path, heldout, message):
    config, _ = prepared(tmp_path, heldout=heldout)
    with pytest.raises(NoSamplesError, match=message):
        make_trainer(config, target=target_of(True))


@pytest.mark.parametrize(
    ("loss_mask", "wanted"),
    [
        ("", []),
        ("111", []),
        ("1111", [0]),
        ("0111110", [1, 2]),
        ("1110111", []),
        ("111101111", [0, 5]),
    ],
)
def test_where_a_whole_block_is_supervised(loss_mask, wanted):
    mask = np.array([int(digit) for digit in loss_mask], dtype=np.uint8)
    assert whole_blocks(mask, 4).tolist() == wanted
