"""The drafter's config: what fixes its network, and the published ``config.json``.

Source: the keys that SGLang, vLLM and transformers read from a DFlash drafter's folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from runtime.errors import CheckpointError, ConfigError

FIXED_ROPE_TYPES = ("linear", "llama3", "yarn")
"""Scalings whose frequencies do not depend on the sequence's length, beside the default."""
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_target_layers",
    "max_position_embeddings",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Everything that fixes a drafter's network and the convention it drafts by."""

    hidden_size: int
    """Equal to the target's."""
    intermediate_size: int
    num_hidden_layers: int
    """Draft layers."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = None
    """The target's scaling without ``rope_theta``: ``{"rope_type": "llama3", ...}``."""
    vocab_size: int
    draft_block_size: int
    mask_token_id: int
    """A valid row of the target's embedding."""
    target_layer_ids: tuple[int, ...]
    """0-based decoder layers of the target whose OUTPUT is fused."""
    num_target_layers: int
    max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in SIZES:
            _check(name, getattr(self, name), getattr(self, name) >= 1, "must be at least 1")
        _check(
            "num_key_value_heads",
            self.num_key_value_heads,
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"must divide num_attention_heads = {self.num_attention_heads}",
        )
        _check("head_dim", self.head_dim, self.head_dim % 2 == 0, "must be even, for RoPE")
        _check(
            "draft_block_size",
            self.draft_block_size,
            self.draft_block_size >= 2,
            "must be at least 2: slot 0 is the known token",
        )
        _check(
            "mask_token_id",
            self.mask_token_id,
            0 <= self.mask_token_id < self.vocab_size,
            f"must be a row of the target's embedding, in [0, {self.vocab_size})",
        )
        _check(
            "target_layer_ids",
            self.target_layer_ids,
            len(self.target_layer_ids) > 0
            and all(0 <= i < self.num_target_layers for i in self.target_layer_ids),
            f"must name one or more layers in [0, {self.num_target_layers})",
        )
        if self.rope_scaling is not None:
            kind = self.rope_scaling.get("rope_type")
            _check(
                "rope_scaling",
                dict(self.rope_scaling),
                kind in FIXED_ROPE_TYPES,
                f"rope_type must be one of {', '.join(FIXED_ROPE_TYPES)}",
            )

    def to_published(self) -> dict[str, Any]:
        """The ``config.json`` of a drafter folder (``block_size`` at both places servers read)."""
        scaling = None if self.rope_scaling is None else dict(self.rope_scaling)
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.draft_block_size,
            "dflash_config": {
                "block_size": self.draft_block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "num_target_layers": self.num_target_layers,
            "num_hidden_layers": self.num_hidden_layers,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {
                "rope_type": "default",
                **(scaling or {}),
                "rope_theta": self.rope_theta,
            },
            "sliding_window": None,
            "use_sliding_window": False,
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_hidden_layers,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }

    @classmethod
    def from_published(cls, published: Mapping[str, Any]) -> Self:
        """Read a ``config.json``.

        Raises:
            CheckpointError: A key is missing, the two block sizes differ, or the folder follows
                another convention (slot k predicts anchor+k+1, sliding layers).
            ConfigError: A value breaks its rule.
        """
        flash = published.get("dflash_config") or {}
        _check_convention(published, flash)
        rope = dict(published.get("rope_parameters") or published.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", published.get("rope_theta"))
        kind = rope.pop("rope_type", rope.pop("type", "default"))
        try:
            return cls(
                draft_block_size=flash.get("block_size", published.get("block_size", 16)),
                mask_token_id=flash["mask_token_id"],
                target_layer_ids=tuple(flash["target_layer_ids"]),
                rms_norm_eps=published["rms_norm_eps"],
                rope_theta=float(theta),
                rope_scaling=None if kind == "default" else {"rope_type": kind, **rope},
                **{name: published[name] for name in SIZES},
            )
        except KeyError as error:
            raise CheckpointError(
                f"config.json must hold {error.args[0]!r}, and it is missing; "
                "export the drafter again with runtime.export"
            ) from error
        except TypeError as error:
            raise CheckpointError(f"config.json holds a value of a wrong type: {error}") from error


def _check(field: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ConfigError(field, value, rule)


def _check_convention(published: Mapping[str, Any], flash: Mapping[str, Any]) -> None:
    outer, inner = published.get("block_size"), flash.get("block_size")
    if None not in (outer, inner) and outer != inner:
        raise CheckpointError(
            f"config.json gives two block sizes: block_size = {outer} and "
            f"dflash_config.block_size = {inner} must be equal"
        )
    if published.get("sample_from_anchor") or flash.get("sample_from_anchor"):
        raise CheckpointError(
            "sample_from_anchor is true: slot k of that drafter predicts anchor+k+1, "
            "here it must predict anchor+k; load it with a server of its own convention"
        )
    kinds = set(published.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise CheckpointError(
            f"layer_types names {sorted(kinds)}: every layer must be full_attention"
        )


def rope_frequencies(config: DrafterConfig) -> tuple[list[float], float]:
    """Inverse frequencies, ``head_dim / 2`` of them, and the factor on cos and sin.

    Computed in fp32 on the CPU, so that every device gets the same ones.
    """
    if config.rope_scaling is None:
        even = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
        return (1.0 / config.rope_theta ** (even / config.head_dim)).tolist(), 1.0
    # Only a scaled RoPE pays for this import.
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    published = config.to_published()
    del published["rope_theta"], published["rope_scaling"]
    with torch.device("cpu"):
        frequencies, factor = ROPE_INIT_FUNCTIONS[config.rope_scaling["rope_type"]](
            Qwen3Config(**published), torch.device("cpu")
        )
    return frequencies.tolist(), float(factor)
