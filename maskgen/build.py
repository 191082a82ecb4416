"""Mask specs -> a published version of the cache; entries with an equal spec are copied."""

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cache import EntryData, Store
from cache.errors import (
    CacheError,
    DamagedEntryError,
    StoreReadError,
    VersionNotFoundError,
)
from maskgen.compile import compile_mask
from maskgen.errors import (
    LayoutInvariantError,
    MaskgenError,
    MaskSpecError,
    UnsupportedMaskError,
)
from maskgen.holdings import Copies
from maskgen.interval_limit import MAX_INTERVALS
from maskgen.intervals import RowIntervals
from maskgen.mask_mod import from_mask_mod
from maskgen.mask_spec import MaskSpec
from maskgen.named_family import get_family
from maskgen.named_function import imported_source, load_function
from maskgen.progress import OnItem
from maskgen.summary import BuildReport, EntrySummary, mask_summary
from maskgen.tables import BlockTables

Notice = Callable[[str], None]
"""Takes a sentence for the person who builds."""


def warn(message: str) -> None:
    """Issue a notice as a RuntimeWarning, which Python writes to stderr."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def build(
    specs: Sequence[MaskSpec],
    store: Store,
    *,
    progress: OnItem | None = None,
    make_current: bool = True,
    notice: Notice = warn,
) -> BuildReport:
    """Build what is missing, copy the rest from the versions that are there, publish one version.

    What is damaged where it would be copied from is built anew and a damaged version of the same id
    is replaced, never without a notice.

    Args:
        specs: The version's entries, all of them.
        store: A writable cache.
        progress: Called after each entry.
        make_current: Whether readers see the new version from now on.
        notice: Called with each thing that is damaged, before it is made anew.

    Raises:
        MaskSpecError: A parameter is out of its range.
        UnsupportedMaskError: A row needs more than MAX_INTERVALS spans.
        StoreWriteError: The cache cannot be written.
    """
    store.check_writable()

    def skipped(version: str, error: CacheError) -> None:
        del version
        notice(f"{_summary(error)}; nothing is copied from it")

    copies = Copies(store, skipped)
    entries: list[EntryData] = []
    rows: list[EntrySummary] = []
    for done, spec in enumerate(specs, start=1):
        start = time.perf_counter()
        # Code may have changed under the same name, so it is always run again.
        copied = None if spec.is_code else _copied(spec, copies, store, notice)
        try:
            data = build_entry(spec) if copied is None else copied
        except MaskgenError as error:
            error.add_note(f"in entry {spec.name!r}")
            raise
        build_ms = (time.perf_counter() - start) * 1e3
        nbytes = sum(array.nbytes for array in (*data.spans.values(), *data.tables.values()))
        reused = copied is not None
        rows.append(mask_summary(spec, data.attrs, nbytes, build_ms=build_ms, reused=reused))
        entries.append(data)
        if progress is not None:
            progress(spec.name, done, len(specs))

    def replaced(error: CacheError) -> None:
        notice(f"{_summary(error)}; the version that was built now replaces it")

    version = store.publish(entries, make_current=make_current, on_damage=replaced)
    return BuildReport(version=version, rows=tuple(rows))


def build_entry(spec: MaskSpec) -> EntryData:
    """Make one entry from its spec alone.

    Raises:
        MaskSpecError: A parameter is out of its range, or the family's revision is another one.
        UnsupportedMaskError: A row needs more than MAX_INTERVALS spans.
    """
    if spec.kind == "parametric":
        attrs = {**_parametric_attrs(spec), **_source(spec)}
        return EntryData(name=spec.name, spec=spec.to_json(), attrs=attrs, spans={}, tables={})
    params = layout_params(spec) if spec.kind == "layouts" else {}
    spans = spec_spans(spec, params)
    tables = compile_mask(spans, spec.BLOCK_SIZE)
    arrays = {"starts": spans.starts, "ends": spans.ends, **params}
    attrs = {"B": spans.B, "H": spans.H, "K": spans.K, **_block_counts(tables), **_cells(spans)}
    attrs |= _source(spec)
    if spec.kind == "layouts":
        attrs |= get_family(spec.family).sizes(params)
    return EntryData(
        name=spec.name,
        spec=spec.to_json(),
        attrs=attrs,
        spans={name: tensor.numpy() for name, tensor in arrays.items()},
        tables={name: tensor.numpy() for name, tensor in tables.pack().items()},
    )


def _source(spec: MaskSpec) -> dict[str, str]:
    """The digest of the file that the mask's code came from, as an attribute."""
    source = imported_source(spec.family) if spec.is_code else None
    return {} if source is None else {"source": source}


