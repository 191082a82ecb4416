"""Whether a drafter can be made from a target's own layers, decided without its weights."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm

from runtime.dflash.network.config import ROPE_KEYS, DrafterConfig
from runtime.dflash.network.drafter import DraftLayer
from runtime.target.outline import TargetOutline

COPIED = (
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
"""What a draft layer takes from a target layer, name for name."""
HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
LIKE_ROPE = ("default", "dynamic", *ROPE_KEYS)
"""Within the length that the target was trained at, dynamic RoPE is the plain one."""


def rope_of(config: Any) -> dict[str, Any]:
    """A target's RoPE parameters as transformers keeps them; empty where it has no RoPE."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    # Models that mix attention kinds keep one table for each kind.
    tables = {kind: table for kind, table in rope.items() if isinstance(table, dict)}
    return dict(tables.get("full_attention") or next(iter(tables.values()), rope))


def unlike(target: TargetOutline, network: DrafterConfig) -> str | None:
    """Why no draft layer can stand in for a layer of this target; None if it can.

    Biases of projections have no place in a drafter and make no difference here.

    Args:
        target: A usable target, with weights or without.
        network: The drafter; its last layers are compared with as many of the target's.
    """
    return next(_differences(target, network), None)


def _differences(target: TargetOutline, network: DrafterConfig) -> Iterator[str]:
    config = target.config
    names = ("hidden_act", "hidden_activation", "activation_function", "act_fn")
    act = next((str(getattr(config, name)) for name in names if getattr(config, name, None)), None)
    if act not in (None, "silu", "swish"):
        yield f"its activation is {act}, a drafter's is silu"
    rope = rope_of(config)
    kind = rope.get("rope_type", "none")
    if kind not in LIKE_ROPE:
        yield f"its RoPE is of kind {kind}, which a drafter has not"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield "it rotates a part of each head, a drafter all of it"
    assert target.layers is not None, "callers have a usable target"
    if network.num_hidden_layers > target.num_layers:
        yield f"it has only {target.num_layers} layers, fewer than drafter.num_layers"
    with torch.device("meta"):
        wanted = DraftLayer(network).state_dict()
    for layer in list(target.layers)[-network.num_hidden_layers :]:
        yield from _layer_differences(layer, wanted)
    if not _is_rms_norm(target.final_norm):
        yield "its final norm is no RMSNorm that multiplies by its weight"


def _layer_differences(layer: nn.Module, wanted: dict[str, torch.Tensor]) -> Iterator[str]:
    own = dict(layer.named_parameters())
    for name, like in wanted.items():
        if name not in own and name not in HEAD_NORMS:
            yield f"its layers have no {name}"
        elif name in own and own[name].shape != like.shape:
            found = tuple(own[name].shape)
            yield f"its {name} has shape {found}, a drafter's {tuple(like.shape)}"
    for name in own:
        if name not in wanted and not name.endswith("_proj.bias"):
            yield f"its layers have {name}, a drafter has none"
    modules = dict(layer.named_modules())
    for name in NORMS:
        if name in modules and not _is_rms_norm(modules[name]):
            yield f"its {name} is no RMSNorm that multiplies by its weight"


def _is_rms_norm(norm: nn.Module | None) -> bool:
    """Whether it multiplies by its weight: others add 1 to it, or subtract the mean."""
    weight = getattr(norm, "weight", None)
    if norm is None or not isinstance(weight, torch.Tensor):
        return False
    # A copy with values of its own, so that it works for a module on the meta device.
    copied = copy.deepcopy(norm).to_empty(device="cpu").float()
    with torch.no_grad():
        for value in copied.parameters():
            value.copy_(_ramp(0.5, 1.5, value.numel()))
        probe = _ramp(-1.0, 2.0, weight.numel())
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) or 1e-6
        expected = rms_norm(probe, weight.shape, _ramp(0.5, 1.5, weight.numel()), eps)
        return bool(torch.allclose(copied(probe), expected, rtol=1e-3, atol=1e-3))


def _ramp(first: float, last: float, count: int) -> torch.Tensor:
    return torch.linspace(first, last, count, dtype=torch.float32, device="cpu")
