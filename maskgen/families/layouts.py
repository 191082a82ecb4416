"""Layouts: batch parameters of a family that are drawn ahead, when masks are built.

An entry of ``kind = "layouts"`` holds L draws and the mask of each, so that training builds none.

Legend: L layouts, n values of a parameter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from maskgen.errors import MaskSpecError
from maskgen.families.params import REQUIRED, Param


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """How a family draws layouts.

    ``count_fn`` takes the parameters declared here by name, the other functions those of the family
    too, defaults filled in.
    """

    draws: tuple[str, ...]
    """Names of the family's batch parameters that a layout has values of."""
    params: tuple[Param, ...]
    """What an entry says beside the family's parameters."""
    draw_fn: Callable[..., Mapping[str, Tensor]]
    """``(Q_LEN, KV_LEN, key, **params)`` -> each of ``draws``, int32 ``[L]`` or ``[L, n]``; the
    same key, bytes of a spec's digest, draws the same on any machine."""
    count_fn: Callable[..., int]
    """``(**params)`` -> L."""
    check_fn: Callable[[int, int, dict[str, Any]], None] | None = None
    """Rules between these parameters and the lengths; may fill in defaults."""
    earlier_fn: Callable[[int, int], Mapping[str, Any]] | None = None
    """``(Q_LEN, KV_LEN)`` -> the defaults of an earlier release, of the parameters whose defaults
    are others now."""

    @property
    def param_names(self) -> tuple[str, ...]:
        """Names of ``params``."""
        return tuple(param.name for param in self.params)

    def check(self, Q_LEN: int, KV_LEN: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return what an entry says, checked, defaults filled in; other names are passed over.

        A list of integers may be given as one of them.

        Raises:
            MaskSpecError: A value breaks its rule or is missing.
        """
        checked: dict[str, Any] = {}
        for param in self.params:
            value = given.get(param.name, param.default)
            if value is REQUIRED:
                raise MaskSpecError(param.name, None, f"is required by layouts: {param.doc}")
            if param.type == "ints" and isinstance(value, int):
                value = [value]
            checked[param.name] = param.check(value)
        if self.check_fn is not None:
            self.check_fn(Q_LEN, KV_LEN, checked)
        return {name: value for name, value in checked.items() if value is not None}

    def count(self, given: Mapping[str, Any]) -> int:
        """Return L, of parameters that ``check`` returned."""
        return self.count_fn(**{name: given[name] for name in self.param_names if name in given})

    def draw(
        self, Q_LEN: int, KV_LEN: int, key: bytes, params: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Draw the layouts of an entry; the same key draws the same on any machine.

        Args:
            Q_LEN: Query rows, in tokens.
            KV_LEN: Key columns, in tokens.
            key: Bytes of the spec's digest, or of the entry's that it is drawn as.
            params: The family's static parameters and those declared here, by name.

        Returns:
            int32 ``[L]`` or ``[L, n]`` on the CPU, for each of ``draws``.

        Raises:
            MaskSpecError: A value breaks its rule, or what is drawn is not what is declared.
        """
        own = self.check(Q_LEN, KV_LEN, params)
        drawn = dict(self.draw_fn(Q_LEN, KV_LEN, key, **{**params, **own}))
        if sorted(drawn) != sorted(self.draws):
            rule = f"must be {', '.join(sorted(self.draws))}"
            raise MaskSpecError("what a layout draws", sorted(drawn), rule)
        L = self.count(own)
        for name, values in drawn.items():
            if len(values) != L or values.dtype != torch.int32 or values.device.type != "cpu":
                found = [list(values.shape), str(values.dtype), str(values.device)]
                raise MaskSpecError(name, found, f"must be drawn as int32 [{L}, ...] on the CPU")
        return {name: drawn[name].contiguous() for name in self.draws}
