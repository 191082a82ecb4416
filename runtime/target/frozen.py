"""What a step needs of a frozen target: its embedding, its head, and its hidden states."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class FrozenTarget:
    """The parts of a target on one device."""

    embed_weight: Tensor
    """``[V, H]``."""
    head_weight: Tensor
    """``[V, H]``."""
    feature_scale: Tensor
    """float32 ``[K]``: root mean square of each layer's features."""
    features: Callable[[Tensor], Tensor] | None
    """Input ids ``[B, S]`` to features ``[B, S, K*H]`` in the step, and H columns more with the
    last hidden state; None when they come with its inputs."""
    remote_dtype: torch.dtype | None = None
    """Of features that a target on another device writes into the inputs; None when they come with
    the samples, in bfloat16."""
