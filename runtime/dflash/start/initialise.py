"""A drafter's first weights: random, from the target's last layers, or from another drafter.

Starting from the target pays as a whole only: layers, final norm, query and key norms and a fusion
that passes the last feature belong together, so that the untrained drafter already computes nearly
what the target's last layers would.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.data.dataset import Dataset
from runtime.dflash.folder.embedding import fed_scale
from runtime.dflash.folder.saved_drafter import load_published
from runtime.dflash.network.config import ROPE_KEYS
from runtime.dflash.network.drafter import Drafter, DrafterConfig, fold_feature_scale
from runtime.dflash.network.markov import HEADS, start_heads
from runtime.dflash.settings import STARTS, DFlashConfig
from runtime.dflash.start.likeness import COPIED, HEAD_NORMS, rope_of, unlike
from runtime.errors import ConfigError
from runtime.target.model import Target
from runtime.target.outline import TargetOutline

RANDOM_STD = 0.02
"""Of every matrix in a random start."""
FUSION_STD = 2e-4
"""Of ``fc`` around its identity, when the start is the target. Small against the smallest features:
a scale that outlier tokens dominate leaves those of ordinary tokens at a few hundredths."""
CALIBRATION_SAMPLES = 8
CALIBRATION_TOKENS = 96
WIDENING = 4
"""Intermediate size over hidden size, where the target has no intermediate size."""
POSITIONS = 32768
"""Of a drafter whose target does not say how long a sequence may be."""


def drafter_config(
    target: TargetOutline,
    *,
    num_layers: int,
    draft_block_size: int,
    target_layer_ids: Sequence[int],
    embedding: str = "module",
) -> DrafterConfig:
    """The config of a drafter shaped like ``target``'s own layers.

    What a target has not, or of a kind that a drafter has not, is made up: see ``made_up``.

    Raises:
        ConfigError: The target's sizes or its embedding do not make a valid drafter.
    """
    config = target.config
    heads = _size(config, "num_attention_heads") or max(1, target.hidden_size // 64)
    groups = _size(config, "num_key_value_heads") or heads
    theta, scaling = _rope(config)
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=_size(config, "intermediate_size") or WIDENING * target.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads if heads % groups else groups,
        head_dim=_size(config, "head_dim") or target.hidden_size // heads,
        rms_norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        vocab_size=target.vocab_size,
        draft_block_size=draft_block_size,
        mask_token_id=target.mask_token_id,
        target_layer_ids=tuple(target_layer_ids),
        num_target_layers=target.num_layers,
        max_position_embeddings=target.max_positions or POSITIONS,
        embedding_scale=fed_scale(target, embedding),
    )


def made_up(target: TargetOutline) -> list[str]:
    """What of a drafter's shape is not the target's, a line each."""
    config, rope = target.config, rope_of(target.config)
    notes = []
    if not _size(config, "intermediate_size"):
        notes.append(f"the target has no intermediate size; the drafter's is {WIDENING} x hidden")
    kind = rope.get("rope_type", "none")
    if kind not in ("default", *ROPE_KEYS):
        has = "has no RoPE" if kind == "none" else f"has {kind} RoPE"
        notes.append(f"the target {has}; the drafter's is plain")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        notes.append("the target's RoPE rotates a part of each head; the drafter's all of it")
    return notes


def _size(config: Any, name: str) -> int | None:
    """A size; of one that differs from layer to layer the last layer's."""
    layers = getattr(config, "per_layer_config", None)
    value = getattr(layers[config.num_hidden_layers - 1] if layers else config, name, None)
    if isinstance(value, list | tuple):
        value = value[-1] if value else None
    return int(value) if isinstance(value, int | float) and value >= 1 else None


def _rope(config: Any) -> tuple[float, dict[str, Any] | None]:
    rope = rope_of(config)
    theta = float(rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
    kind = str(rope.get("rope_type"))
    if kind not in ROPE_KEYS:
        return theta, None
    # What else stands there, such as sections of a picture's positions, fixes no frequency.
    keys = (key for key in (*ROPE_KEYS[kind][0], *ROPE_KEYS[kind][1]) if key in rope)
    return theta, {"rope_type": kind, **{key: rope[key] for key in keys}}


def initial_drafter(
    target: Target, train: Dataset, config: DFlashConfig, drafter: DrafterConfig
) -> Drafter:
    """The drafter that a run starts from; the same call gives the same weights again.

    Args:
        target: The frozen target.
        train: The training split; its first samples calibrate the query and key norms. Only its
            feature scale is read where the start is a published drafter.
        config: ``drafter.init`` and ``run.seed`` are read.
        drafter: The network.

    Returns:
        An fp32 drafter on the target's device.
    """
    generator = torch.Generator(device="cpu").manual_seed(config.run.seed)
    if config.drafter.init == "random":
        return random_start(drafter, generator, device=target.device)
    if config.drafter.init not in STARTS:
        published = load_published(config.drafter.init, dtype=torch.float32)
        scale = torch.tensor(train.feature_scale, dtype=torch.float32, device="cpu")
        return from_published(published, drafter, generator, scale).to(target.device)
    return from_target(target, drafter, generator, input_ids=calibration_tokens(train))


def calibration_tokens(train: Dataset) -> Tensor:
    """A few real samples cut to one length, int64 ``[n, T]``."""
    samples = [train.sample(i).input_ids for i in range(min(len(train), CALIBRATION_SAMPLES))]
    length = min(CALIBRATION_TOKENS, *(len(sample) for sample in samples))
    return torch.stack(
        [torch.as_tensor(sample[:length], device="cpu").long() for sample in samples]
    )


def random_start(
    config: DrafterConfig, generator: torch.Generator, *, device: torch.device | str = "cpu"
) -> Drafter:
    """Matrices from N(0, 0.02), norms 1, DSpark's heads as ``start_heads`` says.

    Args:
        config: The network.
        generator: On the CPU, so that every device starts from the same weights.
        device: Where the drafter stands.
    """
    drafter = Drafter(config, device="meta")
    drafter.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.startswith(HEADS):
                continue
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, RANDOM_STD, generator=generator)
    start_heads(drafter, generator)
    return drafter.to(device)


