"""A mask family: named parameters and their rules -> row intervals, written in torch ops only.

Legend: B batch, H heads (1 in every family here), K span slots of a row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from maskgen.errors import MaskSpecError
from maskgen.families.after_context import AfterContext
from maskgen.families.draw import Draw
from maskgen.families.layouts import Layouts
from maskgen.families.params import REQUIRED, Param, RuntimeParam, check_length, one_of
from maskgen.intervals import RowIntervals

Spans: TypeAlias = tuple[Tensor, Tensor]
"""``starts`` and ``ends``, int32 ``[B, H, K, Q_LEN]``."""

MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's ``mask_mod(b, h, q_idx, kv_idx)``."""

MAX_ELEMENTS: Final = (1 << 31) - 1
"""Most elements of a span tensor that int32 addressing reaches."""

ANALYTIC_ABOVE_K: Final = 4
"""With more spans a row than this, a family's own mask_mod beats the one that reads spans."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One mask family.

    Its functions take ``Q_LEN`` and ``KV_LEN`` and then every parameter by name, defaults filled
    in, runtime parameters as int32 tensors on the device (``None`` when not given).
    """

    name: str
    """As it stands in a config file."""
    revision: int
    """Raised whenever the spans of some parameters can change."""
    formula: str
    """Which cells are allowed, in one line."""
    source: str
    """The paper or code that the formula is taken from."""
    params: tuple[Param, ...] = ()
    """What a spec says."""
    runtime: tuple[RuntimeParam, ...] = ()
    """What a batch says."""
    span_fn: Callable[..., Spans]
    """``(Q_LEN, KV_LEN, device, **params)`` -> spans, torch ops without host syncs."""
    mask_mod_fn: Callable[..., MaskMod]
    """``(Q_LEN, KV_LEN, device, **params)`` -> the formula as a mask_mod."""
    max_k_fn: Callable[..., int]
    """``(Q_LEN, KV_LEN, **static params)`` -> largest number of spans in a row."""
    check_fn: Callable[[int, int, dict[str, Any]], None] | None = None
    """Rules between parameters, and between the values of runtime parameters, which it is given
    as ``RuntimeParam.check`` returns them; may fill in defaults."""
    bounds_fn: Callable[..., tuple[RowIntervals, RowIntervals]] | None = None
    """``(Q_LEN, KV_LEN, **static params)`` -> must and may."""
    draw_fn: Callable[..., dict[str, Any]] | None = None
    """``(draw, Q_LEN, KV_LEN, **static params)`` -> runtime parameters of one sample, by lists."""
    layouts: Layouts | None = None
    """How batch parameters are drawn ahead; None where ``kind = "layouts"`` makes no sense."""
    after_context: AfterContext | None = None
    """How an entry may name lengths by a context; None where Q_LEN and KV_LEN say all."""
    analytic_above: int = ANALYTIC_ABOVE_K
    """With more spans a row than this, the formula is the faster mask_mod; 0 where it was
    measured faster than any spans (``benchmarks/gpu_masks.py``)."""

    @property
    def runtime_params(self) -> tuple[str, ...]:
        """Names of the parameters that may change with the batch."""
        return tuple(param.name for param in self.runtime)

    def check(self, Q_LEN: int, KV_LEN: int, params: Mapping[str, Any]) -> dict[str, Any]:
        """Check every value and fill in the defaults.

        Reads runtime tensors on the host, so it never runs inside a graph. Runtime parameters
        may be missing: a parametric entry has none.

        Args:
            Q_LEN: Query rows, in tokens.
            KV_LEN: Key columns, in tokens.
            params: Values by name.

        Returns:
            The static parameters with defaults, and the runtime parameters that were given, int32
            on the CPU and with their batch dimension.

        Raises:
            MaskSpecError: A length or value breaks its rule, or a name is unknown.
        """
        Q_LEN, KV_LEN = self._check_frame(Q_LEN, KV_LEN, params)
        checked = self.static_params(params)
        for given in self.runtime:
            if params.get(given.name) is not None:
                checked[given.name] = given.check(params[given.name])
        batch = self._batch(checked)
        if self.check_fn is not None:
            self.check_fn(Q_LEN, KV_LEN, checked)
        elements = self.max_K(Q_LEN, KV_LEN, checked) * Q_LEN * batch
        if elements > MAX_ELEMENTS:
            rule = f"batch x spans a row x Q_LEN must be at most 2**31 - 1, found {elements}"
            raise MaskSpecError("Q_LEN", Q_LEN, rule)
        # A spec is JSON without null: what is None stays away and is filled in again later.
        return {name: value for name, value in checked.items() if value is not None}

    def max_K(self, Q_LEN: int, KV_LEN: int, params: Mapping[str, Any]) -> int:  # noqa: N802
        """Largest number of spans that a row can have under these static parameters."""
        return self.max_k_fn(int(Q_LEN), int(KV_LEN), **self.static_params(params))

    def spans(
        self, Q_LEN: int, KV_LEN: int, *, device: torch.device | str | None = None, **params: Any
    ) -> Spans:
        """Compute the spans: static shape, no host sync where runtime parameters are int32 tensors.

        Static parameters are checked, each for itself; of such tensors no value is looked at.

        Args:
            Q_LEN: Query rows, in tokens.
            KV_LEN: Key columns, in tokens.
            device: Where the result lies; by default where the runtime tensors lie, else the CPU.
                For graph capture they must lie there.
            params: Values by name.

        Returns:
            ``starts`` and ``ends``, int32 ``[B, 1, max_K, Q_LEN]``, disjoint, empty ones anywhere.

        Raises:
            MaskSpecError: A required parameter is missing, a name is unknown, or a length, a static
                parameter, or a runtime parameter that is no int32 tensor breaks its rule.
        """
        where = _device_of(device, params)
        Q_LEN, KV_LEN = self._check_frame(Q_LEN, KV_LEN, params)
        return self.span_fn(Q_LEN, KV_LEN, where, **self._filled(params, where))

    def mask_mod(
        self, Q_LEN: int, KV_LEN: int, *, device: torch.device | str | None = None, **params: Any
    ) -> MaskMod:
        """Return the formula as a mask_mod that captures ints and tensors of the device only.

        The tensors hold what the runtime parameters say now. Call this within a captured step,
        as it needs no host sync, and they follow each batch.
        """
        where = _device_of(device, params)
        Q_LEN, KV_LEN = self._check_frame(Q_LEN, KV_LEN, params)
        mod = self.mask_mod_fn(Q_LEN, KV_LEN, where, **self._filled(params, where))
        mod.__name__ = f"{self.name}_mask_mod"
        return mod

    def chosen_mask_mod(
        self, spans: RowIntervals, device: torch.device | str | None = None, **params: Any
    ) -> MaskMod | None:
        """Return the formula where it is the faster mask_mod of the compiled attention.

        For ``to_block_mask``, which takes None for the mask_mod that reads the spans.

        Args:
            spans: The mask; its K decides.
            device: Where the attention runs; by default where the spans lie.
            params: What the spans were made from, by name.

        Raises:
            MaskSpecError: A value breaks its rule, or a name is unknown.
        """
        if self.analytic_above >= spans.K:
            return None
        checked = self.check(spans.Q_LEN, spans.KV_LEN, params)
        device = spans.device if device is None else device
        return self.mask_mod(spans.Q_LEN, spans.KV_LEN, device=device, **checked)

    def draw(
        self, digest: str, B: int, Q_LEN: int, KV_LEN: int, **static: Any
    ) -> dict[str, Tensor]:
        """Draw runtime parameters of a batch; the same digest draws the same on any machine.

        Args:
            digest: SHA-256, as hex digits.
            B: Samples of the batch.
            Q_LEN: Query rows, in tokens.
            KV_LEN: Key columns, in tokens.
            static: Static parameters by name.

        Returns:
            int32 ``[B]`` or ``[B, n]`` by name; none where the mask does not depend on a batch.
        """
        if self.draw_fn is None:
            return {}
        Q_LEN, KV_LEN = self._check_frame(Q_LEN, KV_LEN, static)
        source, filled = Draw(digest), self.static_params(self.check(Q_LEN, KV_LEN, static))
        drawn = [self.draw_fn(source, Q_LEN, KV_LEN, **filled) for _ in range(B)]
        return {
            given.name: given.check([sample[given.name] for sample in drawn])
            for given in self.runtime
            if given.name in drawn[0]
        }

    def sizes(self, params: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the sizes of batch parameters, by the letters of their shapes: ``{"N": 8}``."""
        return {
            letter.strip(): size
            for given in self.runtime
            if given.name in params
            for letter, size in zip(
                given.shape.split(",")[1:], params[given.name].shape[1:], strict=True
            )
            if letter.strip().isidentifier()
        }

    def bounds(self, Q_LEN: int, KV_LEN: int, **static: Any) -> tuple[RowIntervals, RowIntervals]:
        """Bound the mask over every value of its runtime parameters.

        Returns:
            ``must``, cells allowed whatever the batch says, and ``may``, a superset of the cells
            that some batch allows; equal for a family without runtime parameters.
        """
        Q_LEN, KV_LEN = self._check_frame(Q_LEN, KV_LEN, static)
        if self.bounds_fn is None:
            exact = self.intervals(Q_LEN, KV_LEN, **static)
            return exact, exact
        return self.bounds_fn(
            Q_LEN, KV_LEN, **self.static_params(self.check(Q_LEN, KV_LEN, static))
        )

    def intervals(
        self, Q_LEN: int, KV_LEN: int, *, device: torch.device | str | None = None, **params: Any
    ) -> RowIntervals:
        """Check the parameters and return the mask in canonical form.

        Raises:
            MaskSpecError: A length or value breaks its rule, or a name is unknown.
        """
        where = _device_of(device, params)
        Q_LEN, KV_LEN = self._check_frame(Q_LEN, KV_LEN, params)
        checked = self.check(Q_LEN, KV_LEN, params)
        starts, ends = self.spans(Q_LEN, KV_LEN, device=where, **checked)
        return RowIntervals(starts, ends, KV_LEN).canonical()

    def _check_frame(self, Q_LEN: int, KV_LEN: int, params: Mapping[str, Any]) -> tuple[int, int]:
        lengths = check_length("Q_LEN", Q_LEN), check_length("KV_LEN", KV_LEN)
        names = [param.name for param in self.params] + list(self.runtime_params)
        for name, value in params.items():
            if name not in names:
                rule = f"is no parameter of family {self.name!r}: {one_of(name, names)}"
                raise MaskSpecError(name, value, rule)
        return lengths

    def static_params(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the static parameters, each checked for itself, defaults filled in.

        Raises:
            MaskSpecError: One is missing or breaks its rule.
        """
        checked: dict[str, Any] = {}
        for param in self.params:
            value = params.get(param.name, param.default)
            if value is REQUIRED:
                rule = f"is required by family {self.name!r}: {param.doc}"
                raise MaskSpecError(param.name, None, rule)
            checked[param.name] = param.check(value)
        return checked

    def _filled(self, params: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        filled = self.static_params(params)
        for given in self.runtime:
            value = params.get(given.name)
            if value is None and given.required:
                rule = f"is required by family {self.name!r}: {given.doc}"
                raise MaskSpecError(given.name, None, rule)
            filled[given.name] = None if value is None else given.tensor(value, device)
        return filled

    def _batch(self, checked: Mapping[str, Any]) -> int:
        sizes = [1, *(len(checked[given.name]) for given in self.runtime if given.name in checked)]
        if len(set(sizes) - {1}) > 1:
            rule = "runtime parameters must agree in their batch size or have 1"
            raise MaskSpecError(self.runtime[0].name, sizes[1:], rule)
        return max(sizes)


def _device_of(device: torch.device | str | None, params: Mapping[str, Any]) -> torch.device:
    if device is not None:
        return torch.device(device)
    tensors = [value for value in params.values() if isinstance(value, Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")
