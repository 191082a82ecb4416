"""Every way of damage that the drill tries, and what a reader may make of it.

An outcome is ``refused`` (a CacheError), ``right`` (all that loads is what was published),
``SILENT`` (something else loads) or ``CRASH`` (another exception).
"""

import collections
import os
import random
import shutil
from pathlib import Path

import cache
from cache.errors import CacheError
from cache.format import MAX_ROOT_BYTES, ROOT_KEY, parse_root
from cache.store import Store
from tests.cache.samples import values_of

Outcome = str


def outcome_of(location, truth) -> Outcome:
    """Open a cache, load every entry of its current version and compare."""
    try:
        store = cache.open_store(location)
        return outcome_of_store(store, truth)
    except CacheError:
        return "refused"
    except Exception as error:
        return f"CRASH {type(error).__name__}: {error}"


def outcome_of_source(source, truth) -> Outcome:
    """As ``outcome_of``, over a source."""
    try:
        document = source.read(ROOT_KEY, MAX_ROOT_BYTES)
        if document is None:
            return "refused"
        current = parse_root(document, source.name(ROOT_KEY))
        return outcome_of_store(Store(source, current, writable=False), truth)
    except CacheError:
        return "refused"
    except Exception as error:
        return f"CRASH {type(error).__name__}: {error}"


def outcome_of_store(store, truth) -> Outcome:
    """Load every entry of the current version and of every version that was published."""
    outcomes = [_version_outcome(store, version, truth) for version in (None, *truth)]
    return next((outcome for outcome in outcomes if outcome not in ("right", "refused")), None) or (
        "refused" if "refused" in outcomes else "right"
    )


def _version_outcome(store, wanted, truth) -> Outcome:
    # A fresh store, since the first load of a version goes another way than the later ones.
    fresh = Store(store.source, store.current, writable=False)
    try:
        together = fresh.load_all(wanted)
    except CacheError:
        together = None
    try:
        version = store.version(wanted)
    except CacheError:
        return "refused" if together is None else "SILENT manifest"
    known = truth.get(version.id)
    if known is not None and list(known) != list(version.entries):
        return "SILENT other entries"
    refused = False
    for name in version.entries:
        try:
            loaded = values_of(store.load(name, version.id))
        except CacheError:
            refused = True
            continue
        if known is not None and loaded != known[name]:
            return f"SILENT {name}"
        if together is not None and loaded != values_of(together[name]):
            return f"SILENT {name} among all"
    if refused != (together is None):
        return "SILENT one by one and all at once differ"
    # A version that nobody published held together by itself: `another` is judged by the caller.
    return "refused" if refused else "right" if known is not None else "another version"


def bit_flips(data, count, rng):
    """``count`` copies of ``data``, each with one bit flipped."""
    for _ in range(count):
        position = rng.randrange(len(data) * 8)
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        yield bytes(flipped)


