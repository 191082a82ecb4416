import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import cache
from cache import errors

PACKAGE = Path(cache.__file__).parent


def test_all_is_sorted_and_exact():
    assert cache.__all__ == sorted(cache.__all__)
    assert all(hasattr(cache, name) for name in cache.__all__)
    kinds = {"ArrayInfo", "Diff", "EntryInfo", "Finding", "GcReport", "Shipment", "VersionInfo"}
    kinds |= {"Entry", "EntryData", "Store", "Version"}
    calls = {"open_store", "pack", "unpack", "push", "pull", "canonical_json", "sha256_hex"}
    assert set(cache.__all__) == kinds | calls | {"errors"}


def test_importing_the_cache_loads_no_torch_click_or_zarr():
    code = (
        "import sys, cache; "
        "heavy = {'torch', 'click', 'triton', 'transformers', 'zarr', 'aiohttp'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
    )
    assert done.stdout.strip() == "[]"


def test_nothing_is_pickled_or_evaluated():
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not forbidden & {alias.name for alias in node.names}, path
            if isinstance(node, ast.ImportFrom):
                assert node.module not in forbidden, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, path


@pytest.mark.parametrize(
    ("name", "parents", "exit_code"),
    [
        ("StoreNotFoundError", (FileNotFoundError,), 1),
        ("VersionNotFoundError", (LookupError,), 1),
        ("VersionRemovedError", (errors.VersionNotFoundError,), 1),
        ("EntryNotFoundError", (KeyError,), 1),
        ("InvalidEntryError", (ValueError,), 1),
        ("FormatVersionError", (ValueError,), 1),
        ("DamagedEntryError", (ValueError,), 3),
        ("StoreReadError", (OSError,), 1),
        ("StoreWriteError", (OSError,), 1),
        ("ShippingError", (), 1),
        ("BackendMissingError", (errors.ShippingError, ImportError), 1),
        ("NotListableError", (errors.ShippingError,), 1),
    ],
)
def test_the_errors_are_as_they_are_drawn(name, parents, exit_code):
    kind = getattr(errors, name)
    assert issubclass(kind, (errors.CacheError, *parents))
    assert all(issubclass(kind, parent) for parent in parents)
    assert kind.exit_code == exit_code
    assert name in errors.__doc__


def test_a_key_error_reads_like_a_sentence():
    error = errors.EntryNotFoundError("x", "ab" * 32, ["y"])
    assert str(error) == "version abababababab has no entry 'x'; nearest: y"


@pytest.mark.parametrize(
    "made",
    [
        cache.ArrayInfo("spans", 0, (1,)),
        cache.Diff((), (), ()),
        cache.EntryData(name="a", spec={}),
        cache.Finding("v", "f", None, "r", "", "", "m"),
        cache.GcReport((), (), 0),
        cache.Shipment("v", 0, 0, 0),
        cache.VersionInfo("v", 0, 0, False),
    ],
)
def test_what_is_handed_out_cannot_be_changed(made):
    for field in dataclasses.fields(made):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, None)