@torch.no_grad()
def from_published(
    published: Drafter, config: DrafterConfig, generator: torch.Generator, feature_scale: Tensor
) -> Drafter:
    """Start from a drafter that takes raw features.

    What it has not, such as a head that the run adds, starts as in ``random_start``.

    Args:
        published: In float32, on the CPU.
        config: The network: its own, or its own with more.
        generator: CPU generator.
        feature_scale: float32 ``[K]``, by which a run divides the features.

    Returns:
        An fp32 drafter on the CPU.
    """
    drafter = random_start(config, generator)
    drafter.load_state_dict({**drafter.state_dict(), **published.state_dict()})
    # Folding the inverse takes the scale out again.
    drafter.fc.weight.copy_(fold_feature_scale(drafter.fc.weight, 1 / feature_scale))
    return drafter


@torch.no_grad()
def from_target(
    target: Target, config: DrafterConfig, generator: torch.Generator, *, input_ids: Tensor
) -> Drafter:
    """Start from the target's last layers.

    Draft layer i is target layer ``L_t - L + i`` and the final norm the target's. Query and key
    norms, where the target has none of its own, are filled with the mean RMS of that layer's
    queries and keys. ``fc`` passes the last feature, ``hidden_norm`` is the norm of the layer that
    reads it in the target. Biases of the target's projections have no place in a drafter and are
    left out.

    Args:
        target: A target of Llama-like layers.
        config: The network; its sizes must be the target's.
        generator: CPU generator of the small noise in ``fc``.
        input_ids: Integers ``[n, T]``, real text without padding, to measure the RMS on.

    Returns:
        An fp32 drafter on the target's device.

    Raises:
        ConfigError: The target's layers are built differently, see ``likeness.unlike``.
    """
    reason = unlike(target, config)
    if reason is not None:
        raise ConfigError(
            "drafter.init",
            "target",
            f"needs a target of Llama-like layers, and {reason}; set drafter.init = 'random'",
        )
    device = target.device
    drafter = random_start(config, generator, device=device)
    sources = list(target.layers)[-config.num_hidden_layers :]
    for layer, source in zip(drafter.layers, sources, strict=True):
        wanted, found = layer.state_dict(), source.state_dict()
        for name in COPIED:
            wanted[name].copy_(found[name])
    rms = head_rms(target, sources, input_ids.to(device))
    for layer, source, values in zip(drafter.layers, sources, rms, strict=True):
        wanted, found = layer.state_dict(), source.state_dict()
        for name, value in zip(HEAD_NORMS, values, strict=True):
            if name in found:
                wanted[name].copy_(found[name])
            else:
                wanted[name].fill_(value)
    drafter.norm.weight.copy_(_weight(target.final_norm))
    drafter.hidden_norm.weight.copy_(_weight(_reader_norm(target, config.target_layer_ids[-1])))
    drafter.fc.weight.mul_(FUSION_STD / RANDOM_STD)
    H = config.hidden_size
    drafter.fc.weight[:, -H:].add_(torch.eye(H, dtype=torch.float32, device=device))
    return drafter


def head_rms(target: Target, layers: Sequence[Any], input_ids: Tensor) -> list[tuple[float, float]]:
    """Mean RMS over tokens and heads of each layer's queries and keys, before RoPE.

    Args:
        target: The target.
        layers: Some of its decoder layers.
        input_ids: ``[n, T]`` on the target's device.
    """
    head_dim = int(
        getattr(target.config, "head_dim", None)
        or target.hidden_size // target.config.num_attention_heads
    )
    found: dict[Any, float] = {}

    def record(module: nn.Module, _: object, output: Tensor) -> None:
        heads = output.float().reshape(*output.shape[:-1], -1, head_dim)
        found[module] = float(heads.pow(2).mean(-1).sqrt().mean())

    pairs: list[Any] = [(layer.self_attn.q_proj, layer.self_attn.k_proj) for layer in layers]
    with _hooked([module for pair in pairs for module in pair], record):
        target.features(input_ids, [target.num_layers - 1])
    return [(found[q], found[k]) for q, k in pairs]


@contextlib.contextmanager
def _hooked(modules: Sequence[Any], hook: Any) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _reader_norm(target: Target, layer_id: int) -> Any:
    """The norm through which the target itself reads the output of layer ``layer_id``."""
    if layer_id + 1 == target.num_layers:
        return target.final_norm
    return target.layers[layer_id + 1].input_layernorm


def _weight(norm: Any) -> Tensor:
    weight: Tensor = norm.weight
    return weight
