"""What a family takes: static parameters from a spec, and runtime parameters from a batch.

Every value is checked here as it was given, wide, before anything is cast to int32.
"""

import difflib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from maskgen.checks import MAX_LENGTH
from maskgen.errors import MaskSpecError

_FITTING: Final = (torch.int32, torch.int16, torch.uint16, torch.int8, torch.uint8)
"""Dtypes whose every value int32 holds."""
_INTEGERS: Final = (*_FITTING, torch.int64, torch.uint32, torch.uint64)


class _Required:
    """Marks a parameter that has no default."""

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = _Required()


@dataclass(frozen=True)
class Param:
    """A static parameter: part of a mask's spec, never of a batch."""

    name: str
    type: Literal["int", "bool", "str", "ints"]
    doc: str
    default: Any = REQUIRED
    minimum: int | None = None
    choices: tuple[str, ...] = ()

    def check(self, value: Any) -> Any:
        """Return the value as JSON knows it, or raise MaskSpecError."""
        if value is None and self.default is None:
            return None
        if self.type == "ints":
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise MaskSpecError(self.name, value, "must be a list of integers")
            return [self._check_int(item) for item in value]
        if self.type == "int":
            return self._check_int(value)
        if self.type == "bool":
            if not isinstance(value, bool):
                raise MaskSpecError(self.name, value, "must be true or false")
            return value
        if not isinstance(value, str):
            raise MaskSpecError(self.name, value, "must be a string")
        if self.choices and value not in self.choices:
            raise MaskSpecError(self.name, value, one_of(value, self.choices))
        return value

    def _check_int(self, value: Any) -> int:
        try:
            number: int | None = operator.index(value)
        except TypeError:
            number = None
        if number is None or isinstance(value, bool) or getattr(value, "dtype", 0) == torch.bool:
            raise MaskSpecError(self.name, value, "must be an integer")
        if self.minimum is not None and number < self.minimum:
            raise MaskSpecError(self.name, number, f"must be at least {self.minimum}")
        if abs(number) > MAX_LENGTH:
            raise MaskSpecError(self.name, number, "must lie within 2**30 of zero")
        return number


@dataclass(frozen=True)
class RuntimeParam:
    """A parameter that may change with the batch: an integer tensor ``[B]`` or ``[B, n]``."""

    name: str
    shape: str
    doc: str
    required: bool = True
    minimum: int = 0
    """Least value; -1 where padding has a value of its own."""
    maximum: int = MAX_LENGTH
    """Largest value, so that no sum that the family takes leaves int32."""

    @property
    def rank(self) -> int:
        """Number of dimensions, the batch included."""
        return len(self.shape.split(","))

    def check(self, value: Any) -> Tensor:
        """Check a value as it was given, and cast it only then.

        Args:
            value: An integer tensor of any device and dtype, a NumPy array, or nested lists.

        Returns:
            int32 on the CPU, with its batch dimension.

        Raises:
            MaskSpecError: It is no integers, of another rank, ragged, empty, or out of range.
        """
        values = self._integers(value)
        self._check_shape(values.shape)
        low, high = int(values.min()), int(values.max())
        if low < self.minimum:
            rule = f"each must be at least {self.minimum} ({self.doc})"
            raise MaskSpecError(self.name, low, rule)
        if high > self.maximum:
            rule = f"each must be at most {self.maximum} ({self.doc})"
            raise MaskSpecError(self.name, high, rule)
        return self._batched(torch.from_numpy(np.asarray(values.astype(np.int32))))

    def tensor(self, value: Any, device: torch.device) -> Tensor:
        """Return the value as an int32 tensor with its batch dimension, narrowing nothing unseen.

        A tensor whose dtype fits int32 is taken as it is: no host sync, so this runs inside a
        captured graph. Anything else is checked, which a wider tensor on a GPU cannot be.

        Raises:
            MaskSpecError: The value breaks its rule, or would have to be read back from a GPU.
        """
        if isinstance(value, Tensor):
            if value.dtype in _FITTING:
                self._check_shape(value.shape)
                return self._batched(value.to(device=device, dtype=torch.int32))
            if value.device.type != "cpu" or torch.compiler.is_compiling():
                rule = "must be int32 where the host may not read it: check the values, then cast"
                raise MaskSpecError(self.name, str(value.dtype), rule)
        return self.check(value).to(device)

    def _check_shape(self, shape: Sequence[int]) -> None:
        if len(shape) not in (self.rank, self.rank - 1):
            rule = f"must have shape [{self.shape}] or the same without the batch"
            raise MaskSpecError(self.name, list(shape), rule)
        if 0 in shape:
            raise MaskSpecError(self.name, list(shape), "must not be empty")

    def _batched(self, table: Tensor) -> Tensor:
        return table.unsqueeze(0) if table.dim() == self.rank - 1 else table

    def _integers(self, value: Any) -> Any:
        """The value as a NumPy array of integers of its own width, or of Python's."""
        rule = f"must hold integers of shape [{self.shape}]"
        if isinstance(value, Tensor):
            if value.dtype not in _INTEGERS:
                raise MaskSpecError(self.name, str(value.dtype), rule)
            try:
                return value.cpu().numpy()
            except (RuntimeError, TypeError) as error:
                rule = f"must be a tensor whose values can be read ({error})"
                raise MaskSpecError(self.name, str(value.device), rule) from error
        if isinstance(value, np.ndarray) and value.dtype != object:
            if value.dtype.kind not in "iu":
                raise MaskSpecError(self.name, str(value.dtype), rule)
            return value
        try:
            # As objects: NumPy would make one dtype of all, and bools and floats into integers.
            items = np.array(value, dtype=object)
        except (TypeError, ValueError, RuntimeError) as error:
            raise MaskSpecError(self.name, type(value).__name__, rule) from error
        kinds = set(map(type, items.flat))
        if any(issubclass(kind, Tensor) for kind in kinds):
            items = np.frompyfunc(lambda x: x.item() if isinstance(x, Tensor) else x, 1, 1)(items)
            kinds = set(map(type, items.flat))
        for kind in kinds:
            if not issubclass(kind, Integral) or issubclass(kind, bool):
                bad = next(item for item in items.flat if type(item) is kind)
                raise MaskSpecError(self.name, bad, rule)
        return items


def one_of(name: str, valid: Iterable[str]) -> str:
    """Say what is valid, the nearest name first when one is near."""
    options = sorted(valid)
    near = difflib.get_close_matches(name, options, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}valid: {', '.join(options) or 'none'}"


def check_length(field: str, value: Any) -> int:
    """Return a length that int32 spans can address, as Python's int: NumPy's own may wrap.

    Raises:
        MaskSpecError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise MaskSpecError(field, value, "must be an integer number of tokens")
    length = int(value)
    if length < 1:
        raise MaskSpecError(field, value, "must be at least 1: a mask has rows and columns")
    if length > MAX_LENGTH:
        raise MaskSpecError(field, value, "must be at most 2**30, so that int32 addresses it")
    return length
