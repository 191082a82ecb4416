"""Writing a safetensors file, for whoever may read the files around it."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a new file with the permissions that any new file gets.

    safetensors 0.8 makes files that their owner alone may read: a server that runs as another
    user could not load a drafter, nor another user's run its data.

    Args:
        tensors: By name, each contiguous.
        path: Nothing stands there yet.
        metadata: Strings of the header.

    Raises:
        OSError: The disk refuses.
        SafetensorError: As ``OSError``.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    path.chmod(mode)
