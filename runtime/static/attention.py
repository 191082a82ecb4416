"""One mask, two ways to attend: compiled FlexAttention on GPUs, SDPA on the CPU.

FlexAttention has no backward on the CPU, so there the same row intervals are expanded to a dense
boolean mask.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention

from maskgen.canonical import visible_cells

KERNEL: FlexKernelOptions = {"BACKEND": "TRITON"}
"""The one kernel for every number of rows. Left to itself torch takes its decoding kernel below 128
rows, whose only tile is the next power of two of rows x heads of a group: over 128 nothing fits a
block of 128 rows, and compiling fails. Torch 2.11 to 2.14, ``kernel/flex/flex_decoding.py``."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``attention(q, k, v)`` with the mask inside: q ``[B, H, Q_LEN, D]``, k and v
``[B, KVH, KV_LEN, D]``, H a multiple of KVH -> ``[B, H, Q_LEN, D]``, scale ``D ** -0.5``."""


def dense_attention(mask: Tensor) -> Attention:
    """SDPA with a boolean mask ``[B or 1, 1, Q_LEN, KV_LEN]``."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, enable_gqa=query.shape[1] != key.shape[1]
        )

    return attend


def flex_attention_over(block_mask: BlockMask) -> Attention:
    """FlexAttention with a block mask; call it inside a compiled function only."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        out: Tensor = flex_attention(
            query,
            key,
            value,
            block_mask=block_mask,
            enable_gqa=grouped,
            kernel_options=KERNEL,
        )
        return out

    return attend


def dense_mask(starts: Tensor, ends: Tensor, KV_LEN: int) -> Tensor:
    """Expand row intervals into a boolean mask.

    Args:
        starts: int32 ``[B, H, K, Q_LEN]``.
        ends: int32 ``[B, H, K, Q_LEN]``.
        KV_LEN: Keys.

    Returns:
        bool ``[B, H, Q_LEN, KV_LEN]``.
    """
    kv_idx = torch.arange(KV_LEN, dtype=torch.int32, device=starts.device)
    return visible_cells(starts, ends, kv_idx)
