"""A cache entry -> the mask it holds: row intervals, block tables and parameters as tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache import Entry, Store
from cache.advice import how_to_build
from maskgen.buckets import Bucket
from maskgen.checks import checked_int
from maskgen.errors import MaskSpecError, StaleMaskError, UnsupportedMaskError
from maskgen.families.family import Family, MaskMod
from maskgen.interval_limit import MAX_INTERVALS
from maskgen.intervals import RowIntervals
from maskgen.mask_spec import MaskSpec
from maskgen.named_family import find_family
from maskgen.named_function import installed_source
from maskgen.tables import TABLE_FIELDS, BlockTables

SPAN_ARRAYS = ("starts", "ends")

MAX_NUMBERS = 1 << 26
"""Most blocks, rows or keys that are worked through for an entry of a cache that anyone may have
made: 256 MiB a tensor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskEntry:
    """One mask of a version, as the runtime and the checks use it. All tensors are on the CPU."""

    name: str
    """Entry name, ``dflash/ctx2048``."""
    spec: MaskSpec
    """What it was built from."""
    version: str
    """Id of the version it was read from, 64 hex digits."""
    sha256: str
    """Digest of the entry's arrays."""
    attrs: Mapping[str, Any]
    """What the build counted: K, B, H, blocks, cells, rows without keys."""
    bucket: Bucket
    """The static shape."""
    num_layouts: int
    """Layouts in the entry, the batch size of ``spans`` and ``tables``; 1 for other kinds."""
    params: Mapping[str, Tensor]
    """Of layouts the batch parameters that were drawn, int32 ``[L]`` or ``[L, n]``: of DFlash
    ``anchors`` and ``n_valid``; else empty."""
    _spans: RowIntervals | None
    _tables: BlockTables | None

    @property
    def kind(self) -> str:
        """``static``, ``layouts`` or ``parametric``."""
        return self.spec.kind

    @property
    def spans(self) -> RowIntervals:
        """Row intervals; B is the number of layouts.

        Raises:
            UnsupportedMaskError: The entry is parametric.
        """
        if self._spans is None:
            raise self._no_arrays("spans")
        return self._spans

    @property
    def tables(self) -> BlockTables:
        """Exact block tables; B is the number of layouts.

        Raises:
            UnsupportedMaskError: The entry is parametric.
        """
        if self._tables is None:
            raise self._no_arrays("tables")
        return self._tables

    def chosen_mask_mod(self, device: torch.device | str | None = None) -> MaskMod | None:
        """Return the mask_mod for ``to_block_mask``; None for the one that reads ``spans``.

        Args:
            device: Where the attention runs; the CPU by default.

        Raises:
            UnsupportedMaskError: The entry is parametric.
            MaskSpecError: A parameter of the spec breaks its rule.
        """
        family = _same_family(self.spec)
        if family is None:
            return None
        params: dict[str, Any] = {**self.spec.family_params, **self.params}
        return family.chosen_mask_mod(self.spans, device, **params)

    def _no_arrays(self, what: str) -> UnsupportedMaskError:
        return UnsupportedMaskError(
            f"{what} of {self.name!r} are asked for, but a parametric entry has none: they depend "
            "on the batch; compute them with spans_into and tables_into"
        )


def load_entry(store: Store, name: str, version: str | None = None) -> MaskEntry:
    """Read and verify one entry, to use it.

    Args:
        store: An open cache.
        name: Entry name.
        version: Version id or a prefix of one; the current version if left out.

    Raises:
        EntryNotFoundError: The version has no such entry.
        DamagedEntryError: Its bytes are not what was published.
        MaskSpecError: Its spec, counts or anchors are not what maskgen writes.
        LayoutInvariantError: Its tables are no block tables of one mask.
        StaleMaskError: It was built from a module that has changed since.
    """
    entry = parse_entry(store.load(name, version))
    built, here = entry.attrs.get("source"), None
    if entry.spec.is_code and built is not None:
        here = installed_source(entry.spec.family)
    # A machine without the module takes what was built elsewhere.
    if here is not None and here != built:
        raise StaleMaskError(
            f"mask {name!r} was built from {entry.spec.family}, and that module has changed since "
            f"(SHA-256 {str(built)[:12]}, now {here[:12]}); {how_to_build(store.location)}"
        )
    return entry