def truncations(data):
    """Every class of a file cut short or run long."""
    cuts = {0, 1, len(data) // 2, len(data) - 1, len(data) - 4, len(data) - 5, 16, 20}
    for cut in sorted(cut for cut in cuts if 0 <= cut < len(data)):
        yield data[:cut]
    yield data + b"\0\0\0"
    yield data + data
    yield b"\0" * len(data)


class Drill:
    """Applies damage to a store's folder, one piece at a time, and counts outcomes."""

    def __init__(self, folder: Path, truth) -> None:
        self.folder = folder
        self.truth = truth
        self.rows: dict[str, collections.Counter] = {}
        self.bad: list[str] = []

    def count(self, row, outcome, what) -> None:
        self.rows.setdefault(row, collections.Counter())[outcome.split()[0]] += 1
        if outcome.split()[0] in ("SILENT", "CRASH", "another"):
            self.bad.append(f"{row}: {what}: {outcome}")

    def files(self):
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def replaced(self, row, path, data) -> None:
        """Load with ``path`` holding ``data``, then put it back."""
        before = path.read_bytes()
        path.write_bytes(data)
        try:
            self.count(row, outcome_of(self.folder, self.truth), path.relative_to(self.folder))
        finally:
            path.write_bytes(before)

    def flip_bits(self, a_file, rng) -> None:
        for path in self.files():
            for data in bit_flips(path.read_bytes(), a_file, rng):
                self.replaced("one bit flipped", path, data)

    def truncate(self) -> None:
        for path in self.files():
            for data in truncations(path.read_bytes()):
                self.replaced("file cut or padded", path, data)

    def delete(self) -> None:
        for path in [*self.files(), *sorted(p for p in self.folder.rglob("*") if p.is_dir())]:
            aside = self.folder.parent / "aside"
            path.rename(aside)
            self.count("file or folder deleted", outcome_of(self.folder, self.truth), path)
            aside.rename(path)

    def swap(self) -> None:
        chunks = [path for path in self.files() if path.parent.name == "c"]
        for position, one in enumerate(chunks):
            for other in chunks[position + 1 :]:
                self._swap(one, other, "two chunks swapped")
        documents = [path for path in self.files() if path.name == "zarr.json"]
        for position, one in enumerate(documents):
            for other in documents[position + 1 :]:
                self._swap(one, other, "two documents swapped")

    def _swap(self, one, other, row) -> None:
        a, b = one.read_bytes(), other.read_bytes()
        one.write_bytes(b)
        other.write_bytes(a)
        self.count(row, outcome_of(self.folder, self.truth), f"{one} {other}")
        one.write_bytes(a)
        other.write_bytes(b)

    def make_foreign(self) -> None:
        """Metadata of other versions, other formats and other kinds of zarr."""
        row = "stale or foreign metadata"
        root = self.folder / ROOT_KEY
        text = root.read_text()
        for change in (
            ('"format_version":1', '"format_version":2'),
            ('"format_version":1', '"format_version":true'),
            ("flex-mask-cache", "other-cache"),
            ('"zarr_format":3', '"zarr_format":2'),
            ('"group"', '"array"'),
            ('"current"', '"latest"'),
            ('"current":"', '"current":"../'),
        ):
            self.replaced(row, root, text.replace(*change).encode())
        self.replaced(row, root, b'{"zarr_format": 3, "node_type": "group", "attributes": {}}')
        self.replaced(row, root, b'{"zarr_format": 2}')
        self.replaced(row, root, b"[" * 60000)
        documents = [p for p in self.files() if p.name == "zarr.json"]
        for path in documents:
            for other in documents:
                if path != other:
                    self.replaced(row, path, other.read_bytes())
            with_extra = path.read_text()[:-1] + ',"consolidated_metadata":{"kind":"inline"}}'
            self.replaced(row, path, with_extra.encode())
        chunks = [p for p in self.files() if p.parent.name == "c"]
        for path in chunks:
            for other in chunks:
                if path.read_bytes() != other.read_bytes():
                    self.replaced("chunk of another place or version", path, other.read_bytes())

    def empty_links(self) -> None:
        row = "link, pipe or folder in a file's place"
        for path in self.files():
            before = path.read_bytes()
            for make in (
                lambda p: p.symlink_to("/dev/zero"),
                lambda p: p.symlink_to(p.name),
                os.mkfifo,
                lambda p: p.mkdir(),
            ):
                path.unlink()
                make(path)
                self.count(row, outcome_of(self.folder, self.truth), path)
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
                path.write_bytes(before)


def zip_damage(packed, truth, scratch, rng, flips):
    """Yield (row, outcome, what) for a packed zip."""
    target = scratch / "damaged.zip"
    for data in bit_flips(packed, flips, rng):
        target.write_bytes(data)
        yield "zip: one bit flipped", outcome_of(target, truth), "flip"
    for data in truncations(packed):
        target.write_bytes(data)
        yield "zip: cut or padded", outcome_of(target, truth), f"{len(data)} bytes"


def seeded(seed):
    return random.Random(seed)
