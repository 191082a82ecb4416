"""Verification: read every file of a version again and check it against the manifest."""

import dataclasses

from cache.advice import how_to_build
from cache.errors import (
    DamagedEntryError,
    FormatVersionError,
    NotListableError,
    StoreNotFoundError,
    VersionNotFoundError,
)
from cache.format import (
    MAX_DOCUMENT_BYTES,
    MAX_ROOT_BYTES,
    ROOT_KEY,
    SECTIONS,
    parse_root,
    version_key,
)
from cache.reader import VersionReader, read_version
from cache.source import Source


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is not as it was published."""

    version: str
    """The id of the version."""
    file: str
    """The file or object at fault."""
    entry: str | None
    """The entry at fault, where one is known."""
    rule: str
    """What must hold."""
    expected: str
    found: str
    message: str
    """All of it in one sentence, and what to do."""


def findings_of(source: Source, version: str | None) -> list[Finding]:
    """Check a version, or all of them.

    Args:
        source: Where the bytes are; nothing that was loaded before is reused.
        version: An id, or None for every version, or the current one where ``source`` cannot list.

    Returns:
        What differs; a damaged manifest hides its entries, a missing chunk does not hide others.

    Raises:
        VersionNotFoundError: There is no version of that id, or it was removed meanwhile.
        StoreNotFoundError: None was named and there is no cache.
        StoreReadError: A file cannot be read.
    """
    if version is not None:
        return _version_findings(source, version)
    current = _current(source)
    try:
        versions = source.version_ids()
    except NotListableError:
        versions = [] if current is None else [current]
    findings = []
    if current is not None and current not in versions:
        findings.append(_finding(current, _lost(source, current)))
    for known in versions:
        try:
            findings.extend(_version_findings(source, known))
        except VersionNotFoundError:
            # A gc removed it since it was listed, which is no damage; the current one stays.
            if known == current:
                raise
    return findings


def lost_current(source: Source) -> DamagedEntryError | None:
    """Return what is wrong when the current version is not there; ``found`` is its id.

    Raises:
        StoreNotFoundError: There is no cache.
        StoreReadError: It cannot be read.
    """
    current = _current(source)
    if current is None or source.read(version_key(current), MAX_DOCUMENT_BYTES) is not None:
        return None
    return _lost(source, current)


def _current(source: Source) -> str | None:
    document = source.read(ROOT_KEY, MAX_ROOT_BYTES)
    if document is None:
        msg = f"there is no cache at {source.location}; {how_to_build(source.location)}"
        raise StoreNotFoundError(source.location, msg)
    return parse_root(document, source.name(ROOT_KEY))


def _lost(source: Source, current: str) -> DamagedEntryError:
    return DamagedEntryError(
        source.name(ROOT_KEY),
        "its current version must be there",
        found=current,
        in_folder="`use` a version that is there, or pull, unpack or build one",
    )


def _version_findings(source: Source, version: str) -> list[Finding]:
    try:
        manifest = read_version(source, version)
    except (DamagedEntryError, FormatVersionError) as error:
        return [_finding(version, error)]
    reader = VersionReader(source, manifest, documents_are_checked=True)
    findings: list[Finding] = []
    for section in SECTIONS:
        try:
            reader.check_document(section)
        except DamagedEntryError as error:
            findings.append(_finding(version, error))
    findings.extend(_foreign_files(source, reader))
    for name in manifest.entries:
        try:
            reader.load(name)
        except DamagedEntryError as error:
            findings.append(_finding(version, error, name))
    return findings


def _foreign_files(source: Source, reader: VersionReader) -> list[Finding]:
    try:
        found = source.file_sizes(reader.version.id)
    except NotListableError:
        return []
    known = set(reader.file_keys())
    return [
        _finding(
            reader.version.id,
            DamagedEntryError(
                source.name(key),
                "a version must hold its own files only",
                remedy="Delete that file",
            ),
        )
        for key in sorted(set(found) - known)
    ]


def _finding(
    version: str, error: DamagedEntryError | FormatVersionError, entry: str | None = None
) -> Finding:
    if isinstance(error, FormatVersionError):
        return Finding(
            version,
            error.file,
            None,
            "the format version must be known",
            str(error.supported),
            str(error.found),
            str(error),
        )
    return Finding(
        version,
        error.file,
        error.entry or entry,
        error.rule,
        "" if error.expected is None else str(error.expected),
        "" if error.found is None else str(error.found),
        str(error) if entry is None or error.entry is not None else f"entry {entry!r}: {error}",
    )
