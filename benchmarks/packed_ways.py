"""The ways to train on packed documents that ``bench_packed`` compares."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from benchmarks.packed_load import PackedLoad
from runtime.config import TrainConfig
from runtime.data.plan import NO_ROW, Step
from runtime.packed.packing import PackedRows
from runtime.packed.trainee import PackedTrainee
from runtime.ranks.collectives import make_groups
from runtime.ranks.devices import Placement
from runtime.static.buffers import InputSlot
from runtime.static.compilation import size_recompile_limits
from runtime.training.replica import Replica

IGNORED = -100
"""A label that is not learned, as ``cross_entropy`` spells it."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What one way did."""

    losses: list[float]
    """Mean loss of each step of the first pass."""
    seconds: list[float]
    """Of each step of the second pass."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step's documents as transformers takes them, on the device."""

    inputs: dict[str, Tensor]
    labels: Tensor
    """int64, as long as ``input_ids``: the token that is predicted, or ``IGNORED``."""
    count: int
    """Labels that are learned."""


class Clock:
    """Marks between steps; on a GPU events of the current stream, so that no mark waits."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Here one step ends and the next begins."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each two marks."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.on_gpu:
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        return [end - begin for begin, end in pairs]


def run_packed(load: PackedLoad, placement: Placement, steps: Sequence[Step]) -> Ran:
    """Train through a ``Replica``, as a run's worker does."""
    device = placement.devices[0]
    size_recompile_limits(len(load.inputs.entries), 1)
    (group,) = make_groups(placement)
    trainee = load.trainee()
    replica = Replica(
        group=group,
        placement=placement,
        trainee=trainee,
        entries=load.inputs.entries,
        train=load.config.train,
        num_slots=len(steps),
    )
    replica.prepare(lambda line: None)
    replica.load_weights(trainee.first_weights())
    losses, clock = [], Clock(device)
    with replica.pool.activated():
        for step, slot in zip(steps, _filled(replica, trainee, steps), strict=True):
            replica.run(step, slot)
            totals = replica.read_totals()
            losses.append(totals["loss"] / totals["weight"])
        slots = _filled(replica, trainee, steps)
        replica.pool.synchronize()
        clock.mark()
        for step, slot in zip(steps, slots, strict=True):
            replica.run(step, slot)
            clock.mark()
        seconds = clock.seconds()
    replica.teardown()
    return Ran(losses=losses, seconds=seconds)


def _filled(replica: Replica, trainee: PackedTrainee, steps: Sequence[Step]) -> list[InputSlot]:
    slots = []
    for step in steps:
        slot = replica.free.get()
        tensors = slot.open(replica.fields(step.bucket))
        for tensor in tensors.values():
            tensor.zero_()
        for row, number in enumerate(step.rows):
            if number != NO_ROW:
                trainee.fill(tensors, row, number, epoch=step.epoch)
        slot.send()
        slots.append(slot)
    return slots


def run_transformers(
    load: PackedLoad, placement: Placement, batches: Sequence[Batch], *, compiled: bool
) -> Ran:
    """Train as a plain loop does: forward, backward, clip, step.

    Args:
        load: The model and the optimizer's settings.
        placement: One device; bfloat16 is autocast.
        batches: One a step.
        compiled: Whether each layer is compiled.
    """
    device = placement.devices[0]
    model = load.size.model().to(device)
    model.set_attn_implementation("sdpa")
    for layer in model.model.layers if compiled else ():
        layer.compile(dynamic=False)
    optimizer = _adamw(model, load.config.train)
    clip = load.config.train.clip
    autocast = torch.autocast(
        device.type, torch.bfloat16, enabled=placement.compute_dtype == torch.bfloat16
    )

    def run(batch: Batch) -> Tensor:
        with autocast:
            logits = model(**batch.inputs, use_cache=False).logits
        flat = logits.flatten(0, 1).float()
        loss = functional.cross_entropy(
            flat, batch.labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss = loss / batch.count
        loss.backward()
        clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [run(batch) for batch in batches]
    clock = Clock(device)
    if clock.on_gpu:
        torch.cuda.synchronize()
    clock.mark()
    for batch in batches:
        run(batch)
        clock.mark()
    return Ran(losses=torch.stack(losses).tolist(), seconds=clock.seconds())


def _adamw(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(),
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        weight_decay=train.weight_decay,
        fused=True,
    )


def row_batches(load: PackedLoad, steps: Sequence[Step], device: torch.device) -> list[Batch]:
    """The rows themselves, with positions that begin at 0 in each document."""
    return [
        _batch([_row_of(load, number, step.bucket) for number in step.rows], device)
        for step in steps
    ]


def padded_batches(load: PackedLoad, steps: Sequence[Step], device: torch.device) -> list[Batch]:
    """Each document of the rows a row of its own, padded to the longest."""
    batches = []
    for step in steps:
        documents = [list(tokens) for number in step.rows for tokens in _texts(load, number)]
        longest = max(map(len, documents))
        rows = [_row([tokens], longest) for tokens in documents]
        batch = _batch(rows, device)
        del batch.inputs["position_ids"]
        lengths = torch.tensor([len(tokens) for tokens in documents])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        batch.inputs["attention_mask"] = mask.to(device)
        batches.append(batch)
    return batches


def _texts(load: PackedLoad, number: int) -> Iterator[list[int]]:
    assert isinstance(load.inputs.rows, PackedRows)
    for document in load.inputs.rows.documents[number] if number != NO_ROW else ():
        yield load.inputs.dataset.sample(document).input_ids.tolist()


def _row_of(load: PackedLoad, number: int, length: int) -> list[list[int]]:
    return _row(list(_texts(load, number)), length)


def _row(documents: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Tokens, positions and labels of documents end to end; what is left is one more."""
    tail = length - sum(map(len, documents))
    ids = [token for tokens in documents for token in tokens] + [0] * tail
    sizes = [*map(len, documents), tail]
    positions = [position for size in sizes for position in range(size)]
    labels = [label for tokens in documents for label in (*tokens[1:], IGNORED)]
    return [ids, positions, labels + [IGNORED] * tail]


def _batch(rows: Sequence[list[list[int]]], device: torch.device) -> Batch:
    ids, positions, labels = torch.tensor(rows).unbind(1)
    return Batch(
        inputs={"input_ids": ids.to(device), "position_ids": positions.to(device)},
        labels=labels.to(device),
        count=int((labels != IGNORED).sum()),
    )


WAYS: dict[str, Callable[[PackedLoad, Placement, Sequence[Step]], Ran]] = {
    "packed": run_packed,
    "hf rows": lambda load, placement, steps: run_transformers(
        load, placement, row_batches(load, steps, placement.devices[0]), compiled=False
    ),
    "hf rows compiled": lambda load, placement, steps: run_transformers(
        load, placement, row_batches(load, steps, placement.devices[0]), compiled=True
    ),
    "hf padded": lambda load, placement, steps: run_transformers(
        load, placement, padded_batches(load, steps, placement.devices[0]), compiled=False
    ),
}
"""Way -> trains on the documents of the steps."""
