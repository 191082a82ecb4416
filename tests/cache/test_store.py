import dataclasses
import threading

import numpy as np
import pytest

import cache
from cache import reader, sections
from cache.chunk import decode_chunk
from cache.digest import sha256_hex
from cache.errors import (
    DamagedEntryError,
    EntryNotFoundError,
    FormatVersionError,
    InvalidEntryError,
    StoreNotFoundError,
    StoreWriteError,
    VersionNotFoundError,
)
from cache.format import manifest_of
from cache.unpublished import assemble
from tests.cache.samples import (
    DictSource,
    entries,
    entry,
    files_of,
    layouts,
    published,
    values_of,
)


@pytest.fixture
def store(tmp_path):
    return published(tmp_path / "m.zarr")


def test_what_is_published_is_what_loads(store):
    again = cache.open_store(store.location)
    for made in entries():
        found = again.load(made.name)
        assert (found.name, found.spec, found.attrs) == (made.name, made.spec, made.attrs)
        assert found.version == store.current
        for name, array in (made.spans | made.tables).items():
            np.testing.assert_array_equal(found.arrays[name], array)
            assert found.arrays[name].dtype == np.int32
            assert found.arrays[name].shape == array.shape


@pytest.mark.parametrize("values", [1 << 24, 24, 7])
def test_loaded_arrays_cannot_be_written(tmp_path, monkeypatch, values):
    """In one chunk, at the edge of two, and over several."""
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", values)
    store = published(tmp_path / "m.zarr")
    for loaded in cache.open_store(store.location).load_all().values():
        for array in loaded.arrays.values():
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
            with pytest.raises(ValueError, match="cannot set WRITEABLE"):
                array.flags.writeable = True


def test_a_new_store_has_no_version_and_leaves_no_trace(tmp_path):
    location = tmp_path / "deep" / "m.zarr"
    store = cache.open_store(location, writable=True)
    assert store.current is None
    assert store.versions() == []
    with pytest.raises(VersionNotFoundError, match="no current version"):
        store.load("x")
    assert not location.parent.exists()


def test_an_absent_store_is_refused(tmp_path):
    with pytest.raises(StoreNotFoundError, match="there is no cache at") as caught:
        cache.open_store(tmp_path / "m.zarr")
    assert isinstance(caught.value, FileNotFoundError)
    assert caught.value.exit_code == 1
    how = f"run: python -m maskgen build --config FILE --cache {tmp_path}/m.zarr"
    assert str(caught.value).endswith(how)
    with pytest.raises(StoreNotFoundError, match="there is no file") as caught:
        cache.open_store(tmp_path / "m.zip")
    assert how in str(caught.value)


def test_a_damaged_root_says_that_it_alone_must_go(store, tmp_path):
    root = tmp_path / "m.zarr" / "zarr.json"
    root.write_bytes(b"{")
    with pytest.raises(DamagedEntryError, match="Delete this one file, then"):
        cache.open_store(store.location)
    root.unlink()
    again = cache.open_store(store.location, writable=True)
    assert again.publish(entries()) == store.current
    assert again.verify() == []


@pytest.mark.parametrize("name", ["m", "m.zip", "memory://m.zarr"])
def test_only_a_zarr_folder_is_writable(tmp_path, name, store):
    location = name if "://" in name else tmp_path / name
    if name == "m.zip":
        cache.pack(store, location)
    with pytest.raises(StoreWriteError, match=r"cannot be written: name a folder that ends in"):
        cache.open_store(location, writable=True)


def test_a_store_opened_for_reading_does_not_write(store):
    closed = cache.open_store(store.location)
    for change in (
        lambda: closed.publish(entries()),
        lambda: closed.use(store.current),
        lambda: closed.gc(1),
    ):
        with pytest.raises(StoreWriteError, match="open it with writable=True"):
            change()


def test_equal_content_is_published_once(store, tmp_path):
    before = files_of(store)
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "m.zarr").rglob("*") if p.is_file()}
    del times[tmp_path / "m.zarr" / "zarr.json"]
    assert store.publish(list(reversed(entries()))) == store.current
    assert files_of(store) == before
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_two_stores_of_equal_content_are_equal_byte_for_byte(store, tmp_path):
    other = published(tmp_path / "other" / "n.zarr", reversed(entries()))
    assert other.current == store.current
    assert files_of(other) == files_of(store)


