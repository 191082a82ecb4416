"""Which versions a store lists, and which one a name means."""

import shutil
from pathlib import Path

import pytest

import cache
from cache.errors import DamagedEntryError, EntryNotFoundError, VersionNotFoundError
from cache.reader import open_and_load
from tests.cache.samples import DictSource, entries, entry, files_of, published


@pytest.fixture
def store(tmp_path):
    return published(tmp_path / "m.zarr")


@pytest.fixture
def three(tmp_path):
    """A store of three versions of one, two and three entries; the second is current."""
    store = published(tmp_path / "m.zarr", entries(1))
    ids = [store.current, *(store.publish(entries(n, scale=n)) for n in (2, 3))]
    store.use(ids[1])
    return store, ids


def sizes(store):
    """Bytes of each version's files."""
    found = {}
    for key, data in files_of(store).items():
        version = key.split("/")[0]
        found[version] = found.get(version, 0) + len(data)
    return found


def test_each_version_is_a_line(three):
    store, ids = three
    for listing in (store, cache.open_store(store.location)):
        lines = {line.id: line for line in listing.versions()}
        assert lines == {
            version: cache.VersionInfo(version, count, sizes(store)[version], version == ids[1])
            for count, version in enumerate(ids, 1)
        }
        assert all(line.damage == "" for line in lines.values())


def test_behind_a_url_and_in_a_zip_lines_are_sorted_by_id(three, tmp_path):
    store, ids = three
    for version in ids:
        cache.push(store, "memory://lines/m.zarr", version, make_current=version == ids[1])
    far = cache.open_store("memory://lines/m.zarr").versions()
    assert [line.id for line in far] == sorted(ids)
    assert {line.id: line for line in far} == {line.id: line for line in store.versions()}
    cache.pack(store, tmp_path / "m.zip", ids[2])
    assert cache.open_store(tmp_path / "m.zip").versions() == [
        cache.VersionInfo(ids[2], 3, sizes(store)[ids[2]], True)
    ]


def test_a_damaged_version_is_a_line_wherever_it_stands(three):
    store, ids = three
    for position, version in enumerate(ids):
        document = Path(store.location, version, "zarr.json")
        whole = document.read_bytes()
        document.write_bytes(b"{}")
        lines = {line.id: line for line in cache.open_store(store.location).versions()}
        assert set(lines) == set(ids)
        assert [lines[known].entries for known in ids] == [
            0 if known == version else count for count, known in enumerate(ids, 1)
        ]
        assert lines[version].is_current == (position == 1)
        assert str(document) in lines[version].damage
        assert "Delete this version" in lines[version].damage
        assert [known for known in ids if lines[known].damage] == [version]
        document.write_bytes(whole)


def test_a_version_of_another_format_is_a_damaged_line(three):
    store, ids = three
    document = Path(store.location, ids[0], "zarr.json")
    text = document.read_bytes().replace(b'"format_version":1', b'"format_version":2')
    document.write_bytes(text)
    lines = {line.id: line for line in cache.open_store(store.location).versions()}
    assert lines[ids[0]].entries == 0
    assert lines[ids[0]].damage


class Passing(DictSource):
    """Lists versions as they were a moment ago."""

    def version_ids(self):
        return self.listed


def test_what_goes_as_versions_are_listed_is_no_line(three):
    store, ids = three
    source = Passing({k: v for k, v in files_of(store).items() if not k.startswith(ids[0])})
    source.listed = ids
    lines = cache.Store(source, ids[1], writable=False).versions()
    assert [line.id for line in lines] == ids[1:]


def test_a_lost_current_version_is_the_last_line(three, tmp_path):
    store, ids = three
    Path(store.location, ids[1]).rename(tmp_path / "aside")
    *others, line = cache.open_store(store.location).versions()
    assert {other.id for other in others} == {ids[0], ids[2]}
    assert (line.id, line.entries, line.bytes_on_disk, line.is_current) == (ids[1], 0, 0, True)
    assert ids[1] in line.damage
    assert f"{store.location}/zarr.json" in line.damage


def test_what_another_one_removed_since_the_store_was_opened_is_not_lost(three):
    """It chose another version first: its root is right."""
    store, ids = three
    reading = cache.open_store(store.location)
    store.use(ids[0])
    shutil.rmtree(Path(store.location, ids[1]))
    assert {line.id for line in reading.versions()} == {ids[0], ids[2]}
    assert not any(line.is_current or line.damage for line in reading.versions())
    # Nor when what it chose is lost as well, which is none of this store's.
    shutil.rmtree(Path(store.location, ids[0]))
    assert [line.id for line in reading.versions()] == [ids[2]]


def test_a_full_id_is_taken_as_it_is(three):
    store, _ = three
    assert store.resolve("f" * 64) == "f" * 64
    closed = DictSource({})
    closed.version_ids = lambda: pytest.fail("a full id needs no listing")
    assert cache.Store(closed, None, writable=False).resolve("f" * 64) == "f" * 64


def test_a_name_that_means_no_version_is_told_with_those_there_are(three):
    store, ids = three
    known = store.source.version_ids()
    shown = ", ".join(version[:12] for version in known)
    absent = next(f"{n:04x}" for n in range(9) if not any(i.startswith(f"{n:04x}") for i in ids))
    for name, rule in (
        (absent, f"0 versions start with '{absent}'"),
        (ids[0][:3], f"a version is named by 4 digits or more, found '{ids[0][:3]}'"),
        ("", "a version is named by 4 digits or more, found ''"),
        ("z" * 64, f"0 versions start with '{'z' * 64}'"),
        (ids[0] + "0", f"0 versions start with '{ids[0]}0'"),
        (ids[0][1:9], f"0 versions start with '{ids[0][1:9]}'"),
    ):
        for ask in (store.resolve, store.version, store.load_all, store.use, store.verify):
            with pytest.raises(VersionNotFoundError) as caught:
                ask(name)
            assert str(caught.value) == f"{rule}; {store.location} holds: {shown}"
            assert caught.value.version == name
            assert caught.value.known == tuple(known)
    assert store.resolve(ids[0][:4]) == ids[0]
    assert store.resolve(ids[0][:63]) == ids[0]


