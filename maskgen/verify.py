"""A version against its own specs: every entry is checked, built again and compared."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cache import Entry, EntryInfo, Store
from cache.errors import CacheError
from maskgen.build import build_entry
from maskgen.certificate import certify
from maskgen.checks import checked_int
from maskgen.entry import MaskEntry, check_size, parse_entry
from maskgen.errors import MaskgenError
from maskgen.mask_spec import MaskSpec
from maskgen.named_family import find_family, load_family
from maskgen.progress import OnItem


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that deep verification found, or an entry that it could not look into."""

    entry: str
    """Name of the entry."""
    problem: str
    """What was found, and what was expected."""
    compared: bool = True
    """False where nothing is known to differ: the entry was not compared."""

    @property
    def message(self) -> str:
        """Both in one sentence."""
        return f"entry {self.entry!r}: {self.problem}"


def verify_deep(
    store: Store,
    version: str | None = None,
    *,
    run_functions: bool = False,
    progress: OnItem | None = None,
) -> list[Difference]:
    """Check every entry as the build did, build it again from its spec, and compare.

    Args:
        store: An open cache.
        version: Version id or a prefix of one; the current version if left out.
        run_functions: Whether ``module:function`` entries may be evaluated. That imports the module
            that the cache names, so only for a cache that you trust.
        progress: Called after each entry.

    Returns:
        What differs or was not compared, by entry; empty when the version holds what its specs say.
    """
    chosen = store.version(version)
    found: list[Difference] = []
    for done, (name, info) in enumerate(chosen.entries.items(), start=1):
        try:
            _check_claims(info)
            entry = store.load(name, chosen.id)
            mask = parse_entry(entry)
            refused = _cannot_rebuild(mask.spec, run_functions=run_functions)
            problems = [] if refused else list(_problems(entry, mask))
        except (CacheError, MaskgenError) as error:
            refused, problems = None, [str(error)]
        if refused:
            found.append(Difference(entry=name, problem=refused, compared=False))
        found += [Difference(entry=name, problem=problem) for problem in problems]
        if progress is not None:
            progress(name, done, len(chosen.entries))
    return found


def _check_claims(info: EntryInfo) -> None:
    """Refuse an entry whose claimed sizes are too large to work through, before it is read."""
    spec = MaskSpec.from_json(info.name, info.spec)
    heads = (1, 1)
    if spec.kind != "parametric":
        heads = (
            checked_int(f"attribute B of {info.name!r}", info.attrs.get("B")),
            checked_int(f"attribute H of {info.name!r}", info.attrs.get("H")),
        )
    check_size(spec, *heads)


def _problems(entry: Entry, mask: MaskEntry) -> Iterator[str]:
    yield from certify(mask).findings
    rebuilt = build_entry(mask.spec)
    if dict(rebuilt.attrs) != dict(entry.attrs):
        yield f"attributes are {dict(entry.attrs)}, built again they are {dict(rebuilt.attrs)}"
    arrays = {**rebuilt.spans, **rebuilt.tables}
    if sorted(arrays) != sorted(entry.arrays):
        yield f"arrays are {sorted(entry.arrays)}, built again they are {sorted(arrays)}"
        return
    for name, values in sorted(arrays.items()):
        if not np.array_equal(values, entry.arrays[name]):
            yield f"array {name} is another one when built again"


def _cannot_rebuild(spec: MaskSpec, *, run_functions: bool) -> str | None:
    if spec.is_code and not run_functions:
        return (
            f"not compared: it comes from the function {spec.family}, which is only imported with "
            "--run-functions"
        )
    if spec.is_function:
        return None
    family = load_family(spec.family) if spec.own_family else find_family(spec.family)
    if family is None:
        return f"not compared: family {spec.family!r} is not installed"
    if family.revision != spec.revision:
        return (
            f"not compared: built with revision {spec.revision} of {spec.family}, installed is "
            f"revision {family.revision}; build again"
        )
    return None
