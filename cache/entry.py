"""Entries: what ``publish`` takes and what ``load`` returns."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.chunk import IntArray
from cache.digest import check_json
from cache.errors import InvalidEntryError

MAX_ENTRY_BYTES = 1 << 32
"""Most logical bytes of one entry, 4 GiB."""

MAX_DIMENSIONS = 8
"""Most dimensions of an array."""

MAX_NAME_LENGTH = 200
"""Most characters of an entry's or an array's name."""

_MANIFEST_DEPTH = 3
"""Levels of a manifest around the spec and the attrs of an entry, which count with theirs."""

_NAME = re.compile(r"(?!\.+(/|\Z))[A-Za-z0-9._-]+(/(?!\.+(/|\Z))[A-Za-z0-9._-]+)*")


def is_name(text: object) -> bool:
    """Return whether ``text`` may name an entry or an array.

    Parts of letters, digits, dot, underscore and hyphen joined by ``/``, none of them ``.`` or
    ``..``, at most ``MAX_NAME_LENGTH`` characters in all: safe as a relative file name anywhere.
    """
    return (
        isinstance(text, str) and len(text) <= MAX_NAME_LENGTH and _NAME.fullmatch(text) is not None
    )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EntryData:
    """An entry to be published."""

    name: str
    """Unique in its version; see ``is_name``."""
    spec: Mapping[str, Any]
    """What the entry was made from: integers, strings, booleans, lists and dicts."""
    attrs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What else a reader wants to know, of the same types."""
    spans: Mapping[str, NDArray[np.int32]] = dataclasses.field(default_factory=dict)
    """Arrays of the section ``spans``, int32 of any shape, by name."""
    tables: Mapping[str, NDArray[np.int32]] = dataclasses.field(default_factory=dict)
    """Arrays of the section ``tables``; a name stands in one section only."""

    def check(self) -> None:
        """Check the entry against the format's rules.

        Raises:
            InvalidEntryError: The name, the JSON or an array breaks a rule.
        """
        if not is_name(self.name):
            raise InvalidEntryError(
                str(self.name),
                f"a name must be parts of A-Z a-z 0-9 . _ - joined by '/', none of dots only, "
                f"{MAX_NAME_LENGTH} characters at most; rename it",
            )
        for field, value in (("spec", self.spec), ("attrs", self.attrs)):
            try:
                check_json(value, "value", _MANIFEST_DEPTH)
            except (TypeError, ValueError) as error:
                raise InvalidEntryError(self.name, f"{field}: {error}") from error
        doubled = sorted(set(self.spans) & set(self.tables))
        if doubled:
            raise InvalidEntryError(
                self.name, f"the array {doubled[0]!r} must stand in one section, not in both"
            )
        total = 0
        for name, array in [*self.spans.items(), *self.tables.items()]:
            self._check_array(name, array)
            total += array.nbytes
        if total > MAX_ENTRY_BYTES:
            raise InvalidEntryError(
                self.name, f"it must hold at most {MAX_ENTRY_BYTES} bytes, found {total}; split it"
            )

    def _check_array(self, name: str, array: object) -> None:
        if not is_name(name):
            raise InvalidEntryError(self.name, f"{name!r} must be a name like an entry's")
        if not isinstance(array, np.ndarray) or array.dtype != np.dtype(np.int32):
            found = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise InvalidEntryError(
                self.name, f"array {name!r} must be a numpy array of int32, found {found}"
            )
        if not 1 <= array.ndim <= MAX_DIMENSIONS:
            raise InvalidEntryError(
                self.name,
                f"array {name!r} must have 1 to {MAX_DIMENSIONS} dimensions, found {array.ndim}",
            )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """A verified entry; its arrays are shared by all who loaded it, and read-only."""

    name: str
    """Its name."""
    version: str
    """The id of the version it was loaded from."""
    spec: Mapping[str, Any]
    """What the entry was made from."""
    attrs: Mapping[str, Any]
    """What else was published with it."""
    sha256: str
    """Digest of its logical bytes."""
    shapes: Mapping[str, Mapping[str, Sequence[int]]]
    """By section, by array; the arrays of a section lie end to end in this order."""
    values: Mapping[str, IntArray]
    """By section, all of the entry's values, flat."""

    @functools.cached_property
    def arrays(self) -> Mapping[str, IntArray]:
        """All arrays by name, read-only int32; views of shared memory."""
        found: dict[str, IntArray] = {}
        for section, shapes in self.shapes.items():
            start = 0
            for name, shape in shapes.items():
                stop = start + math.prod(shape)
                found[name] = self.values[section][start:stop].reshape(shape)
                start = stop
        return MappingProxyType(found)

    def to_data(self) -> EntryData:
        """Return the entry as ``publish`` takes it, to copy it into the next version."""
        spans, tables = (
            {name: self.arrays[name] for name in self.shapes[section]}
            for section in ("spans", "tables")
        )
        return EntryData(
            name=self.name, spec=self.spec, attrs=self.attrs, spans=spans, tables=tables
        )
