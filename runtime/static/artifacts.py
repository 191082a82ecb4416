"""Warm-up artifacts: what torch.compile made, saved beside the masks for the next start.

One file a toolchain, ``sidecars/<version>/warm-up_torch-2.13.0_triton-3.6.0_sm_90.artifacts``: a
line of JSON (format, toolchain, sizes, SHA-256), then torch's own bytes, of one run or of several
one after another. **It is code.** torch unpickles and runs what is in it, and the digest shows
damage, not forgery: load a file only from a machine that you trust.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import cache
from cache.atomic import staging_folder
from cache.errors import CacheError
from runtime.errors import ArtifactError
from runtime.files.writing import write_file
from runtime.static.torch_internals import compile_cache_counts

FORMAT = 2
MAX_HEADER_BYTES = 4096
SUFFIX = ".artifacts"
WITHOUT = "or leave --trust-artifacts out, and what is missing is compiled"


@dataclass(frozen=True)
class Toolchain:
    """What compiled code was made by and for; with another it is of no use."""

    torch: str
    """Version, such as ``2.11.0+cu130``."""
    triton: str
    """Version, or ``none``."""
    arch: str
    """``sm_90``, several joined by ``+``, or ``cpu``."""

    @property
    def file_name(self) -> str:
        """Where its artifacts stand in a version's sidecar folder."""
        return f"warm-up_torch-{self.torch}_triton-{self.triton}_{self.arch}{SUFFIX}"

    def __str__(self) -> str:
        return f"torch {self.torch}, triton {self.triton}, {self.arch}"


def toolchain_of(devices: Sequence[torch.device]) -> Toolchain:
    """The toolchain in use, on the given devices."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    arch = "+".join(sorted({_arch(device) for device in devices}))
    return Toolchain(torch.__version__, triton, arch)


@dataclass(frozen=True)
class Counted:
    """What was saved or loaded."""

    path: Path
    size: int
    """Bytes of torch's part."""
    artifacts: int

    def __str__(self) -> str:
        return f"{self.artifacts} warm-up artifacts, {self.size:,} bytes, {self.path}"


@dataclass(frozen=True)
class _Part:
    """What one run compiled or took from a cache."""

    payload: bytes
    """torch's own bytes."""
    keys: frozenset[tuple[str, str]]
    """Kind and key of each artifact; equal keys hold the same code."""


