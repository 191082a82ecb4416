"""Device names into devices, with the settings that each worker thread needs."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.errors import ConfigError, DeviceUnavailableError


@dataclass(frozen=True)
class Placement:
    """The devices of a run, one worker thread each."""

    devices: tuple[torch.device, ...]
    compute_dtype: torch.dtype
    """bfloat16 on GPUs, float32 on CPUs, unless the run says otherwise."""
    threads: int
    """CPU threads of each worker."""

    @property
    def kind(self) -> str:
        """``cuda`` or ``cpu``."""
        return self.devices[0].type


def place(
    names: str,
    *,
    dtype: str = "auto",
    threads: int = 0,
    share: tuple[int, int] = (0, 1),
    field: str = "run.devices",
) -> Placement:
    """Turn ``auto`` or a comma-separated list of device names into a placement.

    Args:
        names: ``auto``, or names such as ``cuda:0,cuda:1`` or ``cpu,cpu``; all of one kind.
        dtype: ``float32``, ``bfloat16`` or ``auto``.
        threads: CPU threads of one worker; 0 shares the cores equally.
        share: This process's number and the count of processes on this host. A list is shared out
            evenly in that order; ``auto`` is one device for each.
        field: Named in errors.

    Raises:
        ConfigError: A name is malformed, kinds are mixed, a GPU is named twice, or the list cannot
            be shared out.
        DeviceUnavailableError: A GPU is asked for that is not there.
    """
    number, count = share
    if names == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        names = ",".join(f"{kind}:{index}" if kind == "cuda" else kind for index in range(count))
    devices = tuple(_parse(name.strip(), field) for name in names.split(","))
    kinds = {device.type for device in devices}
    if len(kinds) > 1:
        raise ConfigError(field, names, "must be all GPUs or all CPUs")
    if kinds == {"cuda"}:
        _check_gpus(devices, names, field)
    if len(devices) % count:
        raise ConfigError(
            field,
            names,
            f"must be a multiple of {count} devices, so that each of this host's {count} "
            "processes gets as many",
        )
    compute = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(
        dtype, torch.bfloat16 if kinds == {"cuda"} else torch.float32
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    each = len(devices) // count
    return Placement(
        devices[number * each : (number + 1) * each],
        compute,
        threads or max(1, (cores or 1) // len(devices)),
    )


def enter_thread(device: torch.device, threads: int) -> None:
    """Set what PyTorch keeps per thread: the CPU thread count and the current GPU.

    The thread count is an OpenMP value that a new thread takes from whoever set it last, so every
    worker and the warming thread set it alike.
    """
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def multiplies_in_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for it; a CPU without them is several times slower so."""
    if device.type == "cuda":
        return True
    # Releases of torch that do not say it answer no.
    found: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16"))


def _parse(name: str, field: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(field, name, "must be a device such as cpu or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(field, name, "must be cpu or cuda:N")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", 0)
    return device


def _check_gpus(devices: Sequence[torch.device], names: str, field: str) -> None:
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not available:
        raise DeviceUnavailableError(
            f"{field} = {names!r} asks for a GPU, and PyTorch {torch.__version__} sees none; "
            "name cpu, or install a CUDA build of PyTorch and a driver"
        )
    for device in devices:
        if device.index >= available:
            raise DeviceUnavailableError(
                f"{field} = {names!r} asks for {device}, and there are {available} GPUs "
                f"(cuda:0 to cuda:{available - 1})"
            )
    if len(set(devices)) < len(devices):
        raise ConfigError(field, names, "must name each GPU once")
