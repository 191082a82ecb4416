"""What is compiled on a GPU: one decoder layer and the head's loss, each once a bucket.

All layers share one compiled form. Compiling the whole step at once costs several times as much a
bucket, and its replays gain a few percent at most (docs/design/compiling.md).
"""

from collections.abc import Callable
from functools import partial

import torch

from runtime.dflash.drafter import Drafter
from runtime.dflash.loss import HeadLoss, head_loss
from runtime.dflash.objective import draft_objective
from runtime.static.torch_internals import raise_recompile_limits

VARIANTS = 2
"""Forms of one code object for a bucket and a device: with gradients and without."""


def compiled_objective(drafter: Drafter) -> Callable[..., HeadLoss]:
    """``draft_objective`` for a drafter, whose layers are compiled in place."""
    for layer in drafter.layers:
        layer.compile(fullgraph=True, dynamic=False)
    compiled = torch.compile(head_loss, fullgraph=True, dynamic=False)
    return partial(draft_objective, head_loss=compiled)


def size_recompile_limits(num_buckets: int, num_devices: int) -> None:
    """Let every bucket of every device have its own compiled code.

    Dynamo counts entries per code object and by default falls back to eager attention, without a
    word, after 8. With ``fullgraph`` reaching the limit raises.
    """
    raise_recompile_limits(VARIANTS * num_buckets * num_devices)
