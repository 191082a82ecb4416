"""Small caches that the tests share, and a source over a dict of bytes."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

import cache
from cache.format import is_version_id
from cache.unpublished import assemble, write_version


def entry(name="causal/q4", scale=1, *, revision=1):
    """An entry of two spans' arrays and one table, all told apart by ``scale``."""
    starts = np.arange(12, dtype=np.int32).reshape(1, 1, 1, 12) * scale
    return cache.EntryData(
        name=name,
        spec={"family": "causal", "revision": revision, "shape": [4, 12]},
        attrs={"rows": 12, "exact": True, "note": 'a "quoted" \\ note {['},
        spans={"starts": starts, "ends": starts + 1},
        tables={"kv_indices": np.array([3, 1, 2 + scale], np.int32)},
    )


def entries(count=3, scale=1):
    return [entry(f"causal/q{4 * (i + 1)}", scale + i) for i in range(count)]


def layouts(count=64, rows=8192, draws=None):
    """Entries of the size of a DFlash bucket's layouts: 131 kB of spans each."""
    rng = np.random.default_rng(0)
    block = 16
    made = []
    for index in range(count):
        anchors = np.sort(rng.choice(rows // 2, rows // block, replace=False)).astype(np.int32)
        starts = np.zeros((1, 1, 2, rows), np.int32)
        ends = np.zeros((1, 1, 2, rows), np.int32)
        ends[0, 0, 0] = np.repeat(anchors, block)
        starts[0, 0, 1] = rows // 2 + np.repeat(np.arange(rows // block) * block, block)
        ends[0, 0, 1] = starts[0, 0, 1] + block
        made.append(
            cache.EntryData(
                name=f"dflash/layout{index:02}",
                spec={"family": "dflash", "layout": index, "revision": 1},
                spans={"starts": starts, "ends": ends},
                tables={"kv_num_blocks": anchors[:64]},
            )
        )
    return made


def published(folder, made=None):
    """A store at ``folder`` with one published version."""
    store = cache.open_store(Path(folder), writable=True)
    store.publish(entries() if made is None else made)
    return store


def files_of(store):
    """Every file of a store's folder, by key."""
    root = Path(store.location)
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def written(tmp_path, made=None):
    """The files of a published store by key, and the version's id."""
    store = published(tmp_path / "m.zarr", made)
    return files_of(store), store.current


def values_of(source_entry):
    """All that a reader gets out of an entry, comparable."""
    return {
        "name": source_entry.name,
        "spec": source_entry.spec,
        "attrs": source_entry.attrs,
        "arrays": {
            name: (array.dtype.str, array.shape, array.tobytes())
            for name, array in source_entry.arrays.items()
        },
    }


def truth_of(store):
    """By version, by entry, what is right."""
    return {
        line.id: {
            name: values_of(store.load(name, line.id)) for name in store.version(line.id).entries
        }
        for line in store.versions()
    }


class DictSource:
    """A source over a dict of bytes, for many mutated caches in little time."""

    def __init__(self, files: Mapping[str, bytes], location="memory") -> None:
        self.files = files
        self.location = location

    def name(self, key):
        return f"{self.location}/{key}"

    def read(self, key, limit):
        data = self.files.get(key)
        if data is not None and len(data) > limit:
            raise cache.errors.DamagedEntryError(self.name(key), "it is longer than it can be")
        return data

    def version_ids(self):
        heads = (key.split("/")[0] for key in self.files if key.endswith("/zarr.json"))
        return sorted({head for head in heads if is_version_id(head)})

    def file_sizes(self, version):
        return {k: len(v) for k, v in self.files.items() if k.startswith(f"{version}/")}


def written_by_hand(folder, made):
    """Write a version's folder without publishing it; returns its id."""
    new = assemble(made)
    folder.mkdir(parents=True, exist_ok=True)
    write_version(new, folder)
    return new.version.id
