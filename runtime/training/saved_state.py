"""One saved state: a folder ``step-00000500`` that is as it was saved, or is refused.

``state.safetensors`` has fp32 masters, moments and counters. ``meta.json`` is a sealed document of
format 3: step, fingerprint of the run, SHA-256 of the state file, ``published``, what an export
needs beside the weights, ``cycles``, those of the learning rate, and ``heldout`` where the run was
scored. Format 2 called ``published``
``drafter``, and format 1 had no seal; both are read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cache.atomic import write_synced
from runtime.errors import CheckpointError, NothingLearnedError
from runtime.files.digests import State, file_state, sha256_of_file
from runtime.files.sealed import DamagedError, read_sealed, seal
from runtime.files.tensors import save_tensors
from runtime.files.writing import sync_file
from runtime.training.cycles import Cycles

FORMAT = 3
PUBLISHED_SINCE = 3
"""The first format that says ``published``."""
STATE_FILE = "state.safetensors"
META_FILE = "meta.json"
MASTER = "master."
"""Prefix of the fp32 weights in a state."""
LATER = "start over with --fresh, or in another run.folder"

_whole: set[State] = set()
"""State files that this process has read whole, and nobody has touched since, by all but path."""


@dataclass(frozen=True)
class Checkpoint:
    """One saved state, found but not read."""

    folder: Path
    step: int
    """Finished steps."""
    fingerprint: str
    """What shaped the run; a resume needs the same."""
    sha256: str
    """Of the state file."""
    published: Mapping[str, Any]
    """What an export needs beside the weights, as the method had it."""
    heldout: Mapping[str, Any] = field(default_factory=dict)
    """How the run stood on held-out data, see ``runtime.training.watch``; empty where it was not
    scored."""
    cycles: Cycles = ()
    """Of the learning rate, see ``runtime.training.cycles``; empty in a checkpoint of before."""

    @property
    def merit(self) -> float | None:
        """The held-out score of these very weights, the more the better; None without one."""
        return self.heldout.get("merit")

    @property
    def run(self) -> dict[str, Any]:
        """What a product says of the run that it is from."""
        return {"fingerprint": self.fingerprint, "step": self.step}

    def check(self) -> None:
        """Read the state file to tell whether it is as it was saved.

        Raises:
            CheckpointError: The file is missing, cut or changed.
        """
        path = self.folder / STATE_FILE
        try:
            state = file_state(path)[1:]
            if state in _whole:
                return
            found = sha256_of_file(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if found != self.sha256:
            raise CheckpointError(
                f"{path} is damaged: its SHA-256 must be {self.sha256[:12]}..., found "
                f"{found[:12]}..."
            )
        _whole.add(state)

    def load(self) -> dict[str, Tensor]:
        """Read the state, checking its digest.

        Raises:
            CheckpointError: The file is missing, cut or changed.
        """
        self.check()
        path = self.folder / STATE_FILE
        try:
            state: dict[str, Tensor] = load_file(path)
            return state
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def learned_weights(self) -> dict[str, Tensor]:
        """Read the fp32 weights, by parameter name.

        Raises:
            CheckpointError: As ``load``.
            NothingLearnedError: They are those that the run began with.
        """
        state = self.load()
        if "step" in state and state["step"] == 0:
            raise NothingLearnedError(
                f"nothing was learned up to step {self.step} of {self.folder}: its weights are "
                "those that the run began with"
            )
        return master_weights(state)


def read_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint by its folder; the state is not read.

    Raises:
        CheckpointError: ``meta.json`` is missing or damaged.
        LaterFormatError: It is of a later release.
    """
    path = folder / META_FILE
    try:
        meta = read_sealed(path, FORMAT, LATER)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
    except DamagedError as error:
        raise CheckpointError(str(error)) from error
    named = "published" if meta.get("format", 1) >= PUBLISHED_SINCE else "drafter"
    try:
        found = Checkpoint(
            folder,
            int(meta["step"]),
            str(meta["fingerprint"]),
            str(meta["sha256"]),
            dict(meta[named]),
            dict(meta.get("heldout", {})),
            tuple(map(int, meta.get("cycles", ()))),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: it must say {error}") from error
    if folder.name != folder_name(found.step):
        raise CheckpointError(f"{folder} is damaged: it holds step {found.step}")
    return found


def write_checkpoint(
    folder: Path,
    state: Mapping[str, Tensor],
    *,
    step: int,
    fingerprint: str,
    published: Mapping[str, Any],
    heldout: Mapping[str, Any] = MappingProxyType({}),
    cycles: Cycles = (),
) -> None:
    """Write a state into a new folder; its files are on the disk when this returns.

    Raises:
        OSError: The disk refuses.
        SafetensorError: As ``OSError``.
    """
    folder.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_tensors(tensors, folder / STATE_FILE)
    sync_file(folder / STATE_FILE)
    sha256 = sha256_of_file(folder / STATE_FILE)
    _whole.add(file_state(folder / STATE_FILE)[1:])
    meta = {
        "format": FORMAT,
        "step": step,
        "fingerprint": fingerprint,
        "published": dict(published),
        "sha256": sha256,
        **({"heldout": dict(heldout)} if heldout else {}),
        **({"cycles": list(cycles)} if cycles else {}),
    }
    write_synced(folder / META_FILE, seal(meta))


def folder_name(step: int) -> str:
    """Of the checkpoint of a step."""
    return f"step-{step:08d}"


def master_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The fp32 weights of a state, by parameter name."""
    return {
        name.removeprefix(MASTER): tensor
        for name, tensor in state.items()
        if name.startswith(MASTER)
    }
