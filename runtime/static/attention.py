"""One mask, two ways to attend: compiled FlexAttention on GPUs, SDPA on the CPU.

FlexAttention has no backward on the CPU, so there the same row intervals are expanded to a dense
boolean mask.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention

from maskgen.block_mask import check_gpu_limits
from maskgen.canonical import visible_cells
from maskgen.mask_spec import MaskSpec

KERNEL: FlexKernelOptions = {"BACKEND": "TRITON"}
"""The one kernel for every number of rows. Left to itself torch takes its decoding kernel below 128
rows, whose only tile is the next power of two of rows x heads of a group: over 128 nothing fits a
block of 128 rows, and compiling fails. Torch 2.11 to 2.14, ``kernel/flex/flex_decoding.py``."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``attention(q, k, v)`` with the mask inside: q ``[B, H, Q_LEN, D]``, k and v
``[B, KVH, KV_LEN, D]``, H a multiple of KVH -> ``[B, H, Q_LEN, D]``, scale ``D ** -0.5``."""


def dense_attention(mask: Tensor, scale: float | None = None) -> Attention:
    """SDPA with a boolean mask ``[B or 1, 1, Q_LEN, KV_LEN]``; scale ``D ** -0.5`` if left out."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    return attend


def flex_attention_over(block_mask: BlockMask, scale: float | None = None) -> Attention:
    """FlexAttention with a block mask; call it inside a compiled function only."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        out: Tensor = flex_attention(
            query,
            key,
            value,
            block_mask=block_mask,
            scale=scale,
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


@dataclass(frozen=True)
class Backend:
    """How the steps of a kind of device attend: one value, asked by whoever depends on it."""

    name: str
    needs_tables: bool
    """Whether it reads block tables, which then lie beside the spans; else a dense mask."""
    compiled: bool
    """Whether the parts of a step are compiled, as FlexAttention must be."""

    def attend(self, mask: BlockMask | Tensor) -> Attention:
        """Attention with a mask of the form that this backend takes."""
        return flex_attention_over(mask) if isinstance(mask, BlockMask) else dense_attention(mask)

    def check(self, spec: MaskSpec, torch_version: str = torch.__version__) -> None:
        """Refuse a mask that it cannot attend with.

        Raises:
            UnsupportedMaskError: A block size or a length is beyond it in this torch.
        """
        if self.needs_tables:
            check_gpu_limits(spec.BLOCK_SIZE, spec.Q_LEN, spec.KV_LEN, torch_version)


FLEX = Backend("FlexAttention", needs_tables=True, compiled=True)
DENSE = Backend("SDPA with a dense mask", needs_tables=False, compiled=False)


def backend_of(device: torch.device) -> Backend:
    """The backend of the steps on a device."""
    return FLEX if device.type == "cuda" else DENSE
