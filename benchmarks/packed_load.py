"""A load of packed fine-tuning: random weights, and random documents of realistic lengths."""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import cache
from maskgen.build import build
from runtime.config import parse_config
from runtime.data.dataset import Sample, write_dataset
from runtime.packed.method import METHOD
from runtime.packed.settings import PackedConfig
from runtime.packed.trainee import PackedTrainee
from runtime.ranks.devices import Placement
from runtime.target.model import Target
from runtime.training.inputs import Inputs
from runtime.training.job import open_inputs


@dataclass(frozen=True, kw_only=True)
class Size:
    """One model, its documents and its rows."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    lengths: tuple[int, ...]
    """Of rows."""
    documents: int
    """How many; their lengths are log-normal."""
    shortest: int
    median: int
    longest: int

    def model(self) -> Any:
        """A Llama with random float32 weights, the same at every call."""
        torch.manual_seed(1)
        config = LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
        return LlamaForCausalLM(config)


SIZES = {
    "135m": Size(
        name="SmolLM2-135M",
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        vocab_size=49152,
        lengths=(1024, 2048),
        documents=2000,
        shortest=20,
        median=160,
        longest=1000,
    ),
    "tiny": Size(
        name="tiny",
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=512,
        lengths=(128, 256),
        documents=100,
        shortest=4,
        median=16,
        longest=120,
    ),
}


@dataclass(frozen=True, kw_only=True)
class PackedLoad:
    """A size, prepared in a folder."""

    size: Size
    config: PackedConfig
    inputs: Inputs

    def trainee(self) -> PackedTrainee:
        """The model with its rows, as a run loads it."""
        words = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        target = Target(self.size.model(), tokenizer, name=self.size.name)
        return PackedTrainee(config=self.config, inputs=self.inputs, target=target)


def make_load(size: Size, placement: Placement, folder: Path, rows: int, steps: int) -> PackedLoad:
    """Write documents and masks, and pack.

    Args:
        size: Of the model and the documents.
        placement: One device.
        folder: For data and masks.
        rows: Of a step.
        steps: The learning rate is the same in all.
    """
    raw = {
        "run": {"method": "packed", "folder": str(folder / "run"), "seed": 1},
        "target": {"model": size.name},
        "data": {"folder": str(folder / "data"), "heldout": 0},
        "masks": {
            "cache": str(folder / "masks.zarr"),
            "entry": [
                {
                    "name": "packed",
                    "family": "document",
                    "kind": "parametric",
                    "Q_LEN": list(size.lengths),
                }
            ],
        },
        "train": {
            "steps": steps,
            "global_batch": rows,
            "lr": 1e-4,
            "min_lr_ratio": 1.0,
            "warmup_ratio": 0.0,
        },
    }
    config = parse_config(raw, PackedConfig)
    meta = {
        "features": "online",
        "context": max(size.lengths),
        "layer_ids": [],
        "feature_scale": [],
        "target": {"name": size.name, "digest": ""},
    }
    documents = _documents(size)
    with contextlib.redirect_stderr(io.StringIO()):
        write_dataset(folder / "data", {"train": documents, "heldout": documents[:1]}, meta)
        build(METHOD.specs(config).values(), cache.open_store(config.cache, writable=True))
    inputs = open_inputs(METHOD, config, "", placement, 1)
    return PackedLoad(size=size, config=config, inputs=inputs)


def _documents(size: Size) -> list[Sample]:
    generator = np.random.default_rng(1)
    drawn = generator.lognormal(np.log(size.median), 0.9, size.documents)
    return [
        Sample(
            input_ids=torch.from_numpy(generator.integers(0, size.vocab_size, length, np.int32)),
            loss_mask=torch.ones(length, dtype=torch.uint8),
            prompt_len=1,
        )
        for length in drawn.clip(size.shortest, size.longest).astype(int).tolist()
    ]
