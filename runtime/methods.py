"""The kinds of training by name, as ``[run] method`` of a run file spells them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maskgen.checks import nearest
from maskgen.named_module import import_named
from runtime.config import Config, overridden, parse_config, read_file
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from runtime.training.method import Method

METHODS: Mapping[str, str] = {
    "dflash": "runtime.dflash.method:METHOD",
    "packed": "runtime.packed.method:METHOD",
}
"""Name -> ``module:attribute``, imported only when a run file names it."""
FIELD = "run.method"


def find_method(name: str) -> "Method[Any]":
    """Import a method.

    Args:
        name: A key of ``METHODS``, or ``module:attribute`` of a method anywhere.

    Raises:
        ConfigError: There is none of that name, it cannot be imported, or it lacks members.
    """
    module_name, separator, attribute = METHODS.get(name, name).partition(":")
    if not separator:
        rule = f"{nearest(name, METHODS)}; a method of your own is spelled module:attribute"
        raise ConfigError(FIELD, name, rule)
    try:
        module = import_named(module_name)
    except ImportError as error:
        raise ConfigError(FIELD, name, f"must be importable ({error})") from error
    method: Any = getattr(module, attribute, None)
    kind = getattr(method, "config_type", None)
    if not isinstance(kind, type) or not issubclass(kind, Config):
        rule = f"{attribute!r} must be a method in {module_name}, an object with config_type"
        raise ConfigError(FIELD, name, rule)
    # Torch is needed from here on, and was not before.
    from runtime.training.contract import check_method

    check_method(name, method)
    found: Method[Any] = method
    return found


def read_run(path: str | Path, overrides: Sequence[str] = ()) -> "tuple[Method[Any], Config]":
    """Read and check a run file of any method.

    Args:
        path: A TOML file.
        overrides: ``section.key=value`` each, applied in order after the file.

    Returns:
        The method that it names, and its settings, of the method's ``config_type``.

    Raises:
        ConfigError: As ``find_method``, and those of ``runtime.config``.
    """
    document = read_file(path)
    method = find_method(_method_name(overridden(document, overrides, None)))
    kind = method.config_type
    return method, parse_config(overridden(document, overrides, kind), kind)


def _method_name(document: Mapping[str, Any]) -> str:
    run = document.get("run")
    known = {"method": run["method"]} if isinstance(run, Mapping) and "method" in run else {}
    return parse_config({"run": known}, Config).run.method


def printed_config(
    path: str | Path, settings: Sequence[str], overrides: Sequence[str], *, as_json: bool
) -> str:
    """Every key of a run file with its value, its default and where the value comes from.

    Args:
        path: A TOML file.
        settings: ``--set``.
        overrides: These, and then those of other options.
        as_json: See ``runtime.settings_table``.

    Raises:
        ConfigError: As ``read_run``.
        MaskSpecError: ``[masks]`` is wrong.
    """
    from runtime.settings_table import entries_of, settings_json, settings_of, settings_text

    _, config = read_run(path, overrides)
    found = settings_of(config, read_file(path), overrides, len(settings))
    return (settings_json if as_json else settings_text)(found, entries_of(config))