def parse_entry(entry: Entry) -> MaskEntry:
    """Turn an entry's arrays into tensors, checking every value against the spec.

    Raises:
        MaskSpecError: The spec, the counts and the arrays do not belong together.
        LayoutInvariantError: The tables are no block tables of one mask.
    """
    spec = MaskSpec.from_json(entry.name, entry.spec)
    K = _count(entry, "K")
    if K > MAX_INTERVALS:
        raise MaskSpecError(f"attribute K of {entry.name!r}", K, f"must be at most {MAX_INTERVALS}")
    spans: RowIntervals | None = None
    tables: BlockTables | None = None
    params: dict[str, Tensor] = {}
    if spec.kind != "parametric":
        B, H = _count(entry, "B"), _count(entry, "H")
        if spec.kind == "layouts":
            params = _layouts(entry, spec, B)
        shape = (B, H, K, spec.Q_LEN)
        starts, ends = (_tensor(entry, array, shape) for array in SPAN_ARRAYS)
        spans = RowIntervals(starts, ends, spec.KV_LEN)
        packed = {
            array: _writable(entry.arrays[array]) for array in TABLE_FIELDS if array in entry.arrays
        }
        tables = BlockTables.unpack(
            packed, B=B, H=H, Q_LEN=spec.Q_LEN, KV_LEN=spec.KV_LEN, BLOCK_SIZE=spec.BLOCK_SIZE
        )
    _check_family(entry.name, spec, params, K)
    return MaskEntry(
        name=entry.name,
        spec=spec,
        version=entry.version,
        sha256=entry.sha256,
        attrs=entry.attrs,
        bucket=Bucket(spec.Q_LEN, spec.KV_LEN, spec.BLOCK_SIZE, K),
        num_layouts=spans.B if spec.kind == "layouts" and spans is not None else 1,
        params=params,
        _spans=spans,
        _tables=tables,
    )


def check_size(spec: MaskSpec, B: int = 1, H: int = 1) -> None:
    """Refuse what would take more memory than ``MAX_NUMBERS`` allows, before it is spent.

    Args:
        spec: What the entry claims to be.
        B: Batch rows or layouts that it claims to have.
        H: Heads that it claims to have.

    Raises:
        MaskSpecError: Naming the size.
    """
    rows, columns = Bucket(spec.Q_LEN, spec.KV_LEN, spec.BLOCK_SIZE, 1).num_blocks
    sizes = {"Q_LEN": spec.Q_LEN, "KV_LEN": spec.KV_LEN, "blocks": B * H * rows * columns}
    for field, size in sizes.items():
        if size > MAX_NUMBERS:
            rule = "must be at most 2**26 to be looked into; load the entry to use it"
            raise MaskSpecError(f"{field} of {spec.name!r}", size, rule)


def _layouts(entry: Entry, spec: MaskSpec, L: int) -> dict[str, Tensor]:
    """The batch parameters that were drawn: what the family draws, as often as the spec says."""
    names = entry.arrays.keys() - {*SPAN_ARRAYS, *TABLE_FIELDS}
    family = _same_family(spec)
    if family is not None and family.layouts is not None:
        if spec.num_layouts != L:
            rule = f"must be its {spec.num_layouts} layouts"
            raise MaskSpecError(f"attribute B of {entry.name!r}", L, rule)
        names |= set(family.layouts.draws)
    params: dict[str, Tensor] = {}
    for name in sorted(names):
        values = entry.arrays.get(name)
        if values is None or len(values) != L:
            found = None if values is None else list(values.shape)
            raise MaskSpecError(f"array {name} of {entry.name!r}", found, f"must be [{L}, ...]")
        params[name] = _writable(values)
    for size, length in ({} if family is None else family.sizes(params)).items():
        if (counted := _count(entry, size)) != length:
            rule = f"must be {length}, as its arrays have it"
            raise MaskSpecError(f"attribute {size} of {entry.name!r}", counted, rule)
    return params


def _same_family(spec: MaskSpec) -> Family | None:
    """The family of a spec, None where it or its revision is not known here."""
    family = None if spec.is_function else find_family(spec.family)
    # Another revision's formula may be another mask; the spans are what was published.
    return None if family is None or family.revision != spec.revision else family


def _check_family(name: str, spec: MaskSpec, params: Mapping[str, Tensor], K: int) -> None:
    """Check a spec and the anchors of layouts as their family does, where its rules are known.

    A digest says that the values are what was published, not that a family would have them.
    """
    family = _same_family(spec)
    if family is None:
        if spec.is_function and spec.kind != "static":
            raise MaskSpecError(f"kind of {name!r}", spec.kind, "of a mask_mod must be static")
        return
    try:
        checked = family.check(spec.Q_LEN, spec.KV_LEN, {**spec.family_params, **params})
    except MaskSpecError as error:
        raise MaskSpecError(f"{name!r}: {error.field}", error.value, error.rule) from error
    most = family.max_K(spec.Q_LEN, spec.KV_LEN, checked)
    # What a batch says needs room for the family's K; a static mask has the K that it needs.
    if most < K or (most > K and spec.kind != "static"):
        raise MaskSpecError(f"attribute K of {name!r}", K, f"must be {most}, as the family has it")


def _count(entry: Entry, key: str) -> int:
    return checked_int(f"attribute {key} of {entry.name!r}", entry.attrs.get(key))


def _tensor(entry: Entry, array: str, shape: tuple[int, ...]) -> Tensor:
    values = entry.arrays.get(array)
    if values is None or values.shape != shape:
        found = None if values is None else list(values.shape)
        raise MaskSpecError(f"array {array} of {entry.name!r}", found, f"must be {list(shape)}")
    return _writable(values)


def _writable(values: NDArray[np.int32]) -> Tensor:
    # A copy: the cache's arrays are read-only and shared by all threads.
    return torch.from_numpy(values.copy())
