"""Static steps: graphs, buffers, masks, the optimizer, and the guard against compiling.

What stands here is the public API of docs/static_step.md.
"""

from runtime.static.attention import (
    Attention,
    Backend,
    backend_of,
    dense_attention,
    dense_mask,
    flex_attention_over,
)
from runtime.static.buffers import Field, InputSlot, StaticInputs, input_slots
from runtime.static.compilation import size_recompile_limits
from runtime.static.exchange import GradientExchange
from runtime.static.freeze import FreezeGuard
from runtime.static.graph import CaptureError, GraphPool, StaticStep
from runtime.static.masks import BucketMasks
from runtime.static.optimizer import AdamWSettings, Cycle, FlatAdamW
from runtime.static.step import Objective, TrainStep
from runtime.static.step_set import StepSet

__all__ = [
    "AdamWSettings",
    "Attention",
    "Backend",
    "BucketMasks",
    "CaptureError",
    "Cycle",
    "Field",
    "FlatAdamW",
    "FreezeGuard",
    "GradientExchange",
    "GraphPool",
    "InputSlot",
    "Objective",
    "StaticInputs",
    "StaticStep",
    "StepSet",
    "TrainStep",
    "backend_of",
    "dense_attention",
    "dense_mask",
    "flex_attention_over",
    "input_slots",
    "size_recompile_limits",
]
