"""Planned buckets into a run file: the context lists of its mask entries, all else as it stands."""

import copy
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache.atomic import replace_file, staging_folder
from cache.causes import naming
from maskgen.errors import MaskSpecError
from maskgen.runfile import masks_section, read_document
from maskgen.spec import read_specs

FIELD = "--write"


@dataclass(frozen=True, kw_only=True)
class Rewriting:
    """A run file with other contexts, checked and not yet written."""

    path: Path
    text: bytes
    """Of the whole file."""
    entries: Mapping[str, Any]
    """Name of an entry -> the context that it had."""

    def write(self) -> None:
        """Replace the file in one atomic step.

        Raises:
            OSError: The disk refuses; the file is as it was.
        """
        # What a link points to is replaced, not the link.
        path = self.path.resolve()
        with naming(path):
            mode = path.stat().st_mode
            with staging_folder(path) as staging:
                replace_file(path, self.text, staging)
            path.chmod(mode)


def with_contexts(
    run_file: str | Path, contexts: Sequence[int], names: Sequence[str] = ()
) -> Rewriting:
    """Put contexts into the mask entries of a run file, and keep its comments and its form.

    Args:
        run_file: TOML.
        contexts: Of every entry.
        names: Which entries; where none is named, all that have a ``context``.

    Raises:
        MaskSpecError: The file cannot be read; no entry has that name or a ``context``; entries
            that are not named have different ones; or the masks would break a rule.
    """
    # Needed for this alone.
    import tomlkit

    path = Path(run_file)
    document = read_document(path)
    # Checks that [masks] can be read at all.
    read_specs(document)
    chosen = _chosen(path, masks_section(document)["entry"], names)
    written = tomlkit.parse(path.read_bytes().decode("utf-8"))
    expected = copy.deepcopy(document)
    entries: Any = written["masks"]["entry"]
    for index in chosen:
        entries[index]["context"] = list(contexts)
        expected["masks"]["entry"][index]["context"] = list(contexts)
    text = tomlkit.dumps(written)
    read_specs(expected)
    if tomllib.loads(text) != expected:
        rule = f"cannot be rewritten; write context = {list(contexts)} into it by hand"
        raise MaskSpecError(FIELD, str(path), rule)
    had = {
        str(table["name"]): table["context"]
        for table in (document["masks"]["entry"][index] for index in chosen)
    }
    return Rewriting(path=path, text=text.encode("utf-8"), entries=had)


def _chosen(path: Path, entries: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[int]:
    having = [index for index, table in enumerate(entries) if "context" in table]
    known = [str(entries[index]["name"]) for index in having]
    for name in names:
        if name not in known:
            rule = f"must name an entry with a context; {path} has {', '.join(known) or 'none'}"
            raise MaskSpecError("--entry", name, rule)
    if names:
        return [index for index in having if entries[index]["name"] in names]
    if not having:
        raise MaskSpecError(FIELD, str(path), "must have an entry with a context")
    if any(entries[index]["context"] != entries[having[0]]["context"] for index in having):
        rule = f"has entries of different contexts: name those to write with --entry, of {known}"
        raise MaskSpecError(FIELD, str(path), rule)
    return having
