"""The modules that a run file names: the user's own code, and where in it something was raised."""

import importlib
import sys
import traceback
from pathlib import Path
from types import FrameType, ModuleType

INSTALLED = ("", "site-packages", "dist-packages")
"""Folders whose modules stand beside strangers."""

_packages: set[str] = set()
_folders: set[Path] = set()


def import_named(name: str) -> ModuleType:
    """Import a module that a run file names.

    Raises:
        ImportError: It cannot be imported; the message says why, whatever it raised.
    """
    package = name.partition(".")[0]
    if package not in sys.stdlib_module_names:
        _packages.add(package)
    try:
        module = importlib.import_module(name)
    # A module that ends the program has not been imported either.
    except (Exception, SystemExit) as error:
        raise ImportError(_why(error)) from error
    folder = Path(getattr(module, "__file__", None) or "").parent
    if package in _packages and folder.name not in INSTALLED:
        _folders.add(folder)
    return module


def is_of_named(frame: FrameType) -> bool:
    """Whether code is of a package that a run file names, or of a file beside such a module."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in _packages or Path(frame.f_code.co_filename).parent in _folders


def _why(error: BaseException) -> str:
    if isinstance(error, ImportError):
        return str(error)
    frames = traceback.walk_tb(error.__traceback__)
    places = [f", {f.f_code.co_filename}:{line}" for f, line in frames if is_of_named(f)]
    return repr(error) + "".join(places[-1:])