def test_a_version_is_six_files(store, tmp_path):
    assert len(files_of(store)) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["m.zarr"]


def test_empty_versions_entries_and_arrays_load(tmp_path):
    bare = cache.EntryData(name="bare", spec={"kind": "parametric"})
    none = cache.EntryData(name="none", spec={}, spans={"x": np.zeros((3, 0), np.int32)})
    store = published(tmp_path / "m.zarr", [bare, none])
    assert store.verify() == []
    assert store.load("bare").arrays == {}
    assert store.load("none").arrays["x"].shape == (3, 0)
    empty = store.publish([])
    assert dict(store.version(empty).entries) == {}
    assert store.verify() == []


def test_versions_lists_the_newest_first(store):
    first = store.current
    second = store.publish(entries(2, scale=5))
    lines = store.versions()
    assert [(line.id, line.entries, line.is_current) for line in lines] == [
        (second, 2, True),
        (first, 3, False),
    ]
    size = sum(len(data) for key, data in files_of(store).items() if key.startswith(first))
    assert lines[1].bytes_on_disk == size


def test_versions_shows_a_damaged_one_and_goes_on(store, tmp_path):
    second = store.publish(entries(2, scale=5))
    (tmp_path / "m.zarr" / second / "zarr.json").write_bytes(b"{}")
    lines = {line.id: line for line in cache.open_store(store.location).versions()}
    assert "canonical document" in lines[second].damage
    assert lines[second].entries == 0
    assert len(lines) == 2


def test_versions_shows_that_the_current_one_is_gone(store, tmp_path):
    second = store.publish(entries(2, scale=5))
    (tmp_path / "m.zarr" / second).rename(tmp_path / "aside")
    (line,) = [line for line in cache.open_store(store.location).versions() if line.is_current]
    assert (line.id, line.entries) == (second, 0)
    assert "its current version must be there" in line.damage
    assert "`use` a version that is there" in line.damage


def test_an_old_version_loads_by_id_and_prefix(store):
    first, old = store.current, values_of(store.load("causal/q4"))
    store.publish(entries(3, scale=9))
    assert values_of(store.load("causal/q4")) != old
    for name in (first, first[:4], first[:20]):
        assert values_of(store.load("causal/q4", name)) == old
        assert store.version(name).id == first


def test_the_last_chunk_is_padded_with_the_fill_value(tmp_path, monkeypatch):
    """What a plain zarr reader shows past the end is no value of an entry."""
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", 7)
    values = np.arange(1, 20, dtype=np.int32)
    made = cache.EntryData(name="a", spec={}, spans={"x": values[:12], "y": values[12:]})
    store = published(tmp_path / "m.zarr", [made])
    chunks = [
        decode_chunk(data, 7, key).tolist()
        for key, data in sorted(files_of(store).items())
        if "/spans/c/" in key
    ]
    assert chunks == [[*range(1, 8)], [*range(8, 15)], [*range(15, 20), -1, -1]]


def test_a_prefix_of_several_versions_is_refused_with_all_of_them():
    ids = [f"{start}{'0' * 58}" for start in ("abcd00", "abcd01", "ef0000")]
    source = DictSource({f"{version}/zarr.json": b"" for version in ids})
    several = cache.Store(source, None, writable=False)
    assert several.resolve("abcd01") == ids[1]
    with pytest.raises(VersionNotFoundError, match="2 versions start with 'abcd'") as caught:
        several.resolve("abcd")
    assert all(version[:12] in str(caught.value) for version in ids)


def test_an_unknown_version_or_prefix_is_refused(store):
    with pytest.raises(VersionNotFoundError, match="holds no version 0000"):
        store.version("0" * 64)
    with pytest.raises(VersionNotFoundError, match="0 versions start with 'zzzz'") as caught:
        store.version("zzzz")
    assert caught.value.known == (store.current,)
    with pytest.raises(VersionNotFoundError, match="named by 4 digits or more"):
        store.version(store.current[:3])


def test_an_unknown_entry_names_its_neighbours(store):
    with pytest.raises(EntryNotFoundError, match="no entry 'causal/q5'; nearest: causal/q") as e:
        store.load("causal/q5")
    assert isinstance(e.value, KeyError)
    assert "causal/q4" in e.value.nearest


