import hashlib

import pytest

import cache
from cache.errors import DamagedEntryError, StoreReadError, VersionNotFoundError
from cache.store import Store
from tests.cache.samples import DictSource, entries, files_of, published


@pytest.fixture
def store(tmp_path):
    store = published(tmp_path / "m.zarr")
    store.publish(entries(4, scale=5))
    return store


@pytest.fixture
def memory_url(request):
    return f"memory://{request.node.name}/m.zarr"


def test_a_sound_store_has_no_findings(store):
    assert store.verify() == []
    assert store.verify(store.current[:8]) == []


def test_strangers_are_told_apart_from_damage(store, tmp_path):
    root = tmp_path / "m.zarr"
    (root / "notes.txt").write_bytes(b"hello")
    (root / "other").mkdir()
    (root / ("0" * 64)).mkdir()
    wanted = [str(root / name) for name in ("0" * 64, "notes.txt", "other")]
    assert cache.open_store(root).strangers() == wanted
    assert cache.open_store(root).verify() == []
    cache.pack(store, tmp_path / "m.zip")
    assert cache.open_store(tmp_path / "m.zip").strangers() == []


def test_strangers_behind_a_url(store, memory_url):
    cache.push(store, memory_url)
    far = cache.open_store(memory_url)
    assert far.strangers() == []
    far.source.filesystem.pipe_file(far.source.path("notes.txt"), b"hello")
    assert cache.open_store(memory_url).strangers() == [f"{memory_url}/notes.txt"]


def test_each_file_at_fault_is_named(store, tmp_path):
    first, second = store.versions()[1].id, store.current
    root = tmp_path / "m.zarr"
    (root / first / "spans" / "c" / "0").unlink()
    (root / second / "tables" / "zarr.json").write_bytes(b"{}")
    (root / second / "notes.txt").write_bytes(b"hello")
    (root / second / "spans" / "c" / "1").write_bytes(b"")
    findings = cache.open_store(root).verify()
    found = {(finding.version, finding.file, finding.entry) for finding in findings}
    assert found == {
        *((first, str(root / first / "spans" / "c" / "0"), f"causal/q{q}") for q in (4, 8, 12)),
        (second, str(root / second / "tables" / "zarr.json"), None),
        (second, str(root / second / "notes.txt"), None),
        (second, str(root / second / "spans" / "c" / "1"), None),
    }
    foreign = {"notes.txt", "1"}
    for finding in findings:
        what = "that file" if finding.file.rsplit("/", 1)[-1] in foreign else "this version"
        assert f"Delete {what}" in finding.message
    assert all(f"entry {f.entry!r}: " in f.message for f in findings if f.entry is not None)
    assert {f.version for f in cache.open_store(root).verify(first)} == {first}


def test_a_wrong_value_under_a_right_checksum_is_found(store, tmp_path):
    """The CRC-32C sees no swapped chunk; the entries' digests do."""
    files = files_of(store)
    first, second = store.versions()[1].id, store.current
    swapped = published(tmp_path / "n.zarr", entries(4, scale=6))
    files[f"{second}/spans/c/0"] = files_of(swapped)[f"{swapped.current}/spans/c/0"]
    damaged = Store(DictSource(files), second, writable=False)
    findings = damaged.verify(second)
    assert {finding.entry for finding in findings} == {f"causal/q{q}" for q in (4, 8, 12, 16)}
    signed = store.version(second).entries
    assert {f.entry: f.expected for f in findings} == {n: e.sha256 for n, e in signed.items()}
    # What stands there: the spans of the other version, the tables of this one.
    for finding in findings:
        held = hashlib.sha256()
        for arrays, names in ((swapped, ("ends", "starts")), (store, ("kv_indices",))):
            for name in names:
                held.update(arrays.load(finding.entry).arrays[name].tobytes())
        assert finding.found == held.hexdigest()
    assert all(f.file == f"memory/{second}/spans/c/0, memory/{second}/tables/c/0" for f in findings)
    assert damaged.verify(first) == []
    with pytest.raises(DamagedEntryError, match="of entry 'causal/q4' is damaged") as caught:
        damaged.load("causal/q4")
    assert caught.value.entry == "causal/q4"


def test_verify_reads_the_disk_again(store, tmp_path):
    held = store.load("causal/q4")
    (tmp_path / "m.zarr" / store.current / "spans" / "c" / "0").unlink()
    assert len(store.verify(store.current)) == 4
    assert store.load("causal/q4") is held


def test_a_current_version_that_is_gone_is_found(store, tmp_path):
    gone = store.current
    (tmp_path / "m.zarr" / gone).rename(tmp_path / "aside")
    (finding,) = cache.open_store(store.location).verify()
    assert finding.file == str(tmp_path / "m.zarr" / "zarr.json")
    assert finding.found == gone


class Listing(DictSource):
    """Lists versions as they were a moment ago."""

    def version_ids(self):
        return self.listed


def test_a_version_that_goes_while_all_are_checked_is_passed_over_unless_it_is_current(store):
    first, second = store.versions()[1].id, store.current
    for gone in (first, second):
        files = {key: data for key, data in files_of(store).items() if not key.startswith(gone)}
        source = Listing(files)
        source.listed = [second, first]
        passing = Store(source, second, writable=False)
        if gone == first:
            assert passing.verify() == []
        else:
            with pytest.raises(VersionNotFoundError):
                passing.verify()


def test_a_manifest_of_version_2_is_a_finding(store, tmp_path):
    document = tmp_path / "m.zarr" / store.current / "zarr.json"
    document.write_bytes(
        document.read_bytes().replace(b'"format_version":1', b'"format_version":2')
    )
    (finding,) = store.verify(store.current)
    assert finding.file == str(document)


def test_an_unknown_version_is_no_finding(store):
    with pytest.raises(VersionNotFoundError, match="holds no version"):
        store.verify("0" * 64)


def test_a_file_that_may_not_be_read_is_an_error(store, tmp_path):
    chunk = tmp_path / "m.zarr" / store.current / "spans" / "c" / "0"
    chunk.unlink()
    chunk.symlink_to(chunk.name)
    with pytest.raises(StoreReadError, match=r"cannot read .*/spans/c/0") as caught:
        store.verify()
    assert isinstance(caught.value, OSError)
