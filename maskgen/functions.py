"""``package.module:function`` of a run file -> the mask_mod that it names."""

import importlib
from collections.abc import Callable
from typing import Any

from maskgen.errors import MaskSpecError


def load_function(path: str) -> Callable[..., Any]:
    """Import ``package.module:function``, a FlexAttention mask_mod.

    Raises:
        MaskSpecError: The module or the name in it is missing, or is not callable.
    """
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise MaskSpecError("mask_mod", path, f"must be importable ({error})") from error
    if not callable(found):
        raise MaskSpecError("mask_mod", path, "must be a function (b, h, q_idx, kv_idx) -> bool")
    function: Callable[..., Any] = found
    return function
