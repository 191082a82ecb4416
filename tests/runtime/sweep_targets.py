"""Every causal LM of transformers, tiny: ``python -m tests.runtime.sweep_targets [TYPE ...]``.

Shrinks the default config of each model type and says of a model of random weights whether it is
refused, or causal and decodes alike alone, in a batch, drafted and without a cache. What does
neither is a target that ``TargetOutline.unusable`` should refuse.
"""

import sys
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from runtime.data.answers import answer_all
from runtime.dflash.decoding.speculate import DraftSession, greedy
from runtime.dflash.start.initialise import drafter_config, random_start
from runtime.target.model import Target
from runtime.target.outline import TargetOutline
from tests.runtime.tiny_llama import tiny_tokenizer

VOCAB, LIMIT, WINDOW = 64, 20, 8
LARGEST = 20_000_000
"""Parameters of a model that was shrunk."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "attention_heads")
WIDE = ("hidden_size", "n_embd", "d_model", "embed_dim", "dim_model_base")
FOUR = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
FEW = ("num_experts_per_tok", "moe_topk", "moe_k", "num_attention_groups")
ONE = ("n_group", "topk_group", "first_k_dense_replace", "num_shared_experts", "zero_expert_num")
HEAD = ("head_dim", "global_head_dim", "kv_channels", "v_head_dim", "kv_lora_rank")
THIN = ("moe_intermediate_size", "expert_ffn_hidden_size", "shared_expert_intermediate_size")
LONG = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
SMALL = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "q_lora_rank": 32,
    "laurel_rank": 8,
    "rotary_dim": 8,
    "attention_types": [[["global", "local"], 2]],
    "num_kv_shared_layers": 2,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB,
    "dff": 96,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("sliding_window", "window_size", "attention_chunk_size"), WINDOW),
    **dict.fromkeys((*LAYERS, *HEADS, *FOUR, "num_key_value_heads"), 4),
    **dict.fromkeys(FEW, 2),
    **dict.fromkeys(ONE, 1),
    **dict.fromkeys(WIDE, 64),
    **dict.fromkeys(HEAD, 16),
    **dict.fromkeys(THIN, 32),
    **dict.fromkeys(LONG, 256),
}
LEFT_OUT = ((), ("head_dim",), ("q_lora_rank",), ("sliding_window",))
"""Sizes that some configs do not take; tried in this order."""


def shrunk(model_type: str) -> TargetOutline:
    """A tiny model of random weights.

    Raises:
        ValueError: Its config cannot be shrunk by the names above.
    """
    config_class, reasons = CONFIG_MAPPING[model_type], []
    known = {*config_class.__annotations__, *dir(config_class), *vars(config_class())}
    known |= set(config_class.attribute_map)
    for left_out in LEFT_OUT:
        sizes = {key: value for key, value in SMALL.items() if key in known - set(left_out)}
        try:
            torch.manual_seed(0)
            config = config_class(**sizes)
            with torch.device("meta"):
                bulk = AutoModelForCausalLM.from_config(config).num_parameters()
            if bulk > LARGEST:
                reasons.append(f"{bulk:,} parameters")
                continue
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 and "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        return TargetOutline(model, tiny_tokenizer(VOCAB), name=model_type)
    raise ValueError(f"not shrunk: {reasons[0]}")


def whole(target: Target, prompt: Sequence[int]) -> tuple[int, ...]:
    """Greedy decoding that reads all again for each token."""
    ids = list(prompt)
    while len(ids) < len(prompt) + LIMIT:
        ids.append(int(target.logits(torch.tensor([ids]))[0, -1].argmax()))
        if ids[-1] in target.eos_token_ids:
            break
    return tuple(ids[len(prompt) :])


def verdict(outline: TargetOutline) -> str:
    """What became of one model."""
    if outline.unusable is not None:
        return f"refused: {outline.unusable}"
    target = Target(outline.model, outline.tokenizer, name=outline.name)
    ids = torch.randint(3, 60, (1, 24), generator=torch.Generator().manual_seed(0))
    layer_ids = (0, target.num_layers - 1)
    network = drafter_config(
        target, num_layers=1, draft_block_size=4, target_layer_ids=layer_ids, embedding="rows"
    )
    session = DraftSession(target, random_start(network, torch.Generator().manual_seed(1)))
    features = target.features(ids, layer_ids)
    other = torch.cat((ids[:, :13], ids[:, 13:].flip(1)), dim=1)
    moved = (target.features(other, layer_ids) - features)[:, :13].abs().max() / features.std()
    prompts = [ids[0, :length].tolist() for length in (3, 12, 7, 12, 5)]
    alone = [greedy(target, prompt, LIMIT).tokens for prompt in prompts]
    (answers,) = answer_all(target, prompts, [LIMIT] * 5, batch=5)
    batched = [tuple(answers[row].token_ids) for row in range(5)]
    found = {
        "not causal": float(moved) > 1e-3,
        "batched differs": batched != alone,
        "drafted differs": [session.generate(p, LIMIT).tokens for p in prompts] != alone,
        "whole differs": [whole(target, prompt) for prompt in prompts] != alone,
    }
    wrong = [what for what, holds in found.items() if holds]
    return f"WRONG: {', '.join(wrong)}" if wrong else "works"


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            line = verdict(shrunk(name))
        except Exception as error:
            line = f"{type(error).__name__}: {error}"
        print(f"{name:28} {' '.join(line.split())[:200]}", flush=True)
