"""The families by name, and the call that writes a family's spans into static buffers."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from maskgen.errors import MaskSpecError
from maskgen.families.block_diffusion import BLOCK_DIFFUSION
from maskgen.families.causal import CAUSAL
from maskgen.families.chunked import CHUNKED
from maskgen.families.dflash import DFLASH
from maskgen.families.document import DOCUMENT
from maskgen.families.eagle3_ttt import EAGLE3_TTT
from maskgen.families.family import Family
from maskgen.families.full import FULL
from maskgen.families.global_prefix_window import GLOBAL_PREFIX_WINDOW
from maskgen.families.natten import NATTEN
from maskgen.families.p_eagle import P_EAGLE
from maskgen.families.params import one_of
from maskgen.families.prefix_lm import PREFIX_LM
from maskgen.families.shared_prefix import SHARED_PREFIX
from maskgen.families.sink_window import SINK_WINDOW
from maskgen.families.sliding_window import SLIDING_WINDOW
from maskgen.families.tree import TREE


class UnknownFamilyError(MaskSpecError, KeyError):
    """No family has that name; the rule names the nearest one."""

    # A KeyError would quote its message.
    __str__ = Exception.__str__


class Families(Mapping[str, Family]):
    """Families by name; a missing one is refused with the nearest name.

    ``maskgen.families`` is this mapping, and a package too: so that ``import
    maskgen.families.causal as c`` finds the module, the package's modules and names are attributes.
    """

    def __init__(self, *members: Family) -> None:
        self._members = {family.name: family for family in members}

    def __getitem__(self, name: str) -> Family:
        if not isinstance(name, str) or name not in self._members:
            raise UnknownFamilyError("family", name, one_of(str(name), self._members))
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __getattr__(self, name: str) -> Any:
        package = "maskgen.families"
        return sys.modules.get(f"{package}.{name}") or getattr(sys.modules[package], name)

    def __repr__(self) -> str:
        return f"families: {', '.join(self)}"


families: Final = Families(
    FULL,
    CAUSAL,
    SLIDING_WINDOW,
    SINK_WINDOW,
    CHUNKED,
    PREFIX_LM,
    DOCUMENT,
    SHARED_PREFIX,
    GLOBAL_PREFIX_WINDOW,
    BLOCK_DIFFUSION,
    DFLASH,
    EAGLE3_TTT,
    P_EAGLE,
    TREE,
    NATTEN,
)
"""Every mask family by its name in a config file."""


def spans_into(starts: Tensor, ends: Tensor, family: Family | str, **params: Any) -> None:
    """Write a family's spans into buffers, with torch ops of their device only.

    Reads nothing on the host and checks no values, so a CUDA graph can capture it.

    Args:
        starts: Buffer int32 ``[B, 1, K, Q_LEN]``; slots that the family does not use become
            empty.
        ends: Buffer of the same shape.
        family: A family or its name.
        **params: ``KV_LEN``, the static parameters, and runtime tensors of the same device.

    Raises:
        MaskSpecError: KV_LEN or a required parameter is missing, or the spans do not fit the
            buffers.
    """
    known = families[family] if isinstance(family, str) else family
    if "KV_LEN" not in params:
        raise MaskSpecError("KV_LEN", None, "is required: buffers of spans do not tell it")
    KV_LEN = params.pop("KV_LEN")
    new_starts, new_ends = known.spans(starts.shape[-1], KV_LEN, device=starts.device, **params)
    B, H, K, _ = starts.shape
    used = new_starts.shape[2]
    if {starts.dtype, ends.dtype} != {torch.int32}:
        raise MaskSpecError("starts", [str(starts.dtype), str(ends.dtype)], "both must be int32")
    if starts.shape != ends.shape or used > K or new_starts.shape[0] not in (1, B):
        found = [list(starts.shape), list(ends.shape)]
        rule = f"both buffers must hold {list(new_starts.shape)}, B broadcast, K or more slots"
        raise MaskSpecError("starts", found, rule)
    starts[:, :, :used].copy_(new_starts.expand(B, H, used, -1))
    ends[:, :, :used].copy_(new_ends.expand(B, H, used, -1))
    starts[:, :, used:].zero_()
    ends[:, :, used:].zero_()
