"""The drafter's config: what fixes its network, and the published ``config.json``.

Source: the keys that SGLang, vLLM and transformers read from a DFlash drafter's folder.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from runtime.dflash.published.config import network_settings, yarn_factor
from runtime.dflash.published.keys import SIZES
from runtime.errors import ConfigError

ROPE_KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor",),
        (
            *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate"),
        ),
    ),
}
"""The scalings whose frequencies do not depend on the sequence's length, beside the default: what
each needs and what it may have."""
SMALLEST_HEAD = 16
"""Of FlexAttention's kernels."""
LARGEST_DRAFT_BLOCK = 2**12
LAYER_KINDS = ("full", "sliding")
LARGEST_MARKOV_RANK = 2**14


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
    embedding_scale: float = 1.0
    """What the rows of the target's embedding are multiplied by before they enter the drafter."""
    layers: tuple[str, ...] = ()
    """Kind of each draft layer, one of ``LAYER_KINDS``; empty where all are full."""
    sliding_window: int | None = None
    """Keys that a row of a sliding layer sees, itself counted; None where no layer slides."""
    markov_rank: int = 0
    """Width of the Markov head, with which a drafter is DSpark's; 0 for none."""
    confidence_head: bool = False
    """Whether it says how sure each draft is; needs a Markov head."""
    sample_from_anchor: bool = False
    """Whether slot k drafts the token at anchor + k + 1, which is DSpark's own layout; else that at
    anchor + k, and slot 0, where it is known, none."""

    def __post_init__(self) -> None:
        for name, largest in SIZES.items():
            value = getattr(self, name)
            _check(name, value, 1 <= value <= largest, f"must be at least 1 and at most {largest}")
        _check(
            "num_key_value_heads",
            self.num_key_value_heads,
            self.num_attention_heads % self.num_key_value_heads == 0,
            f"must divide num_attention_heads = {self.num_attention_heads}",
        )
        _check(
            "head_dim",
            self.head_dim,
            self.head_dim % 2 == 0 and self.head_dim >= SMALLEST_HEAD,
            f"must be even, for RoPE, and at least {SMALLEST_HEAD}, for FlexAttention",
        )
        _check(
            "draft_block_size",
            self.draft_block_size,
            2 <= self.draft_block_size <= LARGEST_DRAFT_BLOCK,
            f"must be at least 2, as slot 0 is the known token, and at most {LARGEST_DRAFT_BLOCK}",
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
            and all(0 <= i < self.num_target_layers for i in self.target_layer_ids)
            and len(set(self.target_layer_ids)) == len(self.target_layer_ids),
            f"must name one or more layers in [0, {self.num_target_layers}), each once",
        )
        _check(
            "markov_rank",
            self.markov_rank,
            int(self.confidence_head) <= self.markov_rank <= LARGEST_MARKOV_RANK,
            f"must be at least 0, with a confidence head 1, and at most {LARGEST_MARKOV_RANK}",
        )
        _check(
            "sample_from_anchor",
            self.sample_from_anchor,
            not self.sample_from_anchor or self.markov_rank > 0,
            "must be false for a drafter without a Markov head",
        )
        for name in ("rms_norm_eps", "rope_theta", "embedding_scale"):
            value = getattr(self, name)
            _check(name, value, _is_positive(value), "must be a finite number above 0")
        if self.rope_scaling is not None:
            _check_rope(self.rope_scaling)
        _check(
            "layers",
            self.layers,
            set(self.layers) <= set(LAYER_KINDS)
            and len(self.layers) in (0, self.num_hidden_layers),
            f"must be {' or '.join(LAYER_KINDS)} for each of the {self.num_hidden_layers} layers",
        )
        if "sliding" not in self.layers:
            # One network has one config, however it was spelled.
            object.__setattr__(self, "layers", ())
            object.__setattr__(self, "sliding_window", None)
            return
        _check(
            "sliding_window",
            self.sliding_window,
            self.sliding_window is not None
            and self.draft_block_size <= self.sliding_window < 2**31,
            f"must be at least draft_block_size = {self.draft_block_size}, below 2**31",
        )

    @property
    def slides(self) -> tuple[bool, ...]:
        """Of each layer whether it slides."""
        kinds = self.layers or ("full",) * self.num_hidden_layers
        return tuple(kind == "sliding" for kind in kinds)

    @property
    def reach(self) -> int:
        """Tokens from the anchor, which is known, to the last that a block drafts: 1 + drafts."""
        return self.draft_block_size + self.sample_from_anchor

    def to_published(self) -> dict[str, Any]:
        """The ``config.json`` of a drafter folder (``block_size`` at both places servers read)."""
        scaling = _published_scaling(self)
        published = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self.draft_block_size,
            "dflash_config": {
                "block_size": self.draft_block_size,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "input_embedding_scale": self.embedding_scale,
            },
            "num_target_layers": self.num_target_layers,
            "num_hidden_layers": self.num_hidden_layers,
            # Servers take sliding layers as causal inside the block unless a flag says otherwise,
            # and a flag would be of the full ones too: so none is written.
            "layer_types": [
                "sliding_attention" if slides else "full_attention" for slides in self.slides
            ],
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
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.sliding_window is not None,
            "max_position_embeddings": self.max_position_embeddings,
            "max_window_layers": self.num_hidden_layers,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }
        return published | (_published_heads(self) if self.markov_rank else {})

    @classmethod
    def from_published(cls, published: Mapping[str, Any]) -> Self:
        """Read a ``config.json``.

        Raises:
            CheckpointError: A key is missing, unknown or of a wrong type, or says what the network
                here does not do (slot k predicts anchor+k+1).
            ConfigError: A value breaks its rule.
        """
        return cls(**network_settings(published))


