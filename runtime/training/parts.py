"""What a run would put on a device, known without any weights: parameters by part."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Parameters by part, and what a GPU has compiled for them."""

    trained: nn.Module
    """On the meta device."""
    frozen: Mapping[str, int] = field(default_factory=dict)
    """Part -> parameters beside it on each device that trains, in the dtype of compute."""
    apart: Mapping[str, int] = field(default_factory=dict)
    """Those on each device of ``run.target_devices``."""
    compiled: tuple[str, ...] = ()
    """What torch.compile makes on a GPU for each bucket."""


def parameters_of(module: nn.Module) -> dict[str, int]:
    """Parameters by part: ``layers`` for all of ``layers.0``, ``layers.1``; tied ones once."""
    found: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        path = name.split(".")[:-1] or [name]
        part = ".".join(takewhile(lambda step: not step.isdecimal(), path))
        found[part] = found.get(part, 0) + parameter.numel()
    return found
