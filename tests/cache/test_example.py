"""The reader in plain zarr and numpy reads what the cache writes, without a warning."""

import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

import cache
from tests.cache.samples import entries, published

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "read_cache.py"
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def read_entry():
    return runpy.run_path(str(EXAMPLE))["read_entry"]


def test_the_example_is_60_lines_and_imports_nothing_of_the_project():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 60
    for name in ("cache", "maskgen", "runtime"):
        assert f"import {name}" not in text
        assert f"from {name}" not in text


@pytest.mark.parametrize("name", ["v1.zarr", "v1.zip"])
def test_the_example_reads_the_golden_caches(read_entry, name, capsys):
    store = cache.open_store(GOLDEN / name)
    for entry in store.version().entries:
        found = read_entry(str(GOLDEN / name), entry)
        expected = store.load(entry).arrays
        assert sorted(found) == sorted(expected)
        for key, array in expected.items():
            np.testing.assert_array_equal(found[key], array)
    assert read_entry(str(GOLDEN / name)) == {}
    assert "causal/q4-kv4" in capsys.readouterr().out


def test_the_example_reads_many_chunks(read_entry, tmp_path, monkeypatch):
    monkeypatch.setattr("cache.chunk.MAX_CHUNK_VALUES", 7)
    store = published(tmp_path / "m.zarr")
    for made in entries():
        found = read_entry(store.location, made.name)
        np.testing.assert_array_equal(found["ends"], made.spans["ends"])


def test_the_example_refuses_swapped_chunks_and_another_manifest(read_entry, tmp_path):
    store = published(tmp_path / "m.zarr")
    other = published(tmp_path / "n.zarr", entries(3, scale=7))
    shutil.copyfile(
        tmp_path / "n.zarr" / other.current / "spans" / "c" / "0",
        tmp_path / "m.zarr" / store.current / "spans" / "c" / "0",
    )
    with pytest.raises(ValueError, match="do not have the manifest's SHA-256"):
        read_entry(store.location, "causal/q4")
    shutil.copyfile(
        tmp_path / "n.zarr" / other.current / "zarr.json",
        tmp_path / "m.zarr" / store.current / "zarr.json",
    )
    with pytest.raises(ValueError, match="is not the version's id"):
        read_entry(store.location, "causal/q4")


def test_the_example_runs_from_the_command_line(tmp_path):
    store = published(tmp_path / "m.zarr")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), store.location, "causal/q8"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "starts (1, 1, 1, 12)" in done.stdout
    assert done.stderr == ""


def test_plain_zarr_walks_the_whole_hierarchy(tmp_path):
    """Warnings are errors here, so that opening and listing give none."""
    store = published(tmp_path / "m.zarr")
    store.publish([cache.EntryData(name="bare", spec={})])
    root = zarr.open_group(store.location, mode="r")
    members = {name for name, _ in root.members(max_depth=None)}
    ids = {line.id for line in store.versions()}
    assert members == ids | {f"{i}/{section}" for i in ids for section in ("spans", "tables")}
    for version in ids:
        totals = store.version(version).totals
        for section in ("spans", "tables"):
            array = root[version][section]
            assert (array.shape, array.dtype, array.fill_value) == ((totals[section],), "<i4", -1)
            assert array[:].shape == array.shape


def test_zarr_writes_arrays_that_decode_alike(tmp_path):
    """An array of our document, filled by zarr itself, has chunks that the cache reads."""
    from cache.chunk import ChunkGrid, decode_chunk
    from cache.format import array_document

    values = np.arange(1000, dtype=np.int32) * 3
    (tmp_path / "zarr.json").write_bytes(array_document(values.size))
    array = zarr.open_array(tmp_path, mode="r+")
    array[:] = values
    data = (tmp_path / "c" / "0").read_bytes()
    length = ChunkGrid(values.size).length
    np.testing.assert_array_equal(decode_chunk(data, length, "f"), values)
