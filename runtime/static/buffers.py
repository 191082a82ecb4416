"""Static inputs: tensors whose addresses never change, and the slots that bring data to them.

host memory -> (copy stream) -> staging memory of the device -> (the step's stream) -> static inputs

A captured graph reads the static inputs for ever. Two slots let the next step's data travel while
the last is still computed with, even where both are of one bucket.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.static.channels import Channel


@dataclass(frozen=True)
class Field:
    """Shape and dtype of one static input."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    from_host: bool = True
    """Whether a feeder fills it; else something on a device writes it into the slot."""


class InputSlot:
    """One step's inputs on their way: pinned host memory and staging memory on the device.

    ``open`` -> fill ``host`` -> ``send`` -> (``write``) -> ``StaticInputs.take``, which hands the
    slot back. On the CPU both memories are one.

    Args:
        largest: Name -> the largest field of that name, over all buckets.
        device: Where the step runs.
        home: Where the slot goes when its data were taken.
    """

    def __init__(
        self, largest: Mapping[str, Field], device: torch.device, home: "Channel[InputSlot]"
    ) -> None:
        self.host: dict[str, Tensor] = {}
        """What ``open`` returned, to be filled."""
        self.staged: dict[str, Tensor] = {}
        """The same on the device, and the fields that do not come from the host."""
        on_gpu = device.type == "cuda"
        self._home = home
        self._host = {
            name: torch.zeros(
                math.prod(field.shape), dtype=field.dtype, device="cpu", pin_memory=on_gpu
            )
            for name, field in largest.items()
            if field.from_host
        }
        self._staged = {
            name: torch.zeros(math.prod(field.shape), dtype=field.dtype, device=device)
            for name, field in largest.items()
            if on_gpu or not field.from_host
        }
        if not on_gpu:
            self._staged |= self._host
        self._sent = _event() if on_gpu else None
        self._taken = _event() if on_gpu else None
        self._written: torch.cuda.Event | None = None

    def open(self, fields: Mapping[str, Field]) -> dict[str, Tensor]:
        """Shape the slot for a bucket, once its last data have left host memory.

        Args:
            fields: The bucket's.

        Returns:
            Host tensors to fill, by name.
        """
        for event in (self._sent, self._written):
            if event is not None:
                event.synchronize()
        self.host = {
            name: _shaped(self._host[name], field)
            for name, field in fields.items()
            if field.from_host
        }
        self.staged = {name: _shaped(self._staged[name], field) for name, field in fields.items()}
        return self.host

    def send(self) -> None:
        """Enqueue the copies to the device on the current stream."""
        if self._sent is None or self._taken is None:
            return
        self._taken.wait()
        for name, tensor in self.host.items():
            self.staged[name].copy_(tensor, non_blocking=True)
        self._sent.record()

    def write(self, name: str, tensor: Tensor) -> None:
        """Enqueue a copy from a tensor of any device, on the current stream of that device."""
        if self._taken is None:
            self.staged[name].copy_(tensor)
            return
        self._taken.wait()
        self.staged[name].copy_(tensor, non_blocking=True)
        # An event belongs to the device that records it first, and the next writer may be another.
        self._written = _event()
        self._written.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> None:
        """Let the current stream wait until all data are there."""
        for event in (self._sent, self._written):
            if event is not None:
                event.wait()

    def release(self) -> None:
        """Hand the slot back: the current stream will have taken the data."""
        if self._taken is not None:
            self._taken.record()
        self._home.put(self)


def input_slots(
    buckets: Iterable[Mapping[str, Field]], device: torch.device, num_slots: int = 2
) -> Channel[InputSlot]:
    """Slots that every bucket of a device fits into.

    Args:
        buckets: The fields of each.
        device: Where the steps run.
        num_slots: 2, and one more for each target that writes into a rank's slots.

    Returns:
        The free slots: ``get`` takes one, and ``InputSlot.release`` puts it back.
    """
    largest: dict[str, Field] = {}
    for fields in buckets:
        for name, field in fields.items():
            known = largest.get(name, field)
            largest[name] = max(known, field, key=lambda item: math.prod(item.shape))
    free: Channel[InputSlot] = Channel(depth=num_slots)
    for _ in range(num_slots):
        free.put(InputSlot(largest, device, free))
    return free


class StaticInputs:
    """The inputs of one bucket on one device.

    Args:
        fields: Name -> shape and dtype.
        device: Where the static tensors live.
    """

    def __init__(self, fields: Mapping[str, Field], device: torch.device) -> None:
        self.fields = dict(fields)
        self.tensors: dict[str, Tensor] = {
            name: torch.zeros(field.shape, dtype=field.dtype, device=device)
            for name, field in fields.items()
        }

    def take(self, slot: InputSlot) -> None:
        """Enqueue the copies out of a slot on the current stream, and hand the slot back."""
        slot.wait()
        for name, tensor in self.tensors.items():
            tensor.copy_(slot.staged[name], non_blocking=True)
        slot.release()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _shaped(flat: Tensor, field: Field) -> Tensor:
    return flat[: math.prod(field.shape)].view(field.shape)