def layout_params(spec: MaskSpec) -> dict[str, Tensor]:
    """Draw the batch parameters of a layouts entry; the same spec draws the same on any machine.

    Returns:
        int32 ``[L]`` or ``[L, n]`` by name; of DFlash ``anchors`` ``[L, N]`` and ``n_valid``.

    Raises:
        MaskSpecError: The family has no layouts, or a parameter breaks its rule.
    """
    family = get_family(spec.family)
    if family.layouts is None:
        raise MaskSpecError(f"kind of {spec.name!r}", spec.kind, f"{spec.family} has no layouts")
    params = {**spec.params, **family.static_params(spec.family_params)}
    return family.layouts.draw(spec.Q_LEN, spec.KV_LEN, spec.draw_key, params)


def spec_spans(spec: MaskSpec, params: Mapping[str, Tensor]) -> RowIntervals:
    """Return the spans that an entry holds.

    Canonical; those of layouts keep one batch row a layout and the family's K, so that each layout
    fits the bucket's static buffers.

    Args:
        spec: A static or layouts spec.
        params: What ``layout_params`` drew; empty for static specs.

    Raises:
        MaskSpecError: A parameter is out of its range, or the family's revision is another one.
        UnsupportedMaskError: A mask_mod needs more than MAX_INTERVALS spans in a row.
    """
    if spec.is_function:
        return from_mask_mod(
            load_function(spec.family),
            B=spec.params.get("B"),
            H=spec.params.get("H"),
            Q_LEN=spec.Q_LEN,
            KV_LEN=spec.KV_LEN,
        ).canonical()
    family = get_family(spec.family)
    if family.revision != spec.revision:
        raise MaskSpecError(
            f"revision of {spec.name!r}",
            spec.revision,
            f"must be the installed one of family {family.name}, {family.revision}",
        )
    starts, ends = family.spans(
        spec.Q_LEN, spec.KV_LEN, device="cpu", **spec.family_params, **params
    )
    spans = RowIntervals(starts, ends, spec.KV_LEN).canonical()
    if spec.kind == "layouts":
        K = family.max_K(spec.Q_LEN, spec.KV_LEN, spec.family_params)
        spans = _widened(spans, B=spec.num_layouts, K=K)
    return spans


def _copied(spec: MaskSpec, copies: Copies, store: Store, notice: Notice) -> EntryData | None:
    """Read an entry, which verifies it, for the new version; None when it is damaged or gone.

    It may have another name there.
    """
    found = copies.find(spec.digest)
    if found is None:
        return None
    version, info = found
    try:
        return dataclasses.replace(store.load(info.name, version).to_data(), name=spec.name)
    except (VersionNotFoundError, DamagedEntryError, StoreReadError) as error:
        notice(f"{_summary(error)}; {spec.name!r} is built, not copied")
        return None


def _summary(error: CacheError) -> str:
    return error.summary if isinstance(error, DamagedEntryError) else str(error)


def _parametric_attrs(spec: MaskSpec) -> dict[str, Any]:
    family = get_family(spec.family)
    K = family.max_K(spec.Q_LEN, spec.KV_LEN, spec.family_params)
    if K > MAX_INTERVALS:
        raise UnsupportedMaskError(
            f"a row may need at most {MAX_INTERVALS} spans, whatever the batch says, but family "
            f"{family.name} has up to {K} here: lower the parameter that K grows with "
            "(docs/families.md)",
            count=K,
            limit=MAX_INTERVALS,
        )
    must, may = family.bounds(spec.Q_LEN, spec.KV_LEN, **spec.family_params)
    return {
        "K": K,
        "must": _block_counts(compile_mask(must, spec.BLOCK_SIZE)),
        "may": _block_counts(compile_mask(may, spec.BLOCK_SIZE)),
    }


def _block_counts(tables: BlockTables) -> dict[str, int]:
    counts = tables.counts()
    return {"full": counts.full, "partial": counts.partial, "empty": counts.empty}


def _cells(spans: RowIntervals) -> dict[str, int]:
    """Count visible cells and rows that see no key."""
    visible_BHQ = spans.row_counts()
    rows_with_key = int(visible_BHQ.count_nonzero())
    cells = int(visible_BHQ.sum(dtype=torch.int64))
    return {"cells": cells, "empty_rows": visible_BHQ.numel() - rows_with_key}


def _widened(spans: RowIntervals, *, B: int, K: int) -> RowIntervals:
    """Undo the collapse of equal batch rows and pad with empty spans up to K."""
    if spans.K > K:
        raise LayoutInvariantError("spans of a layout", f"K = {spans.K}", f"K is at most {K}")
    padding = (0, 0, 0, K - spans.K)
    starts, ends = (
        torch.nn.functional.pad(side, padding).expand(B, -1, -1, -1).contiguous()
        for side in (spans.starts, spans.ends)
    )
    return RowIntervals(starts, ends, spans.KV_LEN)
