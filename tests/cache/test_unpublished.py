"""A version before it is published: at the limits of the format, and the order of its files."""

import dataclasses
import threading

import numpy as np
import pytest

import cache
from cache import unpublished
from cache.chunk import decode_chunk
from cache.errors import InvalidEntryError
from cache.unpublished import assemble, make_folders, write_version
from tests.cache.samples import entries, entry


def refusal(made):
    with pytest.raises(InvalidEntryError) as caught:
        assemble([made] if isinstance(made, cache.EntryData) else made)
    return caught.value


def changed(**fields):
    return dataclasses.replace(entry("a"), **fields)


NAME = (
    "a name must be parts of A-Z a-z 0-9 . _ - joined by '/', none of dots only, 200 characters at "
    "most; rename it"
)


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "0",
        "A.b_c-9/x",
        "-",
        "_",
        "a/..b",
        "a/b..",
        ".a",
        "...a",
        "a/.../b.",
        "x" * 200,
        "a/b/c/d",
    ],
)
def test_a_name_of_plain_parts_is_taken(name):
    if "..." in name.split("/"):
        assert refusal(changed(name=name)).name == name
        return
    version = assemble([changed(name=name, tables={name: np.zeros(1, np.int32)})]).version
    assert list(version.entries) == [name]
    assert name in version.entries[name].arrays


@pytest.mark.parametrize(
    "name",
    ["", "/", "a/", "/a", "a//b", ".", "..", "...", "a/.", "./a", "a/../b", "a b", "a\n", "a\\b",
     "a:b", "ä", "a*", "x" * 201, "~", "٣"],
)  # fmt: skip
def test_any_other_name_is_refused(name):
    error = refusal(changed(name=name))
    assert (str(error), error.name) == (f"entry {name!r}: {NAME}", name)
    error = refusal(changed(spans={name: np.zeros(1, np.int32)}, tables={}))
    assert str(error) == f"entry 'a': {name!r} must be a name like an entry's"
    assert error.name == "a"
    tables = {"fine": np.zeros(1, np.int32), name: np.zeros(1, np.int32)}
    assert f"{name!r} must be a name" in str(refusal(changed(tables=tables)))


@pytest.mark.parametrize("name", [7, None, b"a", ("a",)])
def test_a_name_must_be_a_text(name):
    assert str(refusal(changed(name=name))) == f"entry {str(name)!r}: {NAME}"


@pytest.mark.parametrize("section", ["spans", "tables"])
@pytest.mark.parametrize(
    ("array", "rule"),
    [
        (np.zeros(2, np.int64), "must be a numpy array of int32, found int64"),
        (np.zeros(2, np.uint32), "must be a numpy array of int32, found uint32"),
        (np.zeros(2, np.float32), "must be a numpy array of int32, found float32"),
        (np.zeros(2, ">i4"), "must be a numpy array of int32, found >i4"),
        ([1, 2], "must be a numpy array of int32, found list"),
        (np.int32(1), "must be a numpy array of int32, found int32"),
        (None, "must be a numpy array of int32, found NoneType"),
        (np.zeros((), np.int32), "must have 1 to 8 dimensions, found 0"),
        (np.zeros([1] * 9, np.int32), "must have 1 to 8 dimensions, found 9"),
    ],
)
def test_an_array_at_fault_is_named_wherever_it_stands(section, array, rule):
    good = np.zeros(1, np.int32)
    for arrays in ({"x": array}, {"w": good, "x": array}, {"x": array, "y": good}):
        error = refusal(changed(**{"spans": {}, "tables": {}, section: arrays}))
        assert str(error) == f"entry 'a': array 'x' {rule}"


@pytest.mark.parametrize("dimensions", [1, 2, 8])
def test_up_to_eight_dimensions_are_taken(dimensions):
    array = np.arange(2**dimensions, dtype=np.int32).reshape([2] * dimensions)
    version = assemble([changed(spans={"x": array}, tables={})]).version
    assert version.entries["a"].arrays["x"].shape == (2,) * dimensions


def test_an_entry_of_exactly_4_gib_is_taken():
    """Arrays of both sections count; none of them is in memory."""
    one = np.broadcast_to(np.zeros(1, np.int32), (1 << 29,))
    half = {"spans": {"x": one}, "tables": {"y": one}}
    changed(**half).check()
    more = {"spans": {"x": one, "z": np.zeros(1, np.int32)}, "tables": {"y": one}}
    with pytest.raises(InvalidEntryError) as caught:
        changed(**more).check()
    assert str(caught.value) == (
        "entry 'a': it must hold at most 4294967296 bytes, found 4294967300; split it"
    )


