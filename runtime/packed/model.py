"""A Hugging Face causal LM whose attention takes the mask that it is given, dense or BlockMask."""

from typing import Any, cast

from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from runtime.errors import ConfigError
from runtime.static.attention import dense_attention, flex_attention_over
from runtime.target.model import Target

NAME = "packed_documents"
FIELD = "target.model"


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
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
            raise ConfigError(FIELD, type(module).__name__, f"must attend without {name}")
    attend = flex_attention_over if isinstance(mask, BlockMask) else dense_attention
    out = attend(mask, scale=options.get("scaling"))(query, key, value)
    return out.transpose(1, 2).contiguous(), None


def trainable(target: Target) -> Any:
    """The model of a target, all of it trainable, attending through ``packed_attention``.

    Raises:
        ConfigError: It does not use transformers' AttentionInterface.
    """
    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
    model = target.model
    model.set_attn_implementation(NAME)
    if target.config._attn_implementation != NAME:
        rule = "must be a model with transformers' AttentionInterface"
        raise ConfigError(FIELD, target.name, rule)
    model.requires_grad_(True)
    return model


def layers_path(target: Target) -> str:
    """Name of the list of decoder layers within the model, such as ``model.layers``."""
    modules = target.model.named_modules()
    return str(next(name for name, part in modules if part is target.layers))


def backward_stages(model: nn.Module, layers: str) -> list[list[str]]:
    """Parameter names as the backward pass finishes them: last layer first.

    All that is no layer comes at the end: a head that is the embedding too has its gradient whole
    there only.

    Args:
        model: The model.
        layers: Name of its list of layers.
    """
    names = [name for name, _ in model.named_parameters()]
    count = len(cast("nn.ModuleList", model.get_submodule(layers)))
    prefixes = [f"{layers}.{index}." for index in reversed(range(count))]
    stages = [[name for name in names if name.startswith(prefix)] for prefix in prefixes]
    rest = [name for name in names if not name.startswith(f"{layers}.")]
    return [stage for stage in (*stages, rest) if stage]


def compile_layers(model: nn.Module, layers: str) -> None:
    """Compile each layer in place, as FlexAttention must be; all share one compiled form."""
    for layer in cast("nn.ModuleList", model.get_submodule(layers)):
        layer.compile(fullgraph=True, dynamic=False)