def test_a_store_stays_with_the_version_it_was_opened_at(store):
    reading = cache.open_store(store.location)
    old = reading.current
    new = store.publish(entries(3, scale=9))
    assert (reading.current, reading.load("causal/q4").version) == (old, old)
    assert cache.open_store(store.location).current == new


def test_make_current_is_optional(store):
    first = store.current
    second = store.publish(entries(1, scale=9), make_current=False)
    assert store.current == first
    assert cache.open_store(store.location).current == first
    assert store.load("causal/q4", second).version == second


def test_a_first_version_need_not_be_current(tmp_path):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    made = store.publish(entries(), make_current=False)
    again = cache.open_store(store.location, writable=True)
    assert again.current is None
    assert again.load("causal/q4", made).version == made
    assert again.use(made[:8]) == made
    assert cache.open_store(store.location).current == made


def test_use_moves_current(store):
    first = store.current
    store.publish(entries(1, scale=9))
    assert store.use(first[:10]) == first
    assert store.current == first
    assert cache.open_store(store.location).current == first
    with pytest.raises(VersionNotFoundError, match="holds no version"):
        store.use("1" * 64)


def test_diff_takes_ids_prefixes_and_none(store):
    first = store.current
    store.publish([entry("causal/q4"), entry("new")])
    diff = store.diff(first[:8], None)
    assert diff == cache.Diff(("new",), ("causal/q12", "causal/q8"), ())


def test_an_equal_entry_is_copied_and_a_raised_revision_is_another(store):
    """What an incremental build does: unchanged entries are taken over as they are."""
    first = store.current
    kept = [store.load(name).to_data() for name in store.version().entries]
    assert store.publish(kept) == first
    changed = store.publish([*kept[1:], entry(kept[0].name, revision=2)])
    assert store.diff(first, changed).changed == (kept[0].name,)
    same = "causal/q8"
    assert store.load(same, first).sha256 == store.load(same, changed).sha256


def test_one_load_is_shared_by_all_threads(store, monkeypatch):
    decoded = []
    decode = sections.decode_chunk

    def counting(data, length, file):
        decoded.append(file)
        return decode(data, length, file)

    monkeypatch.setattr(sections, "decode_chunk", counting)
    fresh = cache.open_store(store.location)
    gate = threading.Barrier(8)
    found = []

    def load():
        gate.wait()
        found.append([fresh.load(made.name) for made in entries()])

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(decoded) == 2
    assert len({tuple(map(id, loaded)) for loaded in found}) == 1


def test_load_all_gives_every_entry_checked(tmp_path):
    store = published(tmp_path / "m.zarr", layouts(40))
    fresh = cache.open_store(store.location)
    loaded = fresh.load_all()
    assert list(loaded) == list(store.version().entries)
    for made in layouts(40):
        np.testing.assert_array_equal(loaded[made.name].arrays["ends"], made.spans["ends"])
        assert fresh.load(made.name) is loaded[made.name]


def test_load_all_refuses_the_whole_when_one_entry_is_damaged(tmp_path):
    store = published(tmp_path / "m.zarr", layouts(40))
    last = list(store.version().entries)[-1]
    damaged = dataclasses.replace(store.version().entries[last], sha256="0" * 64)
    fresh = cache.open_store(store.location)
    version = fresh.version()
    entries_ = dict(version.entries) | {last: damaged}
    reading = reader.VersionReader(fresh.source, dataclasses.replace(version, entries=entries_))
    with pytest.raises(DamagedEntryError, match=f"of entry '{last}' is damaged"):
        reading.load_all()


@pytest.mark.parametrize("helpers", [0, 1, 3])
def test_load_all_names_the_first_damaged_entry_whatever_the_threads(
    tmp_path, monkeypatch, helpers
):
    monkeypatch.setattr(reader, "_MAX_HELPERS", helpers)
    store = published(tmp_path / "m.zarr", layouts(40))
    fresh = cache.open_store(store.location)
    version = fresh.version()
    wrong = {
        name: dataclasses.replace(version.entries[name], sha256="0" * 64)
        for name in list(version.entries)[7::6]
    }
    entries_ = dict(version.entries) | wrong
    for _ in range(5):
        reading = reader.VersionReader(fresh.source, dataclasses.replace(version, entries=entries_))
        with pytest.raises(DamagedEntryError, match=f"of entry '{next(iter(wrong))}' is damaged"):
            reading.load_all()


