"""Which version of a cache holds a mask: found by its spec's digest, whoever built it.

Run files may share a cache: each build publishes a version of its own and makes it current, and the
masks of the others stay in theirs until ``gc`` removes it.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import cache
from cache import EntryInfo, Store, Version
from cache.errors import (
    CacheError,
    DamagedEntryError,
    FormatVersionError,
    NotListableError,
    StoreReadError,
    StoreWriteError,
    VersionNotFoundError,
)
from maskgen.mask_spec import MaskSpec
from maskgen.summary import BuildReport, EntrySummary, mask_summary
from maskgen.version_certificates import is_refuted

Skipped = Callable[[str, CacheError], None]
"""Takes the id of a version that cannot be read, and why; may raise."""


def readable_versions(store: Store, skipped: Skipped) -> Iterator[Version]:
    """Yield the versions of a store: the current one, then the others, the newest first.

    A store that cannot list has its current version only. A version of which a certificate found an
    entry wrong, so that its build did not make it current, is left out.

    Args:
        store: The cache; listed only when more than the current version is asked for.
        skipped: Called with each version that cannot be read.
    """
    if store.current is not None:
        yield from _read(store, store.current, skipped)
    with contextlib.suppress(NotListableError):
        for version in store.source.version_ids():
            if version != store.current and not is_refuted(store, version):
                yield from _read(store, version, skipped)


def _read(store: Store, version: str, skipped: Skipped) -> Iterator[Version]:
    try:
        found = store.version(version)
    except (VersionNotFoundError, DamagedEntryError, FormatVersionError, StoreReadError) as error:
        skipped(version, error)
    else:
        yield found


def entries_by_spec(version: Version) -> dict[str, EntryInfo]:
    """Return a version's entries by the digest of their spec."""
    return {_spec_digest(info): info for info in version.entries.values()}


def _spec_digest(info: EntryInfo) -> str:
    return cache.sha256_hex(cache.canonical_json(info.spec))


def find_version(
    store: Store, digests: Collection[str]
) -> tuple[Version, Mapping[str, EntryInfo]] | None:
    """Return the first version that holds masks of all these specs, and its entries by spec.

    One version, and not one for each mask, so that what a run reads has one id. Older versions that
    cannot be read are passed over.

    Args:
        store: The cache.
        digests: Of specs.

    Raises:
        VersionNotFoundError: The current version is gone.
        DamagedEntryError: It is damaged, likewise FormatVersionError and StoreReadError.
    """
    for version in readable_versions(store, _current_first(store)):
        held = entries_by_spec(version)
        if held.keys() >= set(digests):
            return version, held
    return None


def _current_first(store: Store) -> Skipped:
    def skipped(version: str, error: CacheError) -> None:
        if version == store.current:
            raise error

    return skipped


class Copies:
    """The entries of all versions by spec, for a build; older versions are read only if needed.

    Args:
        store: The cache.
        skipped: As in ``readable_versions``.
    """

    def __init__(self, store: Store, skipped: Skipped) -> None:
        self._versions = readable_versions(store, skipped)
        self._known: dict[str, tuple[str, EntryInfo]] = {}

    def find(self, digest: str) -> tuple[str, EntryInfo] | None:
        """Return the version's id and the entry; None when no version has one."""
        while digest not in self._known:
            version = next(self._versions, None)
            if version is None:
                return None
            for held, info in entries_by_spec(version).items():
                self._known.setdefault(held, (version.id, info))
        return self._known[digest]


def already_built(specs: Sequence[MaskSpec], store: Store, refusal: StoreWriteError) -> BuildReport:
    """Report on the version of a cache that cannot be written, if it needs no build.

    The entries are read, which verifies them, as a build's copies are; functions are not evaluated.

    Args:
        specs: What is wanted, also by name; the version may hold more.
        store: The cache.
        refusal: Why it cannot be written.

    Returns:
        The version's rows of the specs; all are reused.

    Raises:
        StoreWriteError: The refusal, with the names of the specs that the current version lacks.
        DamagedEntryError: The version is not what was published.
    """
    wanted = {spec.name: spec.digest for spec in specs}
    try:
        missing = _missing(store.version(), wanted)
        for version in readable_versions(store, _current_first(store)):
            if not _missing(version, wanted):
                break
        else:
            message = f"{refusal}; it lacks {', '.join(missing)}, as the config has it"
            raise StoreWriteError(refusal.file, message, refusal.errno) from refusal
    except VersionNotFoundError as error:
        message = f"{refusal}; {error}"
        raise StoreWriteError(refusal.file, message, refusal.errno) from error
    rows: list[EntrySummary] = []
    for spec in specs:
        info = version.entries[spec.name]
        start = time.perf_counter()
        store.load(info.name, version.id)
        build_ms = (time.perf_counter() - start) * 1e3
        rows.append(mask_summary(spec, info.attrs, info.nbytes, build_ms=build_ms, reused=True))
    return BuildReport(version=version.id, rows=tuple(rows))


def _missing(version: Version, wanted: Mapping[str, str]) -> list[str]:
    """Names of the masks that a version lacks, or has with another spec."""
    return [
        name
        for name, digest in wanted.items()
        if name not in version.entries or _spec_digest(version.entries[name]) != digest
    ]
