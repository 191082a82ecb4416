"""Runs against an independent fp64 reference: what is logged, and the weights after the steps."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from maskgen.families.answer_windows import answer_windows
from runtime.data.dataset import Sample, write_dataset
from runtime.dflash.loss import vocabulary
from runtime.dflash.start.initialise import random_start
from runtime.dflash.step.anchors import LayoutChooser, draw_anchors
from runtime.training.metrics import read_metrics
from runtime.training.replica import Replica
from runtime.training.target_worker import RemoteTarget
from tests.runtime.reference_step import Reference
from tests.runtime.tiny_run import (
    HIDDEN,
    LAYERS,
    VOCAB,
    build_masks,
    frozen_target,
    inputs_of,
    make_config,
    make_trainer,
    network_of,
)

SCALE = [1.0, 2.0]
TOKENS = torch.tensor([2, 5, 9])
"""All tokens of the data: few, so that drafts are right at times, and in a row."""
COMMON = 4
"""Ids below it are among the tokens that are seen, whatever the data hold."""
# Supervised from, to; several answers in a sample, an unsupervised one, one of a single token,
# and lengths at and off the buckets of 16 and 32 tokens.
SAMPLES = [
    (14, [(4, 14)]),
    (16, [(3, 7), (9, 16)]),
    (9, [(5, 9)]),
    (12, []),
    (27, [(2, 8), (20, 27)]),
    (32, [(16, 32)]),
    (21, [(20, 21)]),
    (30, [(6, 12), (13, 14), (15, 29)]),
]


@pytest.fixture(autouse=True)
def quiet(capsys):
    yield
    capsys.readouterr()


def make_samples(stored, last=False):
    generator = torch.Generator().manual_seed(11)
    samples = []
    for length, answers in SAMPLES:
        loss_mask = torch.zeros(length, dtype=torch.uint8)
        for start, stop in answers:
            loss_mask[start:stop] = 1
        input_ids = TOKENS[torch.randint(len(TOKENS), (length,), generator=generator)].int()
        features = torch.randn(length, HIDDEN * len(LAYERS), generator=generator).bfloat16()
        if last:
            hidden = online_features(input_ids[None], last=True)[0, :, -HIDDEN:]
            features = torch.cat((features, hidden.bfloat16()), dim=1)
        samples.append(
            Sample(
                input_ids=input_ids,
                loss_mask=loss_mask,
                prompt_len=1,
                features=features if stored else None,
            )
        )
    return samples


def first_weights(network):
    """Norms that are no ones, so that none can stand for another; no head is 0."""
    generator = torch.Generator().manual_seed(13)
    drafter = random_start(network, torch.Generator().manual_seed(3))
    return {
        name: weight.detach() + 0.3 * torch.randn(weight.shape, generator=generator)
        for name, weight in drafter.state_dict().items()
    }


def online_features(input_ids, last=False):
    """A target of sums over tokens, exact in no 16 bits; its last hidden state behind them."""
    generator = torch.Generator().manual_seed(17)
    table = torch.randn(VOCAB, HIDDEN * (len(LAYERS) + 1), generator=generator)
    found = table[input_ids].cumsum(dim=1) / 3
    return found if last else found[..., : HIDDEN * len(LAYERS)]


def whole_target():
    """Its head prefers the tokens of the data."""
    target = frozen_target()
    head = target.head_weight / 5
    head[TOKENS] *= 5
    return replace(target, head_weight=head)


def parts(where, last):
    target, features = whole_target(), partial(online_features, last=last)
    if where == "online":
        return replace(target, features=features), ()
    if where == "remote":
        remote = RemoteTarget(torch.device("cpu"), features)
        return replace(target, remote_dtype=torch.float32), (remote,)
    return target, ()


def run(tmp_path, monkeypatch, config, where, network):
    """Train; gives the totals of every step, the rows of the log and the last weights."""
    last = config.train.distill != "none"
    samples = make_samples(where == "stored", last)
    meta = {
        "features": "stored" if where == "stored" else "online",
        "context": 32,
        "layer_ids": list(LAYERS),
        "feature_scale": SCALE,
        "target": {"name": "tiny", "digest": "0" * 64},
    }
    if last and where == "stored":
        meta["stored_layer_ids"] = [*LAYERS, network.num_target_layers]
    write_dataset(tmp_path / "data", {"train": samples, "heldout": samples[:1]}, meta)
    build_masks(config)
    totals, read = [], Replica.read_totals

    def spy(replica):
        totals.append(read(replica))
        return totals[-1]

    monkeypatch.setattr(Replica, "read_totals", spy)
    target, remote = parts(where, last)
    trainer = make_trainer(config, target=target, remote_targets=remote, network=network)
    try:
        trainer.prepare()
        trainer.start_from(weights=first_weights(network))
        trainer.run()
        return totals, read_metrics(tmp_path / "run" / "metrics.jsonl"), trainer.weights()
    finally:
        trainer.teardown()


def reference_of(config, network):
    target, train = whole_target(), config.train
    return Reference(
        first_weights(network),
        embed=target.embed_weight,
        head=target.head_weight,
        feature_scale=SCALE,
        network={
            "heads": network.num_attention_heads,
            "kv_heads": network.num_key_value_heads,
            "head_dim": network.head_dim,
            "layers": network.num_hidden_layers,
            "block": 4,
            "mask_id": network.mask_token_id,
            "theta": network.rope_theta,
            "eps": network.rms_norm_eps,
            "embedding_scale": network.embedding_scale,
            "from_anchor": network.sample_from_anchor,
            "windows": [network.sliding_window if slides else None for slides in network.slides],
        },
        train={
            "lr": train.lr,
            "min_lr_ratio": train.min_lr_ratio,
            "warmup": round(train.steps * train.warmup_ratio),
            "steps": train.steps,
            "betas": (train.beta1, train.beta2),
            "weight_decay": train.weight_decay,
            "clip": train.clip,
            "gamma": train.gamma,
            "dpace_alpha": train.dpace_alpha if train.loss == "dpace" else None,
            "distill": None if train.distill == "none" else (train.distill, train.distill_share),
            "tokens": [0, 1, 2, 3, 5, 9] if train.softmax == "seen" else None,
        },
    )


def batches(config, stored):
    """Samples and drawn anchors of every step; what is drawn has tests of its own."""
    last = config.train.distill != "none"
    samples = make_samples(True, last)
    session, seed = inputs_of(config, "run.toml"), config.run.seed
    for number in range(config.train.steps):
        # Epoch and step counted here: the plan's own words are not taken for it.
        step, epoch = session.plan[number], number // session.plan.steps_per_epoch
        entry, batch = session.entries[step.bucket], []
        for index in step.rows:
            if index < 0:
                continue
            sample = samples[index]
            key = {"seed": seed, "epoch": epoch, "sample": index}
            if config.train.anchors == "layouts":
                drawn, used = (entry.params[name].numpy() for name in ("anchors", "n_valid"))
                said = entry.spec.params
                windows = answer_windows(said["answer_starts"], said["answer_ends"])
                chooser = LayoutChooser(windows, said["draws"])
                layout = chooser.choose(sample.loss_mask.numpy(), **key)
                anchors = drawn[layout][: used[layout]].tolist()
            else:
                drawn, used = draw_anchors(sample.loss_mask.numpy(), 6, **key)
                anchors = drawn[:used].tolist()
            features = sample.features
            if not stored:
                features = online_features(sample.input_ids[None], last)[0]
            ids, supervised = sample.input_ids.tolist(), sample.loss_mask.tolist()
            batch.append((ids, supervised, features, anchors))
        yield batch


close = partial(pytest.approx, rel=1e-4, abs=1e-6)

TRAIN = {"steps": 6, "global_batch": 2, "save_every": 100, "lr": 3e-3, "warmup_ratio": 0.3}
CASES = {
    "clipped": ("stored", "cpu", {"anchors": "data", "gamma": 2.0, "clip": 0.1}),
    "decayed": (
        "online",
        "cpu",
        {"anchors": "data", "clip": 0.0, "weight_decay": 0.3, "min_lr_ratio": 0.2, "gamma": 0.0},
    ),
    "layouts": (
        "stored",
        "cpu,cpu",
        {"global_batch": 4, "steps": 4, "gamma": 1.5, "clip": 100.0, "weight_decay": 0.1},
    ),
    "two ranks": (
        "remote",
        "cpu,cpu",
        {"anchors": "data", "global_batch": 4, "steps": 4, "clip": 1.0, "beta1": 0.7},
    ),
    "summed as computed": (
        "stored",
        "cpu,cpu",
        {"anchors": "data", "reduce_dtype": "compute", "clip": 0.5, "beta2": 0.8, "steps": 3},
    ),
    "added up": (
        "stored",
        "cpu",
        {"anchors": "data", "accumulate": 4, "global_batch": 4, "steps": 4, "clip": 0.3},
    ),
    "added up and summed as computed": (
        "online",
        "cpu,cpu",
        {"accumulate": 2, "global_batch": 4, "steps": 4, "reduce_dtype": "compute", "gamma": 2.0},
    ),
    "added up from afar": (
        "remote",
        "cpu,cpu",
        {"anchors": "data", "accumulate": 3, "global_batch": 6, "steps": 3, "clip": 1.0},
    ),
    "dpace": (
        "stored",
        "cpu",
        {"anchors": "data", "loss": "dpace", "dpace_alpha": 0.3, "accumulate": 2, "clip": 0.3},
    ),
    "sliding": ("stored", "cpu", {"gamma": 2.0, "clip": 0.5}),
    "sliding over data anchors": ("online", "cpu,cpu", {"anchors": "data", "global_batch": 4}),
    "dpace on two ranks": (
        "online",
        "cpu,cpu",
        {"global_batch": 4, "steps": 4, "loss": "dpace", "weight_decay": 0.1},
    ),
    "distilled": (
        "stored",
        "cpu",
        {"anchors": "data", "distill": "l1", "gamma": 2.0, "clip": 0.1},
    ),
    "distilled on two ranks": (
        "remote",
        "cpu,cpu",
        {"anchors": "data", "global_batch": 4, "steps": 4, "distill": "kl", "distill_share": 0.6},
    ),
    "distilled with dpace": (
        "online",
        "cpu",
        {"loss": "dpace", "distill": "lk", "distill_share": 1.0, "clip": 0.2},
    ),
    "markov": ("stored", "cpu", {"anchors": "data", "gamma": 2.0, "clip": 0.2}),
    "markov on two ranks": (
        "remote",
        "cpu,cpu",
        {"accumulate": 2, "global_batch": 4, "steps": 4, "weight_decay": 0.1, "clip": 0.2},
    ),
    "markov distilled": (
        "stored",
        "cpu",
        {"anchors": "data", "distill": "l1", "gamma": 2.0, "clip": 0.1, "accumulate": 2},
    ),
    "markov and confidence": (
        "stored",
        "cpu",
        {"anchors": "data", "distill": "l1", "gamma": 2.0, "weight_decay": 0.2, "clip": 0.5},
    ),
    "markov and confidence with dpace": (
        "remote",
        "cpu,cpu",
        {"loss": "dpace", "distill": "kl", "global_batch": 4, "accumulate": 2, "clip": 0.5},
    ),
    "markov from the anchor, with confidence": (
        "stored",
        "cpu",
        {"anchors": "data", "distill": "l1", "gamma": 2.0, "accumulate": 2, "clip": 0.5},
    ),
    "markov from the anchor, with dpace": (
        "online",
        "cpu,cpu",
        {"loss": "dpace", "global_batch": 4},
    ),
    "seen": ("stored", "cpu", {"anchors": "data", "softmax": "seen", "gamma": 2.0, "clip": 0.2}),
    "markov over seen tokens": (
        "remote",
        "cpu,cpu",
        {"softmax": "seen", "global_batch": 4, "accumulate": 2, "weight_decay": 0.1, "clip": 0.2},
    ),
    "markov over seen tokens, with dpace": (
        "stored",
        "cpu",
        {"anchors": "data", "softmax": "seen", "loss": "dpace", "clip": 0.2},
    ),
    "markov with dpace": ("online", "cpu", {"loss": "dpace", "reduce_dtype": "compute"}),
}
RANK = 5
SLIDING = {"layers": ["full", "sliding"], "sliding_window": 6}


@pytest.mark.parametrize("case", CASES)
def test_a_run_equals_the_reference(tmp_path, monkeypatch, case):
    monkeypatch.setattr(vocabulary, "COMMON", COMMON)
    where, devices, train = CASES[case]
    drafter = {"num_layers": 2, **SLIDING} if "sliding" in case else {}
    drafter |= {"markov_rank": RANK, "confidence": "confid" in case} if "markov" in case else {}
    config = make_config(
        tmp_path, run={"devices": devices, "seed": 3}, train={**TRAIN, **train}, drafter=drafter
    )
    network = replace(network_of(config), embedding_scale=1.75 if case == "layouts" else 1.0)
    network = replace(network, sample_from_anchor="from the anchor" in case)
    totals, rows, weights = run(tmp_path, monkeypatch, config, where, network)
    reference, clipped = reference_of(config, network), []
    for batch, found, row in zip(batches(config, where == "stored"), totals, rows, strict=True):
        sums = reference.step(batch)
        clipped.append(0 < config.train.clip < reference.grad_norm)
        for name in found:
            if name not in ("steps", "skipped", "skips_in_a_row", "worst_skips_in_a_row"):
                wanted = reference.grad_norm if name == "grad_norm" else sums[name]
                assert found[name] == close(wanted), (name, row["step"])
        assert row["lr"] == close(reference.lr)
        assert row["grad_norm"] == close(reference.grad_norm)
        assert row["skipped"] == 0
        assert row["anchors_per_step"] == sums["anchors_kept"]
        share = {
            "loss": ("loss", "weight"),
            "tau_forced": ("accepted", "blocks"),
            "anchors_kept": ("anchors_kept", "anchors"),
        }
        assert ("overlap" in row) == (config.train.distill != "none")
        if "overlap" in row:
            share["overlap"] = ("overlap", "tokens")
        assert ("confidence_loss" in row) == config.drafter.confidence
        if "confidence_loss" in row:
            share["confidence_loss"] = ("confidence", "weight")
        for name, (over, under) in share.items():
            wanted = sums[over] / sums[under] if sums[under] else None
            assert row[name] == (wanted if wanted is None else close(wanted)), name
        assert row["accuracy"] == [
            sums[f"correct_{slot}"] / sums[f"count_{slot}"] if sums[f"count_{slot}"] else None
            for slot in range(1, reference.drafts + 1)
        ]
    for name, weight in reference.weights.items():
        found, wanted = weights[name].double(), weight.detach()
        # Adam blows up the rounding of the few gradients that are nearly 0.
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, msg=name)
        assert (found - wanted).norm() < 3e-5 * wanted.norm(), name
    assert {"clipped": True, "decayed": False, "layouts": False}.get(case, any(clipped)) == any(
        clipped
    )