def test_of_an_empty_store_none_is_shown(tmp_path):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    with pytest.raises(VersionNotFoundError) as caught:
        store.version("abcd")
    assert str(caught.value) == (f"0 versions start with 'abcd'; {store.location} holds: none")
    assert caught.value.known == ()


def test_an_id_that_is_not_there_is_told_with_what_brings_it(store):
    with pytest.raises(VersionNotFoundError) as caught:
        store.load("causal/q4", "0" * 64)
    assert str(caught.value) == (
        f"{store.location} holds no version {'0' * 64}; `versions` lists what it holds, or run: "
        f"python -m maskgen build --config FILE --cache {store.location}"
    )
    assert caught.value.version == "0" * 64


def test_each_way_of_asking_takes_a_name_and_the_current_one(three):
    store, ids = three
    for name, count, version in ((ids[0][:9], 1, ids[0]), (ids[2], 3, ids[2]), (None, 2, ids[1])):
        assert store.resolve(name) == version
        assert store.version(name).id == version
        assert store.reader(name).version.id == version
        assert store.load("causal/q4", name).version == version
        assert len(store.load_all(name)) == count
    assert store.diff(ids[0][:9], ids[2]).added == ("causal/q12", "causal/q8")
    assert store.diff(ids[2], ids[0]).removed == ("causal/q12", "causal/q8")
    assert store.diff(None, None) == cache.Diff((), (), ())


def test_what_was_loaded_is_shared_by_all_ways_of_loading(store):
    loaded = cache.open_store(store.location)
    first = loaded.load("causal/q8")
    everything = loaded.load_all()
    assert everything["causal/q8"] is first
    again = loaded.load_all(store.current[:8])
    assert all(again[name] is found for name, found in everything.items())
    assert loaded.reader().load("causal/q4") is everything["causal/q4"]
    assert loaded.version() is loaded.version(store.current)


def test_what_was_loaded_before_a_gc_is_not_loaded_after_it(three):
    store, ids = three
    held = store.load("causal/q4", ids[0])
    assert ids[0] in store.gc(1, min_age_s=-1).removed
    with pytest.raises(VersionNotFoundError, match="holds no version"):
        store.load("causal/q4", ids[0])
    assert held.arrays["starts"].shape == (1, 1, 1, 12)


def test_a_damaged_version_is_not_chosen(three):
    store, ids = three
    Path(store.location, ids[0], "zarr.json").write_bytes(b"{}")
    with pytest.raises(DamagedEntryError, match="canonical document"):
        cache.open_store(store.location, writable=True).use(ids[0])
    assert cache.open_store(store.location).current == ids[1]


def test_publishing_moves_current_only_where_that_is_asked_for(three):
    store, ids = three
    other = store.publish([entry("new")], make_current=False)
    assert (store.current, cache.open_store(store.location).current) == (ids[1], ids[1])
    assert store.publish([entry("new")]) == other
    assert (store.current, cache.open_store(store.location).current) == (other, other)
    assert store.use(ids[0]) == ids[0]
    assert (store.current, cache.open_store(store.location).current) == (ids[0], ids[0])


def test_the_three_nearest_names_are_told(tmp_path):
    names = ["causal/q4", "causal/q44", "causal/q444", "causal/q4444", "other"]
    store = published(tmp_path / "m.zarr", [entry(name) for name in names])
    with pytest.raises(EntryNotFoundError) as caught:
        store.load("causal/q5")
    assert caught.value.nearest == ("causal/q4", "causal/q44", "causal/q444")
    assert (caught.value.name, caught.value.version) == ("causal/q5", store.current)
    assert str(caught.value) == (
        f"version {store.current[:12]} has no entry 'causal/q5'; nearest: "
        "causal/q4, causal/q44, causal/q444"
    )
    with pytest.raises(EntryNotFoundError) as caught:
        store.load("zzzzzzzzzzzzzz")
    assert str(caught.value).endswith("has no entry 'zzzzzzzzzzzzzz'")
    assert caught.value.nearest == ()


def test_a_name_is_near_whose_letters_are_half_the_same(tmp_path):
    """By difflib's ratio: 2 * 4 / (4 + 14) is near, 2 * 3 / (3 + 14) is not."""
    store = published(tmp_path / "m.zarr", [entry("flex/causal/q4")])
    for asked, nearest in (("flex", ("flex/causal/q4",)), ("fle", ())):
        with pytest.raises(EntryNotFoundError) as caught:
            store.load(asked)
        assert caught.value.nearest == nearest


def test_who_was_outrun_by_another_thread_shares_what_it_loaded(store, monkeypatch):
    loading, outrun = cache.open_store(store.location), []

    def slow(source, version_id):
        found = open_and_load(source, version_id)
        outrun.append(loading.load("causal/q4"))
        return found

    monkeypatch.setattr("cache.store.open_and_load", slow)
    everything = loading.load_all()
    assert everything["causal/q4"] is outrun[0]
    assert loading.load("causal/q8") is everything["causal/q8"]
