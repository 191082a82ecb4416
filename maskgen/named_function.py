"""``package.module:function`` of a run file -> the function, and its source's digest.

The function is a mask_mod, or returns a family. A mask that was built from code is only as good as
the code is unchanged: a build records the SHA-256 of the module's own file, and a load compares it,
without importing anything. What that module imports itself is not seen; ``verify --deep
--run-functions`` evaluates all again.
"""

import hashlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from maskgen.errors import MaskSpecError
from maskgen.named_module import import_named

_SOURCE = "__maskgen_source__"
"""Where a module keeps the digest of the file that it was imported from."""


def load_function(
    path: str,
    field: str = "mask_mod",
    what: str = "a function (b, h, q_idx, kv_idx) -> bool",
) -> Callable[..., Any]:
    """Import ``package.module:function``.

    Args:
        path: Of a module that Python finds, for example in the working directory.
        field: What names it, for an error.
        what: What it must be, for an error.

    Raises:
        MaskSpecError: The module is missing or raises, or the name in it is missing or is not
            callable.
    """
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = import_named(module_name)
        imported_source(path)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:
        why = str(error) if isinstance(error, (ImportError, AttributeError)) else repr(error)
        raise MaskSpecError(field, path, f"must be importable ({why})") from error
    if not callable(found):
        raise MaskSpecError(field, path, f"must be {what}")
    function: Callable[..., Any] = found
    return function


def imported_source(path: str) -> str | None:
    """Return the SHA-256 of the file that the module in use came from, None where it has no file.

    Taken when ``load_function`` first meets the module: Python imports it once, so a file that is
    edited later is not what a function of this process does.
    """
    module_name = path.partition(":")[0]
    module = vars(sys.modules[module_name])
    if _SOURCE not in module:
        module[_SOURCE] = _digest_of(module.get("__file__"))
    digest: str | None = module[_SOURCE]
    return digest


def installed_source(path: str) -> str | None:
    """Return the SHA-256 of the file that an import would run now, None where there is none.

    Imports nothing, neither the module nor the packages around it.
    """
    top, *parts = path.partition(":")[0].split(".")
    spec = _spec_of(top, None)
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = _spec_of(f"{spec.name}.{part}", spec.submodule_search_locations)
    return None if spec is None else _digest_of(spec.origin)


def _spec_of(name: str, where: Sequence[str] | None) -> ModuleSpec | None:
    # The name may come from a cache that anyone made.
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    specs = (finder.find_spec(name, where) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _digest_of(file: str | None) -> str | None:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None
    except OSError:
        return None
