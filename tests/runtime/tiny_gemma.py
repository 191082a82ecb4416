"""A random Gemma 3 of a few thousand parameters: its embedding module scales the rows."""

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from runtime.target.model import Target
from tests.runtime.tiny_llama import HIDDEN, LAYERS, tiny_tokenizer


def gemma_target(tokenizer=None, vocab_size=24, seed=0, **options):
    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "eos_token_id": 2,
        "bos_token_id": None,
        **options,
    }
    model = Gemma3ForCausalLM(Gemma3TextConfig(**settings))
    return Target(model, tokenizer or tiny_tokenizer(vocab_size), name="gemma")
