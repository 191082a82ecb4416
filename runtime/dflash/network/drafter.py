"""The DFlash drafter: a small Qwen3-like stack that reads a target's hidden states.

A draft block of ``draft_block_size`` tokens is predicted at once. Its slot 0 holds the true token
at position ``anchor``, the other slots the mask token; slot k predicts the token at ``anchor + k``.
The target's features of the context enter every layer as extra keys and values, never as rows of
the residual stream. Embedding and LM head are the target's, frozen, and no part of this module.

Source: arXiv 2602.06036; parameter names and config.json as SGLang and vLLM serve them.

Shapes: B batch, S context tokens, Q draft rows (anchors x draft_block_size), H hidden size,
K fused target layers, nh / nkv query / key-value heads, hd head_dim.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from runtime.dflash.network.config import DrafterConfig as DrafterConfig
from runtime.dflash.network.config import rope_frequencies
from runtime.dflash.network.markov import HEADS, ConfidenceHead, MarkovHead

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``attention(q [B,nh,Q,hd], k [B,nkv,S+Q,hd], v [B,nkv,S+Q,hd]) -> [B,nh,Q,hd]``; scale hd**-0.5,
grouped-query heads; it holds the mask."""
KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one layer, ``[B,nkv,S,hd]`` each, keys normed and rotated."""


def rotate(x: Tensor, rope: KeyValue) -> Tensor:
    """Apply RoPE in the half-split layout of Hugging Face weights.

    Args:
        x: ``[B, heads, T, hd]``.
        rope: cos and sin, ``[B or 1, 1, T, hd]``.
    """
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class DraftAttention(nn.Module):
    """Attention of draft rows over the context and their own draft block."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def key_value(self, x: Tensor, rope: KeyValue) -> KeyValue:
        """Keys, normed and rotated, and values of ``x [B,T,H]``: ``[B,nkv,T,hd]`` each."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return rotate(k, rope), v

    def forward(self, x: Tensor, context: KeyValue, rope: KeyValue, attention: Attention) -> Tensor:
        """Attend ``x [B,Q,H]`` over ``context`` and itself, as ``attention`` allows."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        k, v = self.key_value(x, rope)
        seen = attention(
            rotate(q, rope),
            torch.cat((context[0], k), dim=2),
            torch.cat((context[1], v), dim=2),
        )
        out: Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return out


