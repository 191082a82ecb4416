"""A training run small enough for a test: random target parts, random data, real masks."""

import io
from contextlib import redirect_stderr
from dataclasses import replace

import numpy as np
import torch

import cache
from maskgen.build import build
from maskgen.spec import read_specs
from runtime.config import parse_config
from runtime.data.dataset import Dataset, Sample, write_dataset
from runtime.dflash.method import METHOD
from runtime.dflash.network.drafter import Drafter, DrafterConfig
from runtime.dflash.settings import DFlashConfig
from runtime.dflash.start.initialise import random_start
from runtime.dflash.trainee import DrafterTrainee
from runtime.ranks.devices import enter_thread, place
from runtime.target.frozen import FrozenTarget
from runtime.training.job import open_inputs
from runtime.training.metrics import read_metrics
from runtime.training.trainer import Trainer

HIDDEN, VOCAB, LAYERS = 16, 61, (1, 2)


def make_data(folder, lengths, *, seed=0, prompt=4, stored=True, last_hidden=False):
    layers = [*LAYERS, drafter_config().num_target_layers] if last_hidden else LAYERS
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in lengths:
        loss_mask = torch.zeros(length, dtype=torch.uint8)
        loss_mask[prompt:] = 1
        samples.append(
            Sample(
                input_ids=torch.randint(VOCAB - 1, (length,), generator=generator).int(),
                loss_mask=loss_mask,
                prompt_len=prompt,
                features=(
                    torch.randn(length, HIDDEN * len(layers), generator=generator)
                    if stored
                    else None
                ),
            )
        )
    meta = {
        "features": "stored" if stored else "online",
        "context": max(lengths),
        "layer_ids": list(LAYERS),
        "feature_scale": [1.0, 2.0],
        "target": {"name": "tiny", "digest": "0" * 64},
    }
    if last_hidden:
        meta["stored_layer_ids"] = layers
    write_dataset(folder, {"train": samples, "heldout": samples[:1]}, meta)
    return Dataset.open(folder, "train")


def make_config(tmp_path, *, contexts=(16, 32), anchors=6, **sections):
    entry = {"family": "dflash", "context": list(contexts), "anchors": anchors}
    entry["draft_block_size"] = 4
    raw = {
        "run": {"folder": str(tmp_path / "run"), "devices": "cpu", "threads": 1},
        "target": {"num_features": len(LAYERS)},
        "data": {"folder": str(tmp_path / "data")},
        "masks": {
            "cache": str(tmp_path / "masks.zarr"),
            "BLOCK_SIZE": 16,
            "entry": [
                {"name": "dflash", "kind": "layouts", "draws": 3, **entry},
                {"name": "dflash-data", "kind": "parametric", **entry},
            ],
        },
        "train": {"steps": 6, "global_batch": 4, "log_every": 1, "save_every": 3, "lr": 1e-2},
    }
    window = sections.get("drafter", {}).get("sliding_window")
    if window:
        slides = {**entry, "layer": "sliding", "window": window}
        raw["masks"]["entry"] += [
            {**raw["masks"]["entry"][0], **slides, "name": "dflash-sliding", "drawn_as": "dflash"},
            {**slides, "name": "dflash-sliding-data", "kind": "parametric"},
        ]
    for section, values in sections.items():
        raw[section] = raw.get(section, {}) | values
    (tmp_path / "run").mkdir(exist_ok=True)
    return parse_config(raw, DFlashConfig)


def build_masks(config):
    with redirect_stderr(io.StringIO()):
        build(read_specs({"masks": config.masks}), cache.open_store(config.cache, writable=True))


def drafter_config():
    return DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        vocab_size=VOCAB,
        draft_block_size=4,
        mask_token_id=VOCAB - 1,
        target_layer_ids=LAYERS,
        num_target_layers=4,
        max_position_embeddings=512,
    )


def network_of(config):
    """With the layers and the heads that a run file asks for."""
    options = config.drafter
    heads = {"markov_rank": options.markov_rank, "confidence_head": options.confidence}
    network = replace(drafter_config(), **heads)
    if not options.slides:
        return network
    return replace(network, layers=options.layers, sliding_window=options.sliding_window)


def frozen_target(device="cpu", dtype=torch.float32, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return FrozenTarget(
        embed_weight=torch.randn(VOCAB, HIDDEN, generator=generator).to(device, dtype),
        head_weight=torch.randn(VOCAB, HIDDEN, generator=generator).to(device, dtype),
        feature_scale=torch.tensor([1.0, 2.0], device=device),
        features=None,
    )


def first_drafter(network=None) -> Drafter:
    return random_start(network or drafter_config(), torch.Generator().manual_seed(3))


def inputs_of(config, path="run.toml", *, ranks=1):
    placement = place(config.run.devices, dtype=config.target.dtype, threads=1, share=(0, 1))
    return open_inputs(METHOD, config, path, placement, ranks)


def make_trainer(
    config, *, target=None, remote_targets=(), processes=None, network=None, cycles=()
):
    share = (processes.local_rank, processes.local_size) if processes else (0, 1)
    placement = place(
        config.run.devices, dtype=config.target.dtype, threads=config.run.threads, share=share
    )
    enter_thread(placement.devices[0], placement.threads)
    inputs = inputs_of(config)
    trainee = DrafterTrainee(
        config=config,
        inputs=inputs,
        network=network or network_of(config),
        targets=[
            target or frozen_target(device, placement.compute_dtype) for device in placement.devices
        ],
        remote_targets=remote_targets,
    )
    return Trainer(
        config=config,
        placement=placement,
        method=METHOD,
        trainee=trainee,
        inputs=inputs,
        report=lambda line: None,
        processes=processes,
        cycles=cycles,
    )


def train(config, *, first_step=0, state=None, cycles=()):
    """Run to the end; gives the result, the metric rows and the fp32 weights."""
    trainer = make_trainer(config, cycles=cycles)
    try:
        trainer.prepare()
        weights = None if state else first_drafter(network_of(config)).state_dict()
        trainer.start_from(weights=weights, state=state)
        result = trainer.run(first_step)
        rows = read_metrics(trainer.folder / "metrics.jsonl")
        return result, rows, trainer.weights()
    finally:
        trainer.teardown()


def losses(rows):
    return np.array([row["loss"] for row in rows])
