"""The installed commands, and whether a file of the user's hides one of our packages.

Others use the names ``cache``, ``maskgen`` and ``runtime``, too, and ``python -m`` looks into the
current folder first; the name of this module is the distribution's alone. The installed commands
look into the current folder last, where they still find what a run file names as
``module:function``.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("cache", "maskgen", "runtime")


def hidden(package: str) -> str | None:
    """Return what to do where an import finds another package than ours; None where it does not.

    Imports nothing.
    """
    ours = Path(__file__).resolve().parent / package / "__init__.py"
    spec = find_spec(package)
    found = spec.origin if spec is not None else None
    if found is None or Path(found).resolve() == ours:
        return None
    return (
        f"{found} hides this program's package of that name: rename it, run the command in another "
        "folder, or as python -P -m ..., which leaves the current folder out, but not PYTHONPATH"
    )


def main() -> None:
    """Run the command that this process was started as: ``maskgen``, or ``runtime-train``."""
    if not sys.flags.safe_path:
        sys.path.append("")
    for package in PACKAGES:
        if (sentence := hidden(package)) is not None:
            sys.exit(f"Error: {sentence}")
    name = Path(sys.argv[0]).stem
    import_module("maskgen.cli" if name == "maskgen" else name.replace("-", ".")).main()
