"""What verification finds: each fault with its file, its entry and what differs, and the order."""

import hashlib
import shutil
from pathlib import Path

import pytest

import cache
from cache.errors import StoreNotFoundError, StoreReadError, VersionNotFoundError
from cache.format import root_document
from cache.verify import findings_of, lost_current
from tests.cache.samples import DictSource, entries, files_of, published

DELETE = "Delete this version and pull, unpack or build it again"


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Two versions of three and two entries, in chunks of 24 values: an entry's spans in each."""
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", 24)
    store = published(tmp_path / "m.zarr")
    store.publish(entries(2, scale=5))
    return store


@pytest.fixture
def first(store):
    return next(line.id for line in store.versions() if line.id != store.current)


NAMES = ("causal/q12", "causal/q4", "causal/q8")


def finding(version, file, entry, rule, expected="", found="", remedy=DELETE, whose=None):
    told = [
        f"{what} {value}" for what, value in (("expected", expected), ("found", found)) if value
    ]
    difference = f" ({', '.join(told)})" if told else ""
    message = f"{file} is damaged: {rule}{difference}; it is not used. {remedy}"
    if whose:
        message = f"entry {whose!r}: {message}"
    return cache.Finding(version, file, entry, rule, expected, found, message)


def missing(place, version, name, key):
    return finding(version, f"{place}/{key}", name, "the file is missing", whose=name)


def test_a_missing_chunk_is_found_for_each_entry_in_it(store, first):
    place = Path(store.location, first)
    for index, name in enumerate(NAMES):
        chunk = place / "spans" / "c" / str(index)
        data = chunk.read_bytes()
        chunk.unlink()
        assert store.verify(first) == [missing(place, first, name, f"spans/c/{index}")]
        assert store.verify() == store.verify(first)
        assert store.verify(store.current) == []
        chunk.write_bytes(data)
    (place / "tables" / "c" / "0").unlink()
    assert store.verify(first) == [missing(place, first, name, "tables/c/0") for name in NAMES]
    shutil.rmtree(place / "spans" / "c")
    assert store.verify(first) == [
        *(missing(place, first, name, f"spans/c/{index}") for index, name in enumerate(NAMES))
    ]


def test_what_is_wrong_with_a_chunk_is_told(store, first):
    chunk = Path(store.location, first, "spans", "c", "1")
    chunk.write_bytes(chunk.read_bytes()[:10])
    assert store.verify(first) == [
        finding(first, str(chunk), NAMES[1], "it is cut short", "", "10 bytes", whose=NAMES[1])
    ]


def test_a_swapped_chunk_is_found_by_the_entry_s_digest(store, first):
    place = Path(store.location, first)
    chunk = place / "spans" / "c" / "1"
    chunk.write_bytes((place / "spans" / "c" / "2").read_bytes())
    (found,) = store.verify(first)
    files = f"{place}/spans/c/1, {place}/tables/c/0"
    signed = store.version(first).entries[NAMES[1]].sha256
    rule = "the SHA-256 of its values must be the manifest's"
    assert (found.file, found.entry, found.rule) == (files, NAMES[1], rule)
    assert found.expected == signed != found.found
    # The error names the entry itself.
    assert found.message == (
        f"{files} of entry {NAMES[1]!r} is damaged: {rule} (expected {signed}, found "
        f"{found.found}); it is not used. {DELETE}"
    )


def test_all_that_is_wrong_is_found_documents_first_then_foreign_files_then_entries(store, first):
    place = Path(store.location, first)
    for section in ("spans", "tables"):
        (place / section / "zarr.json").write_bytes(b"{}")
    for key in ("zz.txt", "aa.txt", "spans/c/3", "deep/notes"):
        (place / key).parent.mkdir(exist_ok=True)
        (place / key).write_bytes(b"")
    (place / "spans" / "c" / "0").unlink()
    (place / "spans" / "c" / "2").unlink()
    found = store.verify(first)
    assert [(f.file.removeprefix(f"{place}/"), f.entry) for f in found] == [
        ("spans/zarr.json", None),
        ("tables/zarr.json", None),
        ("aa.txt", None),
        ("deep/notes", None),
        ("spans/c/3", None),
        ("zz.txt", None),
        ("spans/c/0", NAMES[0]),
        ("spans/c/2", NAMES[2]),
    ]
    assert all(f.version == first for f in found)
    assert found[0].rule == "it must be the canonical document of its array"
    assert found[0].found == "{}"
    assert '"data_type":"int32"' in found[0].expected
    for foreign in found[2:6]:
        rule = "a version must hold its own files only"
        assert foreign == finding(first, foreign.file, None, rule, remedy="Delete that file")


def test_a_damaged_manifest_hides_what_stands_below_it(store, first):
    document = Path(store.location, first, "zarr.json")
    (document.parent / "spans" / "c" / "0").unlink()
    document.write_bytes(b"{}")
    rule = "it must be the canonical document of a version's group"
    assert store.verify(first) == [finding(first, str(document), None, rule)]


