"""All of a run on one device: module, optimizer, and one static step a bucket."""

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from maskgen.entry import MaskEntry
from runtime.config import TrainConfig
from runtime.data.plan import Step
from runtime.ranks.collectives import Group
from runtime.ranks.devices import Placement, enter_thread
from runtime.static.buffers import Field, InputSlot, input_slots
from runtime.static.exchange import GradientExchange
from runtime.static.graph import GraphPool
from runtime.static.optimizer import AdamWSettings, Cycle, FlatAdamW
from runtime.static.step import COUNTERS, TrainStep
from runtime.static.step_set import StepSet
from runtime.training.cycles import Cycles
from runtime.training.heldout import HeldOut
from runtime.training.method import Trainee
from runtime.training.outcome import StepCounts, step_counts
from runtime.training.saved_state import MASTER
from runtime.training.scoring import Scoring


class Replica:
    """One device's share of a data-parallel run.

    Args:
        group: The worker's collectives; its index picks the device.
        placement: Devices, compute dtype, CPU threads.
        trainee: What is trained.
        entries: Bucket length -> mask entry, of every bucket in use.
        train: Optimisation settings.
        num_slots: Input slots, see ``input_slots``.
        heldout: What this device scores meanwhile, if anything.
        cycles: Of the learning rate; one up to ``train.steps`` if left out.
    """

    # Tensors that were made in the caller's inference mode could not be trained or written to.
    @torch.inference_mode(mode=False)
    def __init__(
        self,
        *,
        group: Group,
        placement: Placement,
        trainee: Trainee,
        entries: Mapping[int, MaskEntry],
        train: TrainConfig,
        num_slots: int = 2,
        heldout: HeldOut | None = None,
        cycles: Cycles = (),
    ) -> None:
        self.group = group
        self.device = placement.devices[group.index]
        self.threads = placement.threads
        self.sums = trainee.sums
        self.pool = GraphPool(self.device)
        size = len(self.sums) + len(COUNTERS)
        self.totals = torch.zeros(size, dtype=torch.float32, device=self.device)
        self.module = trainee.module(self.device)
        self.optimizer = FlatAdamW(
            self.module,
            adamw_settings(train, cycles),
            device=self.device,
            dtype=placement.compute_dtype,
            num_sums=len(self.sums),
            stages=trainee.stages(self.module),
        )
        with self.pool.activated():
            # Autograd accumulates a leaf's gradient on the stream that was current when its
            # accumulator was made, and hooks make it: that stream must be the captured one.
            self.exchange = GradientExchange(self.optimizer, group, reduce_dtype=train.reduce_dtype)
        batch = rows_of_rank(train, group.size)
        self.accumulates = train.accumulate > 1
        self.train_steps = {
            length: TrainStep(
                trainee.objective(self.module, length, entry, batch, group.index),
                self.exchange,
                self.totals,
                adds=self.accumulates,
            )
            for length, entry in sorted(entries.items(), reverse=True)
        }
        fields = (step.inputs.fields for step in self.train_steps.values())
        self.free = input_slots(fields, self.device, num_slots)
        steps = {
            length: (f"{entries[length].name} on {self.device}", step)
            for length, step in self.train_steps.items()
        }
        self.steps = StepSet(steps, self.pool, memory_hint=trainee.memory_hint)
        parts = {
            length: (f"{entries[length].name} on {self.device}, to be added up", step.add)
            for length, step in self.train_steps.items()
            if self.accumulates
        }
        self.parts = StepSet(parts, self.pool, memory_hint=trainee.memory_hint)
        """The micro-batches before a step's last; none where a step has one."""
        self.scoring: Scoring | None = None
        if heldout is not None:
            self.scoring = Scoring(
                heldout,
                self.module,
                self.pool,
                batch=batch,
                index=group.index,
                memory_hint=trainee.memory_hint,
            )

    def prepare(self, report: Callable[[str], None]) -> None:
        """Warm up and capture every bucket, largest first, on the calling thread.

        Nothing is reduced while warming up, since the other ranks do not step along; nothing is
        updated either, since the inputs are still without a supervised token.
        """
        enter_thread(self.device, self.threads)
        self.pool.wait_for_device()
        self.steps.warm_up(report)
        self.parts.warm_up(report)
        if self.scoring is not None:
            self.scoring.warm_up(report)
        self.exchange.reducing = self.group.size > 1
        self.steps.capture()
        self.parts.capture()
        if self.scoring is not None:
            self.scoring.capture()
        with self.pool.activated():
            self.totals.zero_()
            self.optimizer.reduced.zero_()
        self.pool.synchronize()

    def fields(self, length: int) -> Mapping[str, Field]:
        """What a slot of this bucket carries."""
        return self.train_steps[length].inputs.fields

    def run(self, step: Step, slot: InputSlot) -> None:
        """Enqueue one step, or one micro-batch of it, on the current stream."""
        self.train_steps[step.bucket].inputs.take(slot)
        (self.steps if step.last else self.parts).run(step.bucket)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take a whole training state: ``state()`` of this or another replica."""
        with self.pool.activated():
            self.optimizer.load_state(dict(state))
            self.totals.zero_()
            counters = self.totals[len(self.sums) :]
            counters.copy_(state["counters"])
            # A run that was ended by steps in a row goes on counting them: a good one ends the row.
            counters[COUNTERS.index("worst_skips_in_a_row")] = 0
        self.pool.synchronize()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Start from given weights with fresh moments."""
        with self.pool.activated():
            flat = {name: torch.zeros_like(view) for name, view in self.optimizer.state().items()}
            for name, weight in weights.items():
                flat[f"{MASTER}{name}"] = weight.detach().float()
            counters = torch.zeros(len(COUNTERS), dtype=torch.float32, device="cpu")
            self.load({**flat, "counters": counters})

    def state(self) -> dict[str, Tensor]:
        """Master weights, moments and counters on the CPU; waits for the stream."""
        self.pool.synchronize()
        state = self.optimizer.state()
        state["counters"] = self.totals[len(self.sums) :]
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}

    def counts(self) -> StepCounts:
        """What became of the steps so far; waits for the stream."""
        with self.pool.activated():
            counters = self.totals[len(self.sums) :]
            return step_counts({"step": self.optimizer.steps, "counters": counters})

    def read_totals(self) -> dict[str, float]:
        """Read and clear the sums since the last read, and the counters; waits for the stream."""
        with self.pool.activated():
            values = self.totals.tolist()
            self.totals[: len(self.sums)].zero_()
        return dict(zip((*self.sums, *COUNTERS), values, strict=True))

    def lr(self) -> float:
        """Learning rate of the last step."""
        return float(self.optimizer.lr)

    @property
    def replays(self) -> int:
        """Graph replays so far."""
        return self.steps.replays + self.parts.replays

    def teardown(self) -> None:
        """Free the graphs."""
        self.steps.teardown()
        self.parts.teardown()
        if self.scoring is not None:
            self.scoring.teardown()


def rows_of_rank(train: TrainConfig, ranks: int) -> int:
    """Rows of a micro-batch on each of so many ranks."""
    return train.global_batch // (ranks * train.accumulate)


def adamw_settings(train: TrainConfig, cycles: Cycles = ()) -> AdamWSettings:
    """The optimizer's part of ``[train]``, over one cycle of ``train.steps`` if none are named."""
    first, *ends = cycles or (train.steps,)
    later = tuple(
        Cycle(
            start=start,
            warmup_steps=round((end - start) * train.warmup_ratio),
            total_steps=end - start,
        )
        for start, end in pairwise((first, *ends))
    )
    return AdamWSettings(
        lr=train.lr,
        min_lr_ratio=train.min_lr_ratio,
        warmup_steps=round(first * train.warmup_ratio),
        total_steps=first,
        betas=(train.beta1, train.beta2),
        weight_decay=train.weight_decay,
        clip=train.clip,
        later=later,
    )
