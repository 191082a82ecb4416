"""Read an entry of a mask cache with plain zarr and numpy: ``read_cache.py MASKS.zarr [NAME]``.

Nothing of this project is imported; docs/cache-format.md says what is read here.
"""

import hashlib
import json
import sys

import numpy as np
import zarr
from zarr.storage import LocalStore, ZipStore


def canonical(value: object) -> bytes:
    """The text of which digests are taken."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def read_entry(location: str, name: str | None = None) -> dict[str, np.ndarray]:
    """Return the arrays of an entry by name, or print what there is.

    Raises:
        ValueError: The cache is of another format, or a digest does not fit.
        KeyError: There is no such entry.
    """
    store = (
        ZipStore(location, mode="r")
        if location.endswith(".zip")
        else LocalStore(location, read_only=True)
    )
    root = zarr.open_group(store, mode="r", zarr_format=3)
    if (root.attrs["format"], root.attrs["format_version"]) != ("flex-mask-cache", 1):
        raise ValueError(f"{location} is not a flex-mask-cache of format version 1")
    version = root[str(root.attrs["current"])]
    manifest = version.attrs["manifest"]
    if hashlib.sha256(canonical(manifest)).hexdigest() != root.attrs["current"]:
        raise ValueError("the manifest's SHA-256 is not the version's id")
    entries = {entry["name"]: entry for entry in manifest["entries"]}
    if name is None:
        print(*entries, sep="\n")
        return {}
    digest = hashlib.sha256()
    arrays: dict[str, np.ndarray] = {}
    for section in ("spans", "tables"):
        start = entries[name]["offsets"][section]
        for key, shape in sorted(entries[name][section].items()):
            stop = start + int(np.prod(shape, dtype=np.int64))
            flat = version[section][start:stop]
            digest.update(flat.astype("<i4").tobytes())
            arrays[key] = flat.reshape(shape)
            start = stop
    if digest.hexdigest() != entries[name]["sha256"]:
        raise ValueError(f"the values of {name} do not have the manifest's SHA-256")
    return arrays


if __name__ == "__main__":
    for key, array in read_entry(*sys.argv[1:3]).items():
        print(key, array.shape, array.reshape(-1)[:8], "...")
