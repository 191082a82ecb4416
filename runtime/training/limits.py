"""What a run may ask for that a part of the product cannot do yet: limits, asked at every door.

``prepare`` asks before a prompt is answered and ``train`` before a model is loaded, so a limit
never costs anybody an hour. Whoever teaches a part something new takes out its limit. Those here
are of every method; a method has limits of its own.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from maskgen.errors import UnsupportedMaskError
from maskgen.mask_spec import MaskSpec
from runtime.config import Config
from runtime.errors import ConfigError
from runtime.ranks.devices import Placement
from runtime.static.attention import backend_of
from runtime.target.outline import TargetOutline

SHARING = "sharing a batch among devices"
GPU_ATTENTION = "attention on a GPU"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a command is asked to do: plain data, tried without a GPU or a target.

    What a door does not know is left out, and the limits that need it do not apply.
    """

    config: Config
    specs: Mapping[int, MaskSpec] = field(default_factory=dict)
    """Bucket length -> mask entry of the run."""
    placement: Placement | None = None
    """The devices that train."""
    ranks: int = 1
    """Those of all processes."""
    outline: TargetOutline | None = None
    """The target without its weights."""
    torch_version: str = torch.__version__


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Something that can be asked for and not be done."""

    field: str
    """What to name, as the run file spells it."""
    parts: tuple[str, ...]
    """Which parts cannot do it."""
    found: Callable[[Any], Any]
    """Takes the request; the value that cannot be done, None where the limit does not apply."""
    rule: str
    """What to set instead; ``{name}`` stands for a field of the request."""

    def error(self, value: object, request: Request) -> ConfigError:
        """The refusal of a value that ``found`` returned."""
        parts = " and ".join(self.parts)
        rule = self.rule.format_map(vars(request))
        return ConfigError(self.field, value, f"is not possible yet in {parts}; {rule}")


def check_limits(
    limits: Sequence[Limit], request: Request, parts: Collection[str] | None = None
) -> None:
    """Refuse what cannot be done.

    Args:
        limits: Those of a method.
        request: What is asked for.
        parts: The parts that the command uses; all of them where left out.

    Raises:
        ConfigError: A limit applies, the first one.
    """
    for limit in limits:
        if parts is None or not set(parts).isdisjoint(limit.parts):
            value = limit.found(request)
            if value is not None:
                raise limit.error(value, request)


def _uneven_batch(request: Request) -> int | None:
    batch = request.config.train.global_batch
    return batch if batch % request.ranks else None


def _uneven_parts(request: Request) -> int | None:
    train = request.config.train
    return train.global_batch if train.global_batch % (request.ranks * train.accumulate) else None


def _block_size(request: Request) -> list[int] | None:
    if request.placement is None:
        return None
    backend = backend_of(request.placement.devices[0])
    for spec in request.specs.values():
        try:
            backend.check(spec, request.torch_version)
        except UnsupportedMaskError:
            return list(spec.BLOCK_SIZE)
    return None


def unusable_target(request: Request) -> str | None:
    """A target that no method can use, and why."""
    outline = request.outline
    reason = outline and outline.unusable
    return f"{outline.name}: {reason}" if outline and reason else None


def beyond_positions(request: Request) -> str | None:
    """The longest bucket where it is longer than the target's positions: a sample may fill it."""
    limit = request.outline.max_positions if request.outline else None
    longest = max(request.specs, default=0)
    too_long = limit is not None and longest > limit
    return f"{longest}, of the target's {limit} positions" if too_long else None


COMMON: tuple[Limit, ...] = (
    Limit(
        field="masks.BLOCK_SIZE",
        parts=(GPU_ATTENTION,),
        found=_block_size,
        rule="set masks.BLOCK_SIZE = 128, which every torch can run at any length, or install a "
        "newer torch than {torch_version}",
    ),
    Limit(
        field="train.global_batch",
        parts=(SHARING,),
        found=_uneven_batch,
        rule="it must be a multiple of the number of devices, {ranks}",
    ),
    Limit(
        field="train.global_batch",
        parts=(SHARING,),
        found=_uneven_parts,
        rule="it must be a multiple of the number of devices times train.accumulate, {ranks} x "
        "{config.train.accumulate}",
    ),
)
"""They need no target and no data."""
