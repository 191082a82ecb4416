"""A Hugging Face causal LM whose attention takes the mask that it is given, dense or BlockMask."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runtime.errors import ConfigError, TargetNotFoundError
from runtime.target.model import Target

NAME = "packed_documents"
compiled_flex = torch.compile(flex_attention, fullgraph=True, dynamic=False)


def packed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attend as transformers asks: ``[B, H, L, D]`` -> ``[B, L, H, D]``, and no weights.

    A mask of four dimensions is handed on to here as it is. transformers makes none of its own,
    since its ``AttentionMaskInterface`` knows no function under our name.

    Raises:
        ConfigError: The layer asks for what a document mask does not say.
    """
    for name in ("sliding_window", "softcap", "s_aux"):
        asked = options.get(name)
        if asked is not None and not (name == "sliding_window" and asked >= query.shape[2]):
            raise ConfigError("--model", type(module).__name__, f"must attend without {name}")
    how: dict[str, Any] = {"scale": options.get("scaling")}
    how["enable_gqa"] = query.shape[1] != key.shape[1]
    if isinstance(mask, BlockMask):
        out: Tensor = compiled_flex(query, key, value, block_mask=mask, **how)
    else:
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **how)
    return out.transpose(1, 2).contiguous(), None


def load_model(name: str, device: torch.device) -> Target:
    """Load a model in fp32, all of it trainable, that attends through ``packed_attention``.

    Args:
        name: As ``Target.load`` takes it.
        device: Where the weights go.

    Raises:
        TargetNotFoundError: It is not there, or does not use transformers' AttentionInterface.
    """
    target = Target.load(name, device=device, dtype="float32")
    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
    target.model.set_attn_implementation(NAME)
    if target.config._attn_implementation != NAME:
        raise TargetNotFoundError(f"{name!r} must be a model with transformers' AttentionInterface")
    target.model.requires_grad_(True)
    return target
