"""A random Llama of a few thousand parameters with a word tokenizer, made in the test."""

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from runtime.data.dataset import Sample, write_dataset
from runtime.target.model import Target

HIDDEN = 32
LAYERS = 6
TEMPLATE = "{% for m in messages %}w1 {{ m.content }} {% endfor %}"


def tiny_tokenizer(vocab_size=24):
    words = {f"w{i}": i for i in range(3, vocab_size - 1)}
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **words, "[MASK]": vocab_size - 1}
    model = Tokenizer(WordLevel(vocab, unk_token="<pad>"))
    model.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="</s>", mask_token="[MASK]"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_model(vocab_size=24, seed=0, **options):
    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "pad_token_id": 0,
        "eos_token_id": 2,
        **options,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 1.5)
    return model


def tiny_target(vocab_size=24, seed=0, **options):
    model = tiny_model(vocab_size, seed, **options)
    return Target(model, tiny_tokenizer(vocab_size), name="tiny")


def save_target(folder: Path, vocab_size=24, seed=0):
    model = tiny_model(vocab_size, seed)
    model.save_pretrained(folder)
    tiny_tokenizer(vocab_size).save_pretrained(folder)
    return Target.load(folder)


def prompts(count, vocab_size=24, seed=5):
    """Token lists of 4 and more, of ordinary words."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, vocab_size - 1, (4 + i,), generator=generator).tolist()
        for i in range(count)
    ]


def save_dataset(folder: Path, target, layer_ids, answers=12, count=4):
    """Prompts with a few more tokens as the answers; features are left to the step."""

    def sample(ids):
        loss_mask = torch.zeros(len(ids) + answers, dtype=torch.uint8)
        loss_mask[len(ids) :] = 1
        tokens = torch.tensor([*ids, *ids * answers][: len(ids) + answers], dtype=torch.int32)
        return Sample(input_ids=tokens, loss_mask=loss_mask, prompt_len=len(ids))

    samples = [sample(ids) for ids in prompts(count)]
    features = torch.cat(
        [target.features(s.input_ids[None].long(), layer_ids)[0].float() for s in samples]
    )
    scale = features.unflatten(-1, (len(layer_ids), -1)).pow(2).mean((0, 2)).sqrt()
    meta = {
        "target": {"name": target.name, "digest": target.digest},
        "layer_ids": list(layer_ids),
        "hidden_size": target.hidden_size,
        "features": "online",
        "feature_dtype": "bfloat16",
        "context": 64,
        "feature_scale": scale.tolist(),
        "seed": 1,
    }
    write_dataset(folder, {"train": samples, "heldout": samples[1:]}, meta)
