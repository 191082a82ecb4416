"""Which commands bring a missing cache about; what runs them fills in its run file and settings."""

import shlex
from pathlib import Path

from cache.address import is_url, split_query

RUN_FILE = "--config FILE"
"""Stands in every command that an error advises, for the options of the command that failed."""


def how_to_build(location: str) -> str:
    """Return the commands that put the masks of a run file into a cache.

    Args:
        location: A folder, a packed zip or a URL; nothing is built into the last two.
    """
    place, path = shlex.quote(location), split_query(location)[0]
    build = f"run: python -m maskgen build {RUN_FILE} --cache"
    if is_url(location):
        if path.endswith(".zip"):
            return "a packed zip is read as a file: download it, then `unpack` it"
        push = f"{build} masks.zarr && python -m maskgen push {place} --cache masks.zarr"
        # With its secrets left out it cannot be pasted, and a web server takes nothing.
        can_push = "***" not in location and not location.startswith("http")
        return "check the address; `push` puts one there" + (f": {push}" if can_push else "")
    if path.endswith(".zip"):
        folder = shlex.quote(str(Path(location).with_suffix(".zarr")))
        return f"{build} {folder} && python -m maskgen pack {place} --cache {folder}"
    return f"{build} {place}" if path.endswith(".zarr") else "name a folder that ends in .zarr"