def _published_heads(config: DrafterConfig) -> dict[str, Any]:
    """DSpark's keys, at each place where a server looks for them."""
    heads = {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head,
    }
    return {
        "architectures": ["Qwen3DSparkModel"],
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        **heads,
        "sample_from_anchor": config.sample_from_anchor,
        "dspark_config": heads,
    }


def _published_scaling(config: DrafterConfig) -> dict[str, Any] | None:
    """The scaling, with the names of yarn's factor that transformers and the servers read."""
    if config.rope_scaling is None or config.rope_scaling["rope_type"] != "yarn":
        return None if config.rope_scaling is None else dict(config.rope_scaling)
    own, factor = yarn_factor(config.rope_scaling["factor"]), rope_frequencies(config)[1]
    scaling = {key: value for key, value in config.rope_scaling.items() if value is not None}
    if not math.isclose(own, factor, rel_tol=1e-6):
        scaling |= {"attention_factor": factor, "attn_factor": factor / own}
    return scaling


def _check(field: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ConfigError(field, value, rule)


def _check_rope(scaling: Mapping[str, Any]) -> None:
    def check(holds: bool, rule: str) -> None:
        _check("rope_scaling", dict(scaling), holds, rule)

    kind = scaling.get("rope_type")
    check(kind in list(ROPE_KEYS), f"rope_type must be one of {', '.join(ROPE_KEYS)}")
    needed, optional = ROPE_KEYS[str(kind)]
    for key in needed:
        check(_is_positive(scaling.get(key)), f"{kind} needs {key}, a number above 0")
    for key, value in scaling.items():
        if key not in ("rope_type", *needed):
            check(key in optional, f"{kind} knows no {key}")
            check(value in (None, False, True, 0) or _is_positive(value), f"{key} must be a number")
    if kind == "llama3":
        ordered = scaling["low_freq_factor"] < scaling["high_freq_factor"]
        check(ordered, "high_freq_factor must be above low_freq_factor")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and 0 < value < math.inf


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

    sizes = Qwen3Config(
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={**config.rope_scaling, "rope_theta": config.rope_theta},
    )
    with torch.device("cpu"):
        frequencies, factor = ROPE_INIT_FUNCTIONS[config.rope_scaling["rope_type"]](
            sizes, torch.device("cpu")
        )
    return frequencies.tolist(), float(factor)
