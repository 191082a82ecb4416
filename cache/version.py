"""The manifest of a version: what stands where, and the digest that names it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from cache.digest import canonical_json, check_canonical, check_json, parse_json, sha256_hex
from cache.entry import MAX_DIMENSIONS, MAX_ENTRY_BYTES, is_name
from cache.errors import CacheError, DamagedEntryError
from cache.format import MAX_SECTION_VALUES, SECTIONS, check_format, is_version_id, manifest_of


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """Where an array stands: int32 values ``offset`` to ``offset + size`` of its section."""

    section: str
    offset: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Values."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class EntryInfo:
    """What the manifest says of an entry."""

    name: str
    spec: Mapping[str, Any]
    attrs: Mapping[str, Any]
    sha256: str
    """Digest of the logical bytes: the spans' arrays by name, then the tables' arrays by name."""
    nbytes: int
    """Logical bytes."""
    shapes: Mapping[str, Mapping[str, Sequence[int]]]
    """By section, by array; the arrays of a section lie end to end in this order."""
    extents: Mapping[str, tuple[int, int]]
    """By section, the range of values that the entry fills."""

    @functools.cached_property
    def arrays(self) -> Mapping[str, ArrayInfo]:
        """Where each array stands, sorted by name."""
        found: dict[str, ArrayInfo] = {}
        for section in SECTIONS:
            offset = self.extents[section][0]
            for name, shape in self.shapes[section].items():
                found[name] = ArrayInfo(section, offset, tuple(shape))
                offset += found[name].size
        return MappingProxyType(dict(sorted(found.items())))


@dataclasses.dataclass(frozen=True)
class Version:
    """A published version, immutable; ``id`` is the SHA-256 of its manifest."""

    id: str
    entries: Mapping[str, EntryInfo]
    """Sorted by name."""
    totals: Mapping[str, int]
    """int32 values of each section."""
    document: bytes = dataclasses.field(repr=False)
    """The version group's document, whole."""


@dataclasses.dataclass(frozen=True)
class VersionInfo:
    """A line of the list of versions."""

    id: str
    entries: int
    """How many; 0 when the manifest is damaged."""
    bytes_on_disk: int
    is_current: bool
    damage: str = ""
    """Why the manifest cannot be read; empty when it can."""


@dataclasses.dataclass(frozen=True)
class Diff:
    """Names of the entries in which two versions differ, each sorted."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]

    @classmethod
    def between(cls, old: Version, new: Version) -> "Diff":
        """Compare two versions; an entry's place in its section is no difference."""
        both = sorted(set(old.entries) & set(new.entries))
        return cls(
            added=tuple(sorted(set(new.entries) - set(old.entries))),
            removed=tuple(sorted(set(old.entries) - set(new.entries))),
            changed=tuple(name for name in both if _content(old, name) != _content(new, name)),
        )


def _content(version: Version, name: str) -> bytes:
    entry = version.entries[name]
    return canonical_json(
        {"attrs": entry.attrs, "sha256": entry.sha256, "shapes": entry.shapes, "spec": entry.spec}
    )


def parse_version(
    document: bytes,
    version_id: str,
    file: str,
    on_totals: Callable[[Mapping[str, int]], None] | None = None,
) -> Version:
    """Read the document of a version's group.

    Args:
        document: Its bytes.
        version_id: The id by which it was asked for.
        file: What to name in an error.
        on_totals: Called with the length of each section once all counts were checked; how the
            manifest is written is checked after it, as the chunks are decoded meanwhile.

    Returns:
        The version; every offset, shape and range in it is checked.

    Raises:
        DamagedEntryError: The digest is another one, or the manifest breaks a rule.
        FormatVersionError: The manifest is of another format version.
    """
    manifest = manifest_of(document, file)
    found = sha256_hex(manifest)
    if found != version_id:
        raise DamagedEntryError(
            file, "the SHA-256 of its manifest must be its id", expected=version_id, found=found
        )
    try:
        content = parse_json(manifest)
        if isinstance(content, dict):
            check_format(content, file)
        entries, totals = _ManifestParser(file).parse(content)
        if on_totals is not None:
            on_totals(totals)
        check_canonical(content, manifest)
    except ValueError as error:
        if isinstance(error, CacheError):
            raise
        raise DamagedEntryError(
            file, "its manifest must be canonical JSON", found=str(error)
        ) from error
    free = {name: {"attrs": entry.attrs, "spec": entry.spec} for name, entry in entries.items()}
    try:
        check_json({"entries": free}, "manifest")
    except (TypeError, ValueError) as error:
        raise DamagedEntryError(
            file, "in its manifest, spec and attrs must hold canonical JSON", found=error
        ) from error
    return Version(version_id, MappingProxyType(entries), MappingProxyType(totals), document)


