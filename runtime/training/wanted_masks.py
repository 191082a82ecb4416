"""The mask entries that a run reads, as ``[masks]`` asks for them: worked out without any cache.

``prepare`` asks before a prompt is answered and ``train`` before a model is loaded, so that what
one of them refuses the other does not let pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maskgen.mask_spec import MaskSpec
from runtime.config import Config
from runtime.training.method import Method
from runtime.training.watch import check_watch


@dataclass(frozen=True, kw_only=True)
class WantedMasks:
    """Entries by bucket length, ascending."""

    specs: Mapping[int, MaskSpec]
    """Those that are trained on."""
    beside: Mapping[str, Mapping[int, MaskSpec]]
    """Further ones of the same buckets, see ``Method.specs_beside``."""
    heldout: Mapping[int, MaskSpec]
    """Those that held-out rows are scored on; empty where the run is not scored."""
    heldout_beside: Mapping[str, Mapping[int, MaskSpec]]
    """Further ones of the buckets of ``heldout``."""


def wanted_masks(method: Method[Any], config: Config) -> WantedMasks:
    """The entries of a run, refusing a run file that lacks some.

    Args:
        method: What kind of training.
        config: The run file.

    Raises:
        ConfigError: ``[masks]`` has no entry for something that is asked for, the method has no
            held-out score, or what needs such scores is asked for without them.
        MaskSpecError: ``[masks]`` is wrong.
    """
    check_watch(config)
    scored = bool(config.evaluate.every)
    return WantedMasks(
        specs=method.specs(config),
        beside=method.specs_beside(config),
        heldout=method.heldout_specs(config) if scored else {},
        heldout_beside=method.specs_beside(config, heldout=True) if scored else {},
    )
