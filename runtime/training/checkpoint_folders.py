"""Which folders are checkpoints, and which a killed save left, by their names."""

import fnmatch
import re
from pathlib import Path

from cache.atomic import temp_prefix

NAME = re.compile(r"step-(\d{8,})")


def checkpoint_folders(root: Path) -> list[Path]:
    """Folders that are named as checkpoints are, the furthest step first.

    Raises:
        OSError: ``root`` is there and cannot be read.
    """
    names = [name for name in _names(root) if NAME.fullmatch(name)]
    return [root / name for name in sorted(names, key=_step, reverse=True)]


def leftovers(root: Path) -> list[Path]:
    """Staging folders of saves and removals that were killed.

    Raises:
        OSError: As ``checkpoint_folders``.
    """
    pattern = f"{temp_prefix(root / 'step-*')}*"
    return [root / name for name in sorted(_names(root)) if fnmatch.fnmatch(name, pattern)]


def _names(root: Path) -> list[str]:
    # Path.glob would find nothing, silently, in a folder that may not be listed.
    try:
        return [path.name for path in root.iterdir()]
    except FileNotFoundError:
        return []


def _step(name: str) -> int:
    return int(name.partition("-")[2])
