"""The parts of torch that are not its public interface and may change with a version.

Checked in torch 2.11 to 2.14. A name that is gone raises where it is used, before the first step.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.config
from torch.nn.attention import flex_attention as flex_module

MASK_BUILDER = (flex_module, "create_mask")
"""What ``create_block_mask`` calls, under whatever name that was imported."""

EAGER_ATTENTION = (flex_module, "setup_compilation_env")
"""What ``flex_attention`` calls on its way past torch.compile; compiled calls never get there."""

CUDAGRAPH_RECORDING = "CUDAGRAPH_RECORDING"
"""Trigger of a graph that torch.compile records by itself."""


@contextlib.contextmanager
def watching_compiles(callback: Callable[[str, str], None]) -> Iterator[None]:
    """Call ``callback(trigger, compile id)`` before each compile, in the thread that compiles.

    Args:
        callback: Takes ``DYNAMO``, ``LAZY_BACKWARD`` or ``CUDAGRAPH_RECORDING``; what it raises
            comes out of the call that would have compiled.
    """
    handler = torch._dynamo.callback.callback_handler

    def on_start(args: Any) -> None:
        callback(args.callback_trigger.name, str(args.compile_id))

    handler.register_start_callback(on_start)
    try:
        yield
    finally:
        handler.remove_start_callback(on_start)


def raise_recompile_limits(limit: int) -> None:
    """Let one code object have ``limit`` compiled forms, in code compiled by this thread."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, limit)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, limit)


def compile_cache_counts() -> tuple[int, int]:
    """Graphs that Inductor took from its cache, and those that it compiled, in this process."""
    counts = torch._dynamo.utils.counters["inductor"]
    return counts["fxgraph_cache_hit"], counts["fxgraph_cache_miss"]
