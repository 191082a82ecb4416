"""How the loss of a batch is compiled on a GPU, and what that may cost.

``layer``: one decoder layer and the head's loss, each once a bucket; all layers share the code.
``step``: forward and backward of the whole network at once. ``none``: eager, for the CPU.
"""

from collections.abc import Callable
from functools import partial

import torch

from runtime.drafter import Drafter
from runtime.loss import HeadLoss, head_loss
from runtime.step import draft_objective

COMPILATIONS = ("layer", "step", "none")
VARIANTS = 4
"""Entries of one code object for a bucket and a device: with and without gradients, and as the
first layer, whose input needs none."""


def objective_of(drafter: Drafter, how: str) -> Callable[..., HeadLoss]:
    """The loss function of a replica.

    Args:
        drafter: With ``layer`` its layers are compiled in place.
        how: One of ``COMPILATIONS``.
    """
    if how == "none":
        return draft_objective
    compile_whole = partial(torch.compile, fullgraph=True, dynamic=False)
    if how == "step":
        compiled: Callable[..., HeadLoss] = compile_whole(draft_objective)
        return compiled
    for layer in drafter.layers:
        layer.compile(fullgraph=True, dynamic=False)
    return partial(draft_objective, head_loss=compile_whole(head_loss))


def size_recompile_limits(num_buckets: int, num_devices: int) -> None:
    """Let every bucket of every device have its own compiled code.

    Dynamo counts entries per code object and by default falls back to eager attention, without a
    word, after 8. With ``fullgraph`` reaching the limit raises.
    """
    import torch._dynamo.config as dynamo

    limit = VARIANTS * num_buckets * num_devices
    dynamo.recompile_limit = max(dynamo.recompile_limit, limit)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, limit)