class DraftMLP(nn.Module):
    """Gated SiLU feed-forward."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [B,Q,H]`` to ``[B,Q,H]``."""
        out: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """One decoder layer over the draft rows."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def forward(self, x: Tensor, context: KeyValue, rope: KeyValue, attention: Attention) -> Tensor:
        """Map ``x [B,Q,H]`` to ``[B,Q,H]``; ``context`` is this layer's keys and values."""
        x = x + self.self_attn(self.input_layernorm(x), context, rope, attention)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Drafter(nn.Module):
    """The drafter. Its state dict holds exactly the published names.

    Activations take the parameters' dtype; RoPE angles are fp32 whatever that dtype is. Nothing
    reads a value on the host, so forward and backward can be captured and compiled with fullgraph.
    """

    inv_freq: Tensor

    def __init__(self, config: DrafterConfig, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = config
        fused = len(config.target_layer_ids) * config.hidden_size
        # Whatever defaults the caller's thread has: fp32, on the device that is named.
        with torch.device(device):
            self.fc = nn.Linear(fused, config.hidden_size, bias=False)
            self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
            self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            # Last, so that the draws of a random start are those of a drafter without them.
            self.markov_head, self.confidence_head = _heads(config)
        self._frequencies, self._rope_factor = rope_frequencies(config)
        inv_freq = torch.tensor(self._frequencies, dtype=torch.float32, device=device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.float()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Keep the frequencies in fp32 when the module is cast, and real when it leaves meta."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = torch.tensor(
            self._frequencies, dtype=torch.float32, device=self.inv_freq.device
        )
        return self

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        return self.fc.weight.dtype

    def block_inputs(self, anchor_tokens: Tensor, embed_weight: Tensor) -> Tensor:
        """What the first layer reads: the only place where tokens become the drafter's input.

        Args:
            anchor_tokens: int64 ``[B,N]``, the known token of each draft block.
            embed_weight: ``[V,H]``, the rows of the target's embedding.

        Returns:
            ``[B, N * draft_block_size, H]`` in the embedding's dtype: the rows of the anchor token
            and of mask tokens, times ``config.embedding_scale``.
        """
        first = embed_weight[anchor_tokens][:, :, None]
        masks = embed_weight[self.config.mask_token_id].expand(
            *first.shape[:2], self.config.draft_block_size - 1, -1
        )
        x = torch.cat((first, masks), dim=2).flatten(1, 2)
        return x if self.config.embedding_scale == 1.0 else x * self.config.embedding_scale

    def fuse(self, features: Tensor, feature_scale: Tensor | None = None) -> Tensor:
        """Fuse the target's features into the context that every layer reads.

        Args:
            features: ``[B,S,K*H]``, the K layers' outputs side by side.
            feature_scale: fp32 ``[K]``; layer k is divided by entry k. None once
                ``fold_feature_scale`` has put it into ``fc``.

        Returns:
            ``[B,S,H]``.
        """
        if feature_scale is not None:
            per_layer = features.float().reshape(*features.shape[:-1], feature_scale.shape[0], -1)
            features = (per_layer / feature_scale.float()[:, None]).flatten(-2)
        fused: Tensor = self.hidden_norm(self.fc(features.to(self.dtype)))
        return fused

    def rope(self, positions: Tensor) -> KeyValue:
        """Cos and sin, ``[B or 1, 1, T, hd]``, of integer ``positions``, ``[B,T]`` or ``[T]``."""
        angles = positions.float().unsqueeze(-1) * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        if positions.dim() == 1:
            angles = angles.unsqueeze(0)
        angles = angles.unsqueeze(1)
        cos, sin = angles.cos() * self._rope_factor, angles.sin() * self._rope_factor
        return cos.to(self.dtype), sin.to(self.dtype)

    def context(self, F: Tensor, positions: Tensor) -> Iterator[KeyValue]:
        """Every layer's keys and values of fused features ``F [B,S,H]``.

        Each pair is made when it is asked for: autograd goes back in the reverse order of what was
        done, so a layer's own gradients are then finished, and reduced, before the next layer's.
        """
        rope = self.rope(positions)
        for layer in self._draft_layers():
            yield layer.self_attn.key_value(F, rope)

    def draft(
        self,
        x: Tensor,
        context: Iterable[KeyValue],
        draft_positions: Tensor,
        attention: Attention,
        sliding: Attention | None = None,
    ) -> Tensor:
        """Run the stack over draft rows with given context keys and values.

        Args:
            x: ``[B,Q,H]`` from ``block_inputs``.
            context: What ``context`` returned, or a cache of it; one pair a layer.
            draft_positions: Integers ``[B,Q]`` (or ``[Q]``), anchor + slot.
            attention: See ``Attention``.
            sliding: That of the sliding layers, where the network has some.

        Returns:
            ``[B,Q,H]`` after the final norm, ready for the target's LM head.
        """
        rope = self.rope(draft_positions)
        x = x.to(self.dtype)
        attentions = self._attentions(attention, sliding)
        for layer, key_value, attend in zip(self._draft_layers(), context, attentions, strict=True):
            x = layer(x, key_value, rope, attend)
        out: Tensor = self.norm(x)
        return out

    def forward(
        self,
        x: Tensor,
        F: Tensor,
        context_positions: Tensor,
        draft_positions: Tensor,
        attention: Attention,
        sliding: Attention | None = None,
    ) -> Tensor:
        """Draft over a whole context: ``draft(x, context(F, ...), ...)``.

        Args:
            x: ``[B,Q,H]`` from ``block_inputs``.
            F: ``[B,S,H]`` from ``fuse``.
            context_positions: Integers ``[B,S]`` or ``[S]``.
            draft_positions: Integers ``[B,Q]`` or ``[Q]``.
            attention: See ``Attention``; keys stand in the order context, draft rows.
            sliding: As ``draft``.

        Returns:
            ``[B,Q,H]`` after the final norm.
        """
        context = self.context(F, context_positions)
        return self.draft(x, context, draft_positions, attention, sliding)

    def _attentions(self, attention: Attention, sliding: Attention | None) -> list[Attention]:
        """One for each layer."""
        if sliding is None:
            assert not self.config.layers, "sliding layers have an attention of their own"
            return [attention] * len(self.layers)
        return [sliding if slides else attention for slides in self.config.slides]

    def _draft_layers(self) -> list[DraftLayer]:
        return cast("list[DraftLayer]", self.layers)


def _heads(config: DrafterConfig) -> tuple[MarkovHead | None, ConfidenceHead | None]:
    rank = config.markov_rank
    markov = MarkovHead(config.vocab_size, rank) if rank else None
    return markov, ConfidenceHead(config.hidden_size, rank) if config.confidence_head else None


def fold_feature_scale(fc_weight: Tensor, feature_scale: Tensor) -> Tensor:
    """The ``fc`` weight that takes raw features where ``fc_weight`` took scaled ones.

    Args:
        fc_weight: ``[H, K*H]``.
        feature_scale: ``[K]``, all positive.
    """
    per_layer = fc_weight.float().reshape(fc_weight.shape[0], feature_scale.shape[0], -1)
    scale = feature_scale.to(device=fc_weight.device, dtype=torch.float32)
    return (per_layer / scale[:, None]).flatten(1).to(fc_weight.dtype)


def backward_stages(drafter: Drafter) -> list[list[str]]:
    """Parameter names as the backward pass finishes them: heads, last layer first, the fusion."""
    layers = range(len(drafter.layers) - 1, -1, -1)
    prefixes = [
        *([HEADS] if drafter.markov_head else []),
        ("norm.",),
        *((f"layers.{index}.",) for index in layers),
        ("fc.", "hidden_norm."),
    ]
    names = [name for name, _ in drafter.named_parameters()]
    return [[name for name in names if name.startswith(prefix)] for prefix in prefixes]
