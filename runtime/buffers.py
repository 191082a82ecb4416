"""Static inputs: tensors whose addresses never change, and the host slots that fill them.

A captured graph reads the device tensors for ever; each step copies one host slot into them. Two
slots let a feeder fill the next while the last is still being copied.
"""

import queue
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """Shape and dtype of one static input."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class HostSlot:
    """One set of host tensors, pinned for a GPU, and the event after which it may be refilled."""

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.tensors = {
            name: torch.zeros(field.shape, dtype=field.dtype, pin_memory=pinned)
            for name, field in fields.items()
        }
        self._copied: torch.cuda.Event | None = None
        if pinned:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def mark_copied(self) -> None:
        """Remember, on the current stream, that the copies out of this slot were enqueued."""
        if self._copied is not None:
            self._copied.record()

    def wait(self) -> None:
        """Block until the slot may be overwritten."""
        if self._copied is not None:
            self._copied.synchronize()


class StaticInputs:
    """The inputs of one bucket on one device.

    Args:
        fields: Name -> shape and dtype.
        device: Where the static tensors live.
        num_slots: Host slots.
    """

    def __init__(
        self, fields: Mapping[str, Field], device: torch.device, *, num_slots: int = 2
    ) -> None:
        self.fields = dict(fields)
        self.tensors: dict[str, Tensor] = {
            name: torch.zeros(field.shape, dtype=field.dtype, device=device)
            for name, field in fields.items()
        }
        self.free: queue.Queue[HostSlot] = queue.Queue()
        for _ in range(num_slots):
            self.free.put(HostSlot(fields, device))

    def copy_from(self, slot: HostSlot) -> None:
        """Enqueue the copies of a filled slot and hand the slot back."""
        for name, tensor in self.tensors.items():
            tensor.copy_(slot.tensors[name], non_blocking=True)
        slot.mark_copied()
        self.free.put(slot)
