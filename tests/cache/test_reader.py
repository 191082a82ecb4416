"""What a version's reader reads, how often, by how many, and what it names."""

import dataclasses
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import cache
from cache import reader, sections
from cache.errors import DamagedEntryError
from cache.reader import VersionReader
from cache.sections import Sections
from tests.cache.samples import DictSource, entries, entry, files_of, layouts, published, values_of


@pytest.fixture
def files(tmp_path):
    """A published version's files, three chunks of spans, and the version."""
    store = published(tmp_path / "m.zarr")
    return files_of(store), store.version()


class Counting(DictSource):
    """Notes which keys are read."""

    def __init__(self, files):
        super().__init__(files)
        self.keys = []

    def read(self, key, limit):
        self.keys.append(key)
        return super().read(key, limit)


def test_each_file_is_read_once_however_often_entries_are_loaded(files):
    found, version = files
    source = Counting(found)
    store = cache.Store(source, version.id, writable=False)
    for _ in range(2):
        for name in version.entries:
            store.load(name)
        store.load_all()
    assert sorted(source.keys) == sorted(key for key in found if key != "zarr.json")
    source = Counting(found)
    cache.Store(source, version.id, writable=False).load_all()
    # Threads share what one of them reads while it is in use; a slow one may read it again.
    assert set(source.keys) == {key for key in found if key != "zarr.json"}


def test_the_documents_of_both_sections_are_compared_with_the_manifest(files):
    found, version = files
    for section in ("spans", "tables"):
        key = f"{version.id}/{section}/zarr.json"
        # As long as the right one, so that its length says nothing.
        other = found[key].replace(b'"fill_value":-1', b'"fill_value":-2')
        source = DictSource(found | {key: other})
        for use in (
            lambda store: store.load("causal/q8"),
            lambda store: store.load_all(),
            lambda store: store.reader().check_documents(),
            lambda store, section=section: store.reader().check_document(section),
        ):
            with pytest.raises(DamagedEntryError) as caught:
                use(cache.Store(source, version.id, writable=False))
            error = caught.value
            assert error.file == f"memory/{key}"
            assert error.rule == "it must be the canonical document of its array"
            assert (error.expected, error.found) == (found[key].decode(), other.decode())


def test_the_keys_of_a_version_are_its_files_and_its_document_is_last(tmp_path, monkeypatch):
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", 30)
    store = published(tmp_path / "m.zarr")
    version = store.current
    keys = list(store.reader().file_keys())
    assert keys == [
        *(f"{version}/spans/c/{index}" for index in range(3)),
        f"{version}/tables/c/0",
        f"{version}/spans/zarr.json",
        f"{version}/tables/zarr.json",
        f"{version}/zarr.json",
    ]
    assert sorted(keys) == sorted(key for key in files_of(store) if key != "zarr.json")


def test_the_files_of_an_entry_are_those_that_hold_a_value_of_it(tmp_path, monkeypatch):
    """72 spans' values in chunks of 24: two entries a boundary apart, one of none."""
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", 18)
    store = published(tmp_path / "m.zarr", [*entries(), cache.EntryData(name="none", spec={})])
    reading, place = store.reader(), f"{store.location}/{store.current}"
    found = {n: reading.entry_files(info) for n, info in reading.version.entries.items()}
    # By the manifest's order, which is that of the names: q12, q4, q8.
    assert found == {
        "causal/q12": [f"{place}/{key}" for key in ("spans/c/0", "spans/c/1", "tables/c/0")],
        "causal/q4": [f"{place}/{key}" for key in ("spans/c/1", "spans/c/2", "tables/c/0")],
        "causal/q8": [f"{place}/{key}" for key in ("spans/c/2", "spans/c/3", "tables/c/0")],
        "none": [],
    }


def wrong(version, *names):
    """The version with digests that fit nothing."""
    changed = {n: dataclasses.replace(version.entries[n], sha256="0" * 64) for n in names}
    return dataclasses.replace(version, entries=dict(version.entries) | changed)


def test_an_entry_without_values_is_refused_by_its_document(tmp_path):
    store = published(tmp_path / "m.zarr", [cache.EntryData(name="none", spec={})])
    reading = VersionReader(store.source, wrong(store.version(), "none"))
    with pytest.raises(DamagedEntryError) as caught:
        reading.load("none")
    assert caught.value.file == f"{store.location}/{store.current}/zarr.json"
    assert caught.value.entry == "none"


@pytest.mark.parametrize("at", [0, 1, 2])
def test_the_entry_at_fault_is_told_wherever_it_stands(files, at):
    found, version = files
    name = list(version.entries)[at]
    reading = VersionReader(DictSource(found), wrong(version, name))
    with pytest.raises(DamagedEntryError) as caught:
        reading.load_all()
    assert caught.value.entry == name
    assert caught.value.rule == "the SHA-256 of its values must be the manifest's"
    assert caught.value.expected == "0" * 64
    assert caught.value.found == version.entries[name].sha256
    for other in version.entries:
        if other != name:
            assert reading.load(other).name == other


class Noting(ThreadPoolExecutor):
    """Counts what it is handed."""

    def __init__(self):
        super().__init__(4)
        self.handed = 0

    def submit(self, *arguments, **options):
        self.handed += 1
        return super().submit(*arguments, **options)


