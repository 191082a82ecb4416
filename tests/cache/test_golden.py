"""Format version 1 is frozen: what was written once reads forever, under the same ids."""

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

import cache
from cache.errors import FormatVersionError
from tests.cache.samples import files_of

GOLDEN = Path(__file__).parent / "golden"


def golden_entries():
    """What the golden caches were published from, the first version and the second."""
    first = [
        cache.EntryData(
            name="causal/q4-kv4",
            spec={"family": "causal", "Q_LEN": 4, "KV_LEN": 4, "offset": 0, "revision": 1},
            attrs={
                "exact": True,
                "note": 'snowman \N{SNOWMAN}, "quoted", \\ and {[',
                "deep": [[1]],
            },
            spans={
                "starts": np.zeros((1, 1, 1, 4), np.int32),
                "ends": np.array([[[[1, 2, 3, 4]]]], np.int32),
            },
            tables={"kv_num_blocks": np.array([[[1]]], np.int32)},
        ),
        cache.EntryData(
            name="extremes",
            spec={"smallest": -(10**18) + 1, "largest": 10**18 - 1},
            spans={"x": np.array([-(2**31), -1, 0, 1, 2**31 - 1], np.int32)},
            tables={"empty": np.zeros((2, 0, 3), np.int32)},
        ),
        cache.EntryData(name="parametric", spec={"kind": "parametric"}),
    ]
    ramp = np.arange(1000, dtype=np.int32).reshape(10, 100)
    return first, [*first[:2], cache.EntryData(name="ramp", spec={}, tables={"ramp": ramp})]


def expected():
    return json.loads((GOLDEN / "expected.json").read_text())


@pytest.mark.parametrize("name", ["v1.zarr", "v1.zip"])
def test_a_golden_cache_reads_as_it_was_written(name):
    store = cache.open_store(GOLDEN / name)
    assert store.verify() == []
    assert store.current == expected()["ids"][1]
    versions = golden_entries() if name == "v1.zarr" else golden_entries()[1:]
    ids = expected()["ids"] if name == "v1.zarr" else expected()["ids"][1:]
    assert sorted(line.id for line in store.versions()) == sorted(ids)
    for version, made in zip(ids, versions, strict=True):
        assert list(store.version(version).entries) == [entry.name for entry in made]
        for entry in made:
            found = store.load(entry.name, version)
            assert (found.spec, found.attrs) == (entry.spec, entry.attrs)
            assert found.sha256 == expected()["sha256"][entry.name]
            arrays = dict(entry.spans) | dict(entry.tables)
            assert sorted(found.arrays) == sorted(arrays)
            for key, array in arrays.items():
                np.testing.assert_array_equal(found.arrays[key], array)


def test_the_same_entries_get_the_golden_ids_and_documents(tmp_path):
    """Chunks are compared by what they decode to: another Blosc may pack them another way."""
    store = cache.open_store(tmp_path / "v1.zarr", writable=True)
    assert [store.publish(made) for made in golden_entries()] == expected()["ids"]
    golden = files_of(cache.open_store(GOLDEN / "v1.zarr"))
    written = files_of(store)
    assert sorted(written) == sorted(golden)
    for key, data in golden.items():
        if "/c/" not in key:
            assert written[key] == data, key


def test_the_golden_zip_holds_the_golden_folder():
    golden = files_of(cache.open_store(GOLDEN / "v1.zarr"))
    second = expected()["ids"][1]
    with zipfile.ZipFile(GOLDEN / "v1.zip") as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    assert found == {k: v for k, v in golden.items() if k == "zarr.json" or k.startswith(second)}


def test_packing_the_golden_folder_gives_the_golden_zip(tmp_path):
    shutil.copytree(GOLDEN / "v1.zarr", tmp_path / "v1.zarr")
    cache.pack(cache.open_store(tmp_path / "v1.zarr"), tmp_path / "v1.zip")
    assert (tmp_path / "v1.zip").read_bytes() == (GOLDEN / "v1.zip").read_bytes()


def test_a_cache_of_version_2_is_refused_naming_both():
    with pytest.raises(FormatVersionError, match="format 2, this reader knows format 1") as caught:
        cache.open_store(GOLDEN / "v2.zarr")
    assert (caught.value.found, caught.value.supported) == (2, 1)
