"""Which commands bring a missing cache about: only those that can be run as they stand."""

import pytest

from cache.advice import how_to_build

BUILD = "python -m maskgen build --config FILE --cache"


@pytest.mark.parametrize(
    ("location", "advice"),
    [
        ("m.zarr", f"run: {BUILD} m.zarr"),
        ("a b/m.zarr", f"run: {BUILD} 'a b/m.zarr'"),
        ("m", "name a folder that ends in .zarr"),
        (
            "a b/m.zip",
            f"run: {BUILD} 'a b/m.zarr' && python -m maskgen pack 'a b/m.zip' --cache 'a b/m.zarr'",
        ),
        (
            "s3://b/m.zarr",
            f"check the address; `push` puts one there: run: {BUILD} masks.zarr && "
            "python -m maskgen push s3://b/m.zarr --cache masks.zarr",
        ),
        # With its secrets left out an address cannot be pasted, and a web server takes nothing.
        ("sftp://user:***@host/m.zarr", "check the address; `push` puts one there"),
        ("https://host/m.zarr", "check the address; `push` puts one there"),
        (
            "https://host/m.zip?token=***",
            "a packed zip is read as a file: download it, then `unpack` it",
        ),
        ("s3://b/m.zip", "a packed zip is read as a file: download it, then `unpack` it"),
        ("http://host/m.zarr", "check the address; `push` puts one there"),
        ("s3://***@b/m.zarr", "check the address; `push` puts one there"),
        (
            "gs://b/a b",
            f"check the address; `push` puts one there: run: {BUILD} masks.zarr && "
            "python -m maskgen push 'gs://b/a b' --cache masks.zarr",
        ),
        (
            "/deep/down/m.zip",
            f"run: {BUILD} /deep/down/m.zarr && python -m maskgen pack /deep/down/m.zip --cache "
            "/deep/down/m.zarr",
        ),
        ("m.zarr.bak", "name a folder that ends in .zarr"),
        ("a.zip/m.zarr", f"run: {BUILD} a.zip/m.zarr"),
        ("it's.zarr", f"""run: {BUILD} 'it'"'"'s.zarr'"""),
    ],
)
def test_the_advice_for_a_place(location, advice):
    assert how_to_build(location) == advice