@pytest.mark.parametrize(
    ("count", "rows", "most", "handed"),
    [
        (3, 256, 3, 0),
        (40, 8192, 3, 3),
        (40, 8192, 2, 2),
        (40, 8192, 0, 0),
        (16, 8192, 3, 2),
        (2, 1 << 17, 3, 1),
        (1, 1 << 17, 3, 0),
    ],
)
def test_as_many_threads_help_as_there_is_work_for(
    tmp_path, monkeypatch, count, rows, most, handed
):
    """One more a MiB, no more than there are entries beside the caller's."""
    monkeypatch.setattr(reader, "_MAX_HELPERS", most)
    store = published(tmp_path / "m.zarr", layouts(count, rows))
    with Noting() as pool:
        loaded = VersionReader(store.source, store.version()).load_all(pool)
        assert pool.handed == handed
    assert list(loaded) == sorted(made.name for made in layouts(count, rows))


def test_no_more_threads_than_cores_and_no_more_than_four():
    """With the caller's own."""
    assert min(4, os.cpu_count() or 1) == 1 + reader._MAX_HELPERS


def test_a_manifest_is_read_up_to_its_limit(files, monkeypatch):
    found, version = files
    size = len(version.document)
    for limit in (size, size + 1):
        monkeypatch.setattr(reader, "MAX_DOCUMENT_BYTES", limit)
        assert reader.read_version(DictSource(found), version.id).id == version.id
    monkeypatch.setattr(reader, "MAX_DOCUMENT_BYTES", size - 1)
    with pytest.raises(DamagedEntryError, match="longer than it can be"):
        reader.read_version(DictSource(found), version.id)


def test_threads_end_with_the_load(tmp_path):
    store = published(tmp_path / "m.zarr", layouts(40))
    before = threading.active_count()
    cache.open_store(store.location).load_all()
    VersionReader(store.source, store.version()).load_all()
    assert threading.active_count() == before


def ahead(files, version, act=lambda sections: None):
    """What was decoded of a version's sections before it was asked for."""
    found = Sections(DictSource(files), version.id, version.totals)
    with ThreadPoolExecutor(2) as pool:
        found.decode_ahead(pool)
    act(found)
    return found


def test_the_first_chunks_are_decoded_ahead_once(files, monkeypatch):
    found, version = files
    decoded, decode = [], sections.decode_chunk

    def noting(data, length, name):
        decoded.append(name)
        return decode(data, length, name)

    monkeypatch.setattr(sections, "decode_chunk", noting)
    read = ahead(found, version)
    wanted = [f"memory/{version.id}/{section}/c/0" for section in ("spans", "tables")]
    assert sorted(decoded) == wanted
    assert read.values("spans", 0, 3).tolist() == [1, 4, 7]
    assert read.values("tables", 0, 3).tolist() == [3, 1, 5]
    assert sorted(decoded) == wanted


def test_what_was_not_decoded_ahead_is_told_when_it_is_wanted(files):
    found, version = files
    chunk = f"{version.id}/tables/c/0"
    for harmed in (
        {key: data for key, data in found.items() if key != chunk},
        found | {chunk: b""},
        found | {chunk: found[f"{version.id}/spans/c/0"]},
    ):
        read = ahead(harmed, version)
        assert read.values("spans", 0, 1).tolist() == [1]
        with pytest.raises(DamagedEntryError) as caught:
            read.values("tables", 0, 1)
        assert caught.value.file == f"memory/{chunk}"


@pytest.mark.parametrize("length", [1, 5, 18, 71, 72, 100])
def test_any_range_of_a_section_is_put_together_from_its_chunks(tmp_path, monkeypatch, length):
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", length)
    store = published(tmp_path / "m.zarr")
    version = store.version()
    whole = np.concatenate(
        [
            np.concatenate([made.spans[name].reshape(-1) for name in sorted(made.spans)])
            for made in sorted(entries(), key=lambda made: made.name)
        ]
    )
    read = Sections(store.source, version.id, version.totals)
    for start in (0, 1, 17, 18, 35, 36, 71, 72):
        for stop in (start, start + 1, start + 18, start + 19, 72):
            if start <= stop <= 72:
                found = read.values("spans", start, stop)
                assert found.tolist() == whole[start:stop].tolist()
                assert not found.flags.writeable


def test_entries_read_in_turn_decode_a_chunk_once_even_if_nobody_holds_it(files, monkeypatch):
    found, version = files
    decoded, decode = [], sections.decode_chunk
    monkeypatch.setattr(
        sections, "decode_chunk", lambda *args: decoded.append(args) or decode(*args)
    )
    reading = VersionReader(DictSource(found), version)
    for name in version.entries:
        values_of(reading.load(name))
    assert len(decoded) == 2


def test_an_entry_is_handed_on_as_it_was_published(tmp_path):
    made = entry("a", 7, revision=3)
    data = published(tmp_path / "m.zarr", [made]).load("a").to_data()
    assert (data.name, data.spec, data.attrs) == (made.name, made.spec, made.attrs)
    for given, wanted in ((data.spans, made.spans), (data.tables, made.tables)):
        assert sorted(given) == sorted(wanted)
        for name, array in wanted.items():
            np.testing.assert_array_equal(given[name], array)


def test_what_was_loaded_cannot_be_changed(tmp_path):
    """All threads share it."""
    loaded = published(tmp_path / "m.zarr", [entry("a")]).load("a")
    with pytest.raises(TypeError):
        loaded.arrays["starts"] = np.zeros(1, np.int32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.name = "b"
    assert loaded.arrays is loaded.arrays
    for section, names in (("spans", ("starts", "ends")), ("tables", ("kv_indices",))):
        for name in names:
            assert np.shares_memory(loaded.arrays[name], loaded.values[section])
