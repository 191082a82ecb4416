"""The package ``cache``, whose name others use too: a file of the user's may hide it."""

from importlib.util import find_spec
from pathlib import Path


def hidden_cache() -> str | None:
    """Return what to do where an import finds another ``cache`` than ours; None where it does not.

    ``python -m`` looks into the current folder first. Nothing is imported.
    """
    ours = Path(__file__).resolve().parents[1] / "cache" / "__init__.py"
    spec = find_spec("cache")
    found = spec.origin if spec is not None else None
    if found is not None and Path(found).resolve() == ours:
        return None
    return (
        f"{found} hides this program's package of that name: run the command in another folder, or "
        "as python -P -m ..., which leaves the current folder out"
    )
