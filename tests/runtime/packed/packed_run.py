"""A run of packed fine-tuning small enough for a test."""

import torch

from runtime.config import parse_config
from runtime.data.dataset import Sample, write_dataset
from runtime.packed.method import METHOD
from runtime.packed.settings import PackedConfig
from runtime.ranks.devices import place
from runtime.target.files import find_target
from runtime.training.job import open_inputs
from tests.runtime.tiny_llama import tiny_model, tiny_tokenizer
from tests.runtime.tiny_run import build_masks

LENGTHS = (32, 64)
SIZES = [5, 9, 2, 32, 30, 3, 11, 1, 60, 7, 8, 6, 17, 40, 64, 21, 4, 13]


def save_model(folder, **options):
    tiny_model(**options).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def documents_of(sizes, seed=7):
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for size in sizes:
        learned = (torch.rand(size, generator=generator) < 0.8).byte()
        ids = torch.randint(3, 23, (size,), generator=generator).int()
        samples.append(Sample(input_ids=ids, loss_mask=learned, prompt_len=1))
    return samples


def make_run(root, *, sizes=SIZES, lengths=LENGTHS, model=None, train=None, **sections):
    """Model, data and masks in a folder; returns the run file's settings."""
    model = model or save_model(root / "model")
    raw = {
        "run": {"method": "packed", "folder": str(root / "run"), "devices": "cpu", "threads": 1},
        "target": {"model": str(model)},
        "data": {"folder": str(root / "data"), "heldout": 0},
        "packed": {"max_documents": 6},
        "masks": {
            "cache": str(root / "masks.zarr"),
            "BLOCK_SIZE": 16,
            "entry": [
                {
                    "name": "packed",
                    "family": "document",
                    "kind": "parametric",
                    "Q_LEN": list(lengths),
                }
            ],
        },
        "train": {"steps": 6, "global_batch": 2, "log_every": 2, "lr": 1e-2, **(train or {})},
    }
    for section, values in sections.items():
        raw[section] = raw.get(section, {}) | values
    samples = documents_of(sizes)
    meta = {
        "features": "online",
        "context": max(sizes),
        "layer_ids": [],
        "feature_scale": [],
        "target": {"name": "tiny", "digest": find_target(model).digest},
    }
    write_dataset(root / "data", {"train": samples, "heldout": samples[:3]}, meta)
    config = parse_config(raw, PackedConfig)
    build_masks(config)
    return config


def load(config):
    """Inputs and trainee of a run, on the CPU."""
    placement = place("cpu", threads=1)
    inputs = open_inputs(METHOD, config, "run.toml", placement, 1)
    trainee = METHOD.load(
        config, inputs, placement, None, ranks=1, fresh=True, report=lambda line: None
    )
    return inputs, trainee
