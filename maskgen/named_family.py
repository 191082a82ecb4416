"""The name of a family -> the family: one of maskgen's, or ``module:function`` of the user's own.

A run file is the user's, so what it names is imported. What a cache names may come from anyone: it
is known only where a run file of this process has named it before.
"""

from collections.abc import Callable
from typing import Any

from maskgen.errors import MaskSpecError
from maskgen.families import families
from maskgen.families.family import Family
from maskgen.named_function import load_function

_loaded: dict[str, Family] = {}
"""The user's families by ``module:function``, as this process imported them."""


def is_path(name: str) -> bool:
    """Whether a name is ``module:function`` rather than one of maskgen's own."""
    return ":" in name


def load_family(name: str) -> Family:
    """Return a family that a run file names; one of the user's own is imported and made.

    Args:
        name: A name in ``maskgen.families``, or ``package.module:function`` of a function without
            arguments that returns a ``Family``.

    Raises:
        MaskSpecError: There is none of that name, the module or the function is missing or
            raises, or what it returns is no Family.
    """
    if not is_path(name):
        return families[name]
    if name not in _loaded:
        _loaded[name] = _made(
            name, load_function(name, "family", "a function that returns a Family")
        )
    return _loaded[name]


def _made(name: str, function: Callable[..., Any]) -> Family:
    try:
        made = function()
    except (Exception, SystemExit) as error:
        rule = f"must return a Family, but raised {type(error).__name__}: {error}"
        raise MaskSpecError("family", name, rule) from error
    if not isinstance(made, Family):
        rule = f"must return a maskgen.families.Family, but returned {type(made).__name__}"
        raise MaskSpecError("family", name, rule)
    return made


def find_family(name: str) -> Family | None:
    """Return a family that a cache names; None where it is not known here. Imports nothing."""
    return _loaded.get(name) if is_path(name) else families.get(name)


def get_family(name: str) -> Family:
    """Return a family that a cache names. Imports nothing.

    Raises:
        MaskSpecError: It is not known here.
    """
    if is_path(name) and name not in _loaded:
        rule = "is code that only a run file may name here: give the command its --config"
        raise MaskSpecError("family", name, rule)
    return _loaded[name] if is_path(name) else families[name]