_MANIFEST_FIELDS = ("entries", "format", "format_version", "sections")
_ENTRY_FIELDS = ("attrs", "name", "offsets", "sha256", "spans", "spec", "tables")


class _ManifestParser:
    """Checks a manifest field by field; arrays must tile the sections exactly, in order."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.totals = dict.fromkeys(SECTIONS, 0)
        self.array_names: set[str] = set()

    def parse(self, content: Any) -> tuple[dict[str, EntryInfo], dict[str, int]]:
        self.fields(content, _MANIFEST_FIELDS, "manifest")
        entries: dict[str, EntryInfo] = {}
        previous = ""
        for item in self.kind(content["entries"], list, "entries"):
            entry = self.entry(item)
            if entry.name <= previous:
                self.refuse("entries must be sorted by name, each name once", entry.name)
            previous = entry.name
            entries[entry.name] = entry
        self.counts(content["sections"], "sections must be as long as their entries")
        return entries, self.totals

    def entry(self, item: Any) -> EntryInfo:
        self.fields(item, _ENTRY_FIELDS, "an entry")
        name, sha256 = item["name"], item["sha256"]
        if not is_name(name):
            self.refuse("an entry's name must be plain parts joined by '/'", name)
        if not (isinstance(sha256, str) and is_version_id(sha256)):
            self.refuse("an entry's sha256 must be 64 hexadecimal digits", sha256)
        for field in ("spec", "attrs"):
            self.kind(item[field], dict, field)
        self.counts(item["offsets"], "arrays must lie end to end in their section")
        shapes = {section: self.kind(item[section], dict, section) for section in SECTIONS}
        extents = {section: self.extent(section, shapes[section]) for section in SECTIONS}
        if not shapes["spans"].keys().isdisjoint(shapes["tables"]):
            self.refuse("an array must stand in one section", name)
        nbytes = 4 * sum(stop - start for start, stop in extents.values())
        if nbytes > MAX_ENTRY_BYTES:
            self.refuse(f"an entry must hold at most {MAX_ENTRY_BYTES} bytes", nbytes)
        return EntryInfo(name, item["spec"], item["attrs"], sha256, nbytes, shapes, extents)

    def extent(self, section: str, shapes: dict[str, Any]) -> tuple[int, int]:
        start = total = self.totals[section]
        if not self.array_names.issuperset(shapes):
            for name in shapes:
                if not is_name(name):
                    self.refuse("an array's name must be plain parts joined by '/'", name)
            self.array_names.update(shapes)
        for shape in shapes.values():
            if type(shape) is not list or not 1 <= len(shape) <= MAX_DIMENSIONS:
                self.refuse(f"an array's shape must have 1 to {MAX_DIMENSIONS} counts", shape)
            size = 1
            for count in shape:
                if type(count) is not int or not 0 <= count <= MAX_ENTRY_BYTES:
                    self.refuse("an array's shape must be of counts", shape)
                size *= count
            total += size
        if total > MAX_SECTION_VALUES:
            self.refuse(f"a section must hold at most {MAX_SECTION_VALUES} values", total)
        self.totals[section] = total
        return start, total

    def counts(self, value: Any, rule: str) -> None:
        # Compared as text, since True equals 1.
        if repr(value) != repr(self.totals):
            self.refuse(rule, value)

    def fields(self, value: Any, names: tuple[str, ...], what: str) -> None:
        if not isinstance(value, dict) or tuple(value) != names:
            self.refuse(f"{what} must have the fields {', '.join(names)}", value)

    def kind(self, value: Any, kind: type, what: str) -> Any:
        if type(value) is not kind:
            self.refuse(f"{what} must be a {kind.__name__}", value)
        return value

    def refuse(self, rule: str, found: object) -> NoReturn:
        raise DamagedEntryError(self.file, f"in its manifest, {rule}", found=found)
