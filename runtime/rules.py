"""What a run file's value must be: the rules of a key, which stand beside its default."""

import ctypes
import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

from runtime.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What a key's value must be, beside its type, and whether it shapes a run."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    one_of: tuple[str, ...] = ()
    shapes: bool = True
    """Whether two runs that differ in it compute other things. What says where or how often a run
    reports, or when it gives up, does not."""
    left_out: tuple[Any, ...] = ()
    """The values at which the key is left out of what shapes a run, the one that it then stands for
    first: the default of a key that is newer than the first runs, which had none, so that these
    stay the runs that they were."""

    @property
    def described(self) -> str:
        """The rule in words, such as ``at least 0, below 1``; empty where there is none."""
        if self.one_of:
            return f"one of {', '.join(self.one_of)}"
        bounds = {"at least": self.at_least, "above": self.above}
        bounds |= {"at most": self.at_most, "below": self.below}
        return ", ".join(f"{word} {end}" for word, end in bounds.items() if end is not None)

    def check(self, where: str, value: Any) -> None:
        """Refuse a value of the right type that breaks a rule.

        Raises:
            ConfigError: It does; ``where`` names the key.
        """
        if self.one_of and value not in self.one_of:
            raise ConfigError(where, value, f"must be one of {', '.join(self.one_of)}")
        # As the step has it, in float32: there 1e300 is infinite, 1e-300 is 0 and 0.99999999 is 1.
        meant = ctypes.c_float(value).value if isinstance(value, float) else value
        if isinstance(meant, float) and not math.isfinite(meant):
            raise ConfigError(where, value, "must be finite in float32")
        if self.at_least is not None and value < self.at_least:
            raise ConfigError(where, value, f"must be at least {self.at_least}")
        if self.at_most is not None and value > self.at_most:
            raise ConfigError(where, value, f"must be at most {self.at_most}")
        if self.above is not None and meant <= self.above:
            raise ConfigError(where, value, f"must be above {self.above} in float32")
        if self.below is not None and meant >= self.below:
            raise ConfigError(where, value, f"must be below {self.below} in float32")


def setting(
    default: T,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    one_of: tuple[str, ...] = (),
    shapes: bool = True,
    newer: bool = False,
    stands_for: T | None = None,
) -> T:
    """A key of a section, with its rules; see ``Rules``.

    ``newer`` leaves its default out, and what the default ``stands_for`` where that is another.
    """
    meant = () if stands_for is None else (stands_for,)
    rules = Rules(
        at_least=at_least,
        at_most=at_most,
        above=above,
        below=below,
        one_of=one_of,
        shapes=shapes,
        left_out=(*meant, default) if newer else (),
    )
    return field(default=default, metadata={"rules": rules})


UNSHAPING = {"rules": Rules(shapes=False)}
"""Metadata of a section of which no key shapes a run."""


def rules_of(kind: type) -> dict[str, Rules]:
    """The rules of each field of a section, or of each section of a run file."""
    return {item.name: item.metadata.get("rules", Rules()) for item in dataclasses.fields(kind)}