@pytest.mark.parametrize("section", ["spans", "tables"])
@pytest.mark.parametrize("harm", ["missing", "short", "foreign"])
def test_a_chunk_that_cannot_be_decoded_ahead_is_refused(tmp_path, section, harm):
    store = published(tmp_path / "m.zarr", layouts(40))
    chunks = tmp_path / "m.zarr" / store.current
    chunk, other = (chunks / name / "c" / "0" for name in (section, "spans"))
    if harm == "missing":
        chunk.unlink()
    elif harm == "short":
        chunk.write_bytes(chunk.read_bytes()[:-9])
    else:
        data = other.read_bytes() if chunk != other else (chunks / "tables/c/0").read_bytes()
        chunk.write_bytes(data)
    with pytest.raises(DamagedEntryError, match=f"{section}/c/0") as caught:
        cache.open_store(store.location).load_all()
    assert caught.value.file == str(chunk)


def test_nothing_is_decoded_before_the_counts_of_a_manifest_are_checked(tmp_path, monkeypatch):
    store = published(tmp_path / "m.zarr")
    sound = store.version().document
    document = sound.replace(b'"sections":{"spans":72', b'"sections":{"spans":73')
    manifest = manifest_of(document, "f")
    assert manifest != manifest_of(sound, "f")
    version_id = sha256_hex(manifest)
    folder = tmp_path / "m.zarr" / version_id
    (tmp_path / "m.zarr" / store.current).rename(folder)
    (folder / "zarr.json").write_bytes(document)
    monkeypatch.setattr(sections, "decode_chunk", lambda *_: pytest.fail("decoded"))
    with pytest.raises(DamagedEntryError, match="sections must be as long as their entries"):
        cache.open_store(store.location).load_all(version_id)


def test_a_folder_of_version_2_is_refused(store, tmp_path):
    root = tmp_path / "m.zarr" / "zarr.json"
    root.write_text(root.read_text().replace('"format_version":1', '"format_version":2'))
    for writable in (False, True):
        with pytest.raises(FormatVersionError, match="format 2, this reader knows format 1"):
            cache.open_store(store.location, writable=writable)


def test_a_damaged_entry_names_its_file_and_spares_the_others(store, tmp_path, monkeypatch):
    last = values_of(store.load("causal/q12"))
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", 24)
    other = published(tmp_path / "n.zarr")
    chunk = tmp_path / "n.zarr" / other.current / "spans" / "c" / "1"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    fresh = cache.open_store(other.location)
    with pytest.raises(DamagedEntryError, match="CRC-32C") as caught:
        fresh.load("causal/q4")
    assert caught.value.file == str(chunk)
    assert values_of(fresh.load("causal/q12")) == last


def test_sidecars_stand_beside_the_store(store, tmp_path):
    assert store.sidecar_dir(store.current) == tmp_path / "sidecars" / store.current
    assert not (tmp_path / "sidecars").exists()


def test_a_file_url_is_a_folder(store):
    assert cache.open_store(f"file://{store.location}").load("causal/q4").name == "causal/q4"


def test_a_manifest_that_no_reader_would_take_is_not_published(store, tmp_path, monkeypatch):
    size = len(assemble(entries(9)).version.document)
    before = files_of(store)
    for module in ("unpublished", "reader", "source", "verify"):
        monkeypatch.setattr(f"cache.{module}.MAX_DOCUMENT_BYTES", size - 1)
    with pytest.raises(InvalidEntryError, match=f"within {size - 1} bytes, found {size}; publish"):
        store.publish(entries(9))
    assert files_of(store) == before
    for module in ("unpublished", "reader", "source", "verify"):
        monkeypatch.setattr(f"cache.{module}.MAX_DOCUMENT_BYTES", size)
    store.publish(entries(9))
    again = cache.open_store(tmp_path / "m.zarr")
    assert len(again.load_all()) == 9


def test_an_entry_across_chunks_is_put_together(tmp_path, monkeypatch):
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", 7)
    store = published(tmp_path / "m.zarr")
    assert len(files_of(store)) > 15
    again = cache.open_store(store.location)
    for made in entries():
        np.testing.assert_array_equal(again.load(made.name).arrays["ends"], made.spans["ends"])
    assert again.verify() == []