def test_a_version_of_another_format_is_found(store, first):
    document = Path(store.location, first, "zarr.json")
    text = document.read_bytes().replace(b'"format_version":1', b'"format_version":2')
    manifest = text.removeprefix(b'{"attributes":{"manifest":')
    manifest = manifest.removesuffix(b'},"node_type":"group","zarr_format":3}')
    version = hashlib.sha256(manifest).hexdigest()
    document.write_bytes(text)
    document.parent.rename(document.parent.with_name(version))
    file = str(document.parent.with_name(version) / "zarr.json")
    assert store.verify(version) == [
        cache.Finding(
            version,
            file,
            None,
            "the format version must be known",
            "1",
            "2",
            f"{file} is of format 2, this reader knows format 1: read it with the release that "
            "wrote it, or build the cache again",
        )
    ]


def test_a_lost_current_version_is_the_first_finding(store, first):
    current = store.current
    shutil.rmtree(Path(store.location, current))
    (Path(store.location, first) / "spans" / "c" / "0").unlink()
    root = f"{store.location}/zarr.json"
    lost = finding(
        current,
        root,
        None,
        "its current version must be there",
        "",
        current,
        "`use` a version that is there, or pull, unpack or build one",
    )
    place = Path(store.location, first)
    assert store.verify() == [lost, missing(place, first, NAMES[0], "spans/c/0")]
    assert store.verify(first) == [missing(place, first, NAMES[0], "spans/c/0")]
    error = lost_current(store.source)
    assert (str(error), error.found) == (lost.message, current)


def test_a_current_version_that_is_there_is_not_lost(store):
    assert lost_current(store.source) is None
    files = {"zarr.json": root_document(None)}
    assert lost_current(DictSource(files)) is None
    assert findings_of(DictSource(files), None) == []


def test_where_there_is_no_cache_that_is_told(tmp_path):
    source = DictSource({}, str(tmp_path / "m.zarr"))
    for ask in (lambda: findings_of(source, None), lambda: lost_current(source)):
        with pytest.raises(StoreNotFoundError) as caught:
            ask()
        assert str(caught.value) == (
            f"there is no cache at {tmp_path}/m.zarr; run: python -m maskgen build --config FILE "
            f"--cache {tmp_path}/m.zarr"
        )
        assert caught.value.location == f"{tmp_path}/m.zarr"


class Unlistable(DictSource):
    """Reads, and cannot list."""

    def version_ids(self):
        raise cache.errors.NotListableError(self.location)

    def file_sizes(self, version):
        raise cache.errors.NotListableError(self.location)


def test_what_cannot_be_listed_is_checked_by_its_current_version(store, first):
    files, current = files_of(store), store.current
    sound = Unlistable(files | {f"{current}/notes.txt": b"", f"{first}/spans/c/0": b""})
    assert findings_of(sound, None) == []
    assert len(findings_of(sound, first)) == 1
    harmed = Unlistable(files | {f"{current}/tables/c/0": b""})
    assert [f.entry for f in findings_of(harmed, None)] == ["causal/q4", "causal/q8"]
    none = Unlistable({"zarr.json": root_document(None)})
    assert findings_of(none, None) == []
    lost = Unlistable({"zarr.json": files["zarr.json"]})
    with pytest.raises(VersionNotFoundError, match="holds no version"):
        findings_of(lost, None)


def test_a_file_that_cannot_be_read_ends_the_check(store, first):
    chunk = Path(store.location, first, "tables", "c", "0")
    chunk.unlink()
    chunk.symlink_to("0")
    for version in (first, None):
        with pytest.raises(StoreReadError) as caught:
            store.verify(version)
        assert caught.value.file == str(chunk)
    assert store.verify(store.current) == []


@pytest.mark.parametrize("way", ["pack", "push", "pull"])
def test_of_several_faults_the_first_is_told_when_a_version_is_shipped(store, first, tmp_path, way):
    place = Path(store.location, first)
    chunks = [place / "spans" / "c" / str(index) for index in range(3)]
    data = [chunk.read_bytes() for chunk in chunks]
    # Each has its checksum, so that only the digests tell.
    for chunk, other in zip(chunks, data[1:] + data[:1], strict=True):
        chunk.write_bytes(other)
    send = {
        "pack": lambda: cache.pack(store, tmp_path / "a.zip", first),
        "push": lambda: cache.push(store, "memory://findings/m.zarr", first),
        "pull": lambda: cache.pull(store.location, tmp_path / "n.zarr", first),
    }
    with pytest.raises(cache.errors.DamagedEntryError) as caught:
        send[way]()
    error = caught.value
    assert error.entry == NAMES[0]
    assert error.rule == "the SHA-256 of its values must be the manifest's"
    assert error.file == f"{place}/spans/c/0, {place}/tables/c/0"
    assert [path.name for path in tmp_path.iterdir()] == ["m.zarr"]