@pytest.mark.parametrize("field", ["spec", "attrs"])
def test_json_at_fault_is_named_by_its_field(field):
    for value, rule in (
        ({"n": {"m": [1, 2.5]}}, "value.n.m[1] is 2.5 of type float"),
        ({"n": None}, "value.n is None of type NoneType"),
        ({"n": 10**18}, "value.n must have 18 digits at most"),
        ({1: 1}, "value has the key 1; keys must be strings"),
    ):
        message = str(refusal(changed(**{field: value})))
        assert message.startswith(f"entry 'a': {field}: {rule}")
    cause = refusal(changed(**{field: {"n": None}})).__cause__
    assert isinstance(cause, TypeError)


def test_an_array_stands_in_one_section_and_the_first_that_does_not_is_named():
    array = np.zeros(1, np.int32)
    error = refusal(changed(spans=dict.fromkeys("dcb", array), tables=dict.fromkeys("bcx", array)))
    assert str(error) == "entry 'a': the array 'b' must stand in one section, not in both"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_name_that_stands_twice_is_told(order):
    made = [entry("a"), entry("b"), entry("b", 2)]
    error = refusal([made[index] for index in order])
    assert str(error) == "entry 'b': the name must be unique; rename one of the two"
    assert error.name == "b"


def test_the_last_entry_is_named_where_the_manifest_is_too_long(monkeypatch):
    made = entries(4)
    size = len(assemble(made).version.document)
    monkeypatch.setattr(unpublished, "MAX_DOCUMENT_BYTES", size)
    assemble(made)
    monkeypatch.setattr(unpublished, "MAX_DOCUMENT_BYTES", size - 1)
    error = refusal(made)
    assert str(error) == (
        f"entry 'causal/q8': the manifest must stay within {size - 1} bytes, found {size}; publish "
        "fewer entries a version"
    )


def test_a_version_is_written_chunks_first_and_its_document_last(tmp_path, monkeypatch):
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", 30)
    keys, write = [], unpublished.write_synced

    def noting(path, data):
        keys.append(path.relative_to(tmp_path).as_posix())
        write(path, data)

    monkeypatch.setattr(unpublished, "write_synced", noting)
    new = assemble(entries())
    write_version(new, tmp_path)
    version = new.version.id
    assert [key.removeprefix(f"{version}/") for key in keys] == [
        "spans/c/0", "spans/c/1", "spans/c/2", "spans/zarr.json",
        "tables/c/0", "tables/zarr.json", "zarr.json",
    ]  # fmt: skip
    with pytest.raises(FileExistsError):
        make_folders(tmp_path, version)
    with pytest.raises(FileNotFoundError):
        make_folders(tmp_path / "gone", version)


@pytest.mark.parametrize("most", [1, 2, 5, 7, 12, 24, 71, 72, 73])
def test_arrays_are_cut_into_chunks_wherever_their_ends_lie(tmp_path, monkeypatch, most):
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", most)
    new = assemble(entries())
    write_version(new, tmp_path)
    for section, total in (("spans", 72), ("tables", 9)):
        whole = np.concatenate(new.values[section]).tolist()
        assert len(whole) == total
        count = -(-total // most)
        length = -(-total // count)
        folder = tmp_path / new.version.id / section / "c"
        assert sorted(int(path.name) for path in folder.iterdir()) == list(range(count))
        found = [
            decode_chunk((folder / str(index)).read_bytes(), length, "f") for index in range(count)
        ]
        assert np.concatenate(found).tolist() == whole + [-1] * (count * length - total)


def test_chunks_are_encoded_in_another_thread_one_at_a_time(tmp_path, monkeypatch):
    """In the main one Blosc uses several threads, and equal values give other bytes."""
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", 10)
    threads, inside, encode = [], [], unpublished.encode_chunk

    def noting(values):
        threads.append(threading.current_thread())
        inside.append(1)
        assert len(inside) == 1
        data = encode(values)
        inside.pop()
        return data

    monkeypatch.setattr(unpublished, "encode_chunk", noting)
    write_version(assemble(entries()), tmp_path)
    assert len(threads) == 9
    assert threading.main_thread() not in threads


def test_equal_versions_have_equal_files(tmp_path):
    big = [changed(spans={"x": np.arange(1 << 20, dtype=np.int32)})]
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_version(assemble(big), tmp_path / name)
    key = f"{assemble(big).version.id}/spans/c/0"
    assert (tmp_path / "one" / key).read_bytes() == (tmp_path / "two" / key).read_bytes()