class ArtifactFile:
    """The warm-up artifacts of one cache version and one toolchain.

    Args:
        store: The cache of the masks.
        version: Its version's id.
        toolchain: The one in use.

    Raises:
        ArtifactError: The cache is behind a URL.
    """

    def __init__(self, store: cache.Store, version: str, toolchain: Toolchain) -> None:
        self.store = store
        self.toolchain = toolchain
        self._loaded: list[_Part] = []
        try:
            self.path = store.sidecar_dir(version) / toolchain.file_name
            self._found = store.find_sidecar(version, toolchain.file_name)
        except CacheError as error:
            raise ArtifactError(f"warm-up artifacts stand beside the cache: {error}") from error

    def check_writable(self) -> None:
        """Try to write where the folder is or will be, so that a long warm-up is not in vain.

        Raises:
            ArtifactError: The cache is a zip or cannot be written.
        """
        try:
            cache.open_store(self.store.location, writable=True)
            there = next(folder for folder in self.path.parents if folder.exists())
            with staging_folder(there / self.path.name):
                pass
        except (CacheError, OSError) as error:
            raise ArtifactError(
                f"warm-up artifacts cannot be saved beside {self.store.location}: {error}; use a "
                "cache in a folder that can be written, or leave --save-artifacts out"
            ) from error

    def save(self) -> Counted | None:
        """Write all that this process has compiled, or has taken from a compile cache.

        What was loaded stays, whether this run needed it or not; what was there and was not loaded
        is replaced. None when nothing was compiled, and nothing is written.

        Raises:
            ArtifactError: The disk refuses.
        """
        made = torch.compiler.save_cache_artifacts()
        if made is None:
            return None
        payload, info = made
        parts = _needed([*self._loaded, _Part(payload, _keys(info))])
        whole = b"".join(part.payload for part in parts)
        counted = _counted(self.path, parts)
        header = {
            "format": FORMAT,
            **asdict(self.toolchain),
            "artifacts": counted.artifacts,
            "bytes": len(whole),
            "parts": [len(part.payload) for part in parts],
            "sha256": hashlib.sha256(whole).hexdigest(),
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, json.dumps(header).encode() + b"\n" + whole)
        except OSError as error:
            raise ArtifactError(f"warm-up artifacts cannot be saved: {error}") from error
        return counted

    def load(self) -> Counted:
        """Put the artifacts into torch's compile caches; runs nothing yet.

        Only for a file from a machine that is trusted: what torch takes from its caches it
        unpickles and runs.

        Raises:
            ArtifactError: There is no such file, or it is damaged, or of another toolchain.
        """
        self._loaded = [self._taken(payload) for payload in self._payloads()]
        return _counted(self._found, self._loaded)

    def _taken(self, payload: bytes) -> _Part:
        try:
            info = torch.compiler.load_cache_artifacts(payload)
        except Exception as error:
            raise self._refused(f"torch {torch.__version__} cannot load it: {error}") from error
        if info is None:
            raise self._refused(f"torch {torch.__version__} cannot read what is in it")
        return _Part(payload, _keys(info))

    def _payloads(self) -> list[bytes]:
        try:
            with self._found.open("rb") as file:
                header = self._header(file.readline(MAX_HEADER_BYTES))
                whole = file.read()
        except FileNotFoundError as error:
            others = sorted(path.name for path in self._found.parent.glob(f"*{SUFFIX}"))
            raise ArtifactError(
                f"there are no warm-up artifacts for {self.toolchain} in {self._found.parent} "
                f"(found: {', '.join(others) or 'none'}); train once with --save-artifacts on such "
                f"a machine, {WITHOUT}"
            ) from error
        except OSError as error:
            raise self._refused(f"it cannot be read ({error})") from error
        found = (len(whole), hashlib.sha256(whole).hexdigest())
        if found != (header["bytes"], header["sha256"]):
            raise self._refused(
                f"it is damaged: it must hold {header['bytes']} bytes of SHA-256 "
                f"{str(header['sha256'])[:12]}..., found {found[0]} of {found[1][:12]}..."
            )
        ends = list(itertools.accumulate(header["parts"], initial=0))
        if ends[-1] != len(whole) or ends != sorted(ends):
            raise self._refused(f"it is damaged: its parts must make {len(whole)} bytes")
        return [whole[start:end] for start, end in itertools.pairwise(ends)]

    def _header(self, line: bytes) -> dict[str, Any]:
        damaged = "it is damaged: its first line must be a JSON header"
        try:
            header = json.loads(line)
            version = header["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._refused(damaged) from error
        if version != FORMAT:
            raise self._refused(f"its format is {version}, and this program reads {FORMAT}")
        try:
            made_by = Toolchain(header["torch"], header["triton"], header["arch"])
            sized = {name: header[name] for name in ("bytes", "parts", "sha256")}
            sized["parts"] = [int(size) for size in sized["parts"]]
        except (ValueError, KeyError, TypeError) as error:
            raise self._refused(damaged) from error
        if made_by != self.toolchain:
            raise self._refused(f"it was made by {made_by}, and this is {self.toolchain}")
        return sized

    def _refused(self, why: str) -> ArtifactError:
        return ArtifactError(
            f"the warm-up artifacts {self._found} are refused: {why}; train with "
            f"--save-artifacts to replace them, {WITHOUT}"
        )


class WarmUp:
    """What a command does with artifacts: check and load them now, save them after the warm-up.

    Args:
        store: The cache of the masks.
        version: Its version's id.
        devices: All that code is compiled for.
        save: Write artifacts when the warm-up is done.
        trust: Load them; they are code.
        report: Takes a line for people.

    Raises:
        ArtifactError: They cannot be saved there, or are refused.
    """

    def __init__(
        self,
        store: cache.Store,
        version: str,
        devices: Sequence[torch.device],
        *,
        save: bool,
        trust: bool,
        report: Callable[[str], None],
    ) -> None:
        self.file = ArtifactFile(store, version, toolchain_of(devices)) if save or trust else None
        self.save = save
        self.trust = trust
        self.report = report
        if self.file is not None and save:
            self.file.check_writable()
        if self.file is not None and trust:
            report(f"loaded {self.file.load()}")

    def finish(self) -> None:
        """Tell what was reused, and save.

        Raises:
            ArtifactError: The disk refuses.
        """
        if self.trust:
            hits, misses = compile_cache_counts()
            self.report(f"compiled code: {hits} graphs reused, {misses} compiled anew")
        if self.file is not None and self.save:
            counted = self.file.save()
            what = "no warm-up artifacts: nothing was compiled" if counted is None else counted
            self.report(f"saved {what}")


def _arch(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _keys(info: Any) -> frozenset[tuple[str, str]]:
    return frozenset((kind, key) for kind, keys in info.artifacts.items() for key in keys)


def _counted(path: Path, parts: Sequence[_Part]) -> Counted:
    keys = frozenset[tuple[str, str]]().union(*(part.keys for part in parts))
    return Counted(path, sum(len(part.payload) for part in parts), len(keys))


def _needed(parts: Sequence[_Part]) -> list[_Part]:
    """Leave out, from the last on, what the others hold."""
    needed = list(parts)
    for part in reversed(parts):
        others = [other for other in needed if other is not part]
        if part.keys <= frozenset[tuple[str, str]]().union(*(other.keys for other in others)):
            needed = others
    return needed
