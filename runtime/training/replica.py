"""All of a run on one device: drafter, optimizer, masks and one static step a bucket."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from maskgen.entry import MaskEntry
from runtime.config import TrainConfig
from runtime.data.plan import Step
from runtime.dflash.drafter import Drafter, DrafterConfig
from runtime.dflash.objective import COUNTERS, DraftStep, FrozenTarget, Sums, draft_objective
from runtime.dflash.settings import DFlashTrain
from runtime.ranks.collectives import Group
from runtime.ranks.devices import Placement, enter_thread
from runtime.static.buffers import Field, InputSlot, input_slots
from runtime.static.compilation import compiled_objective
from runtime.static.exchange import GradientExchange
from runtime.static.graph import GraphPool, StaticStep
from runtime.static.optimizer import AdamWSettings, FlatAdamW
from runtime.training.entries import BucketMasks
from runtime.training.outcome import StepCounts, step_counts

MEMORY_HINT = "lower train.global_batch, the number of anchors, or the largest context in [masks]"


class Replica:
    """One device's share of a data-parallel run.

    Args:
        group: The worker's collectives; its index picks the device.
        placement: Devices, compute dtype, CPU threads.
        drafter_config: The network.
        target: Frozen parts, already on the device.
        entries: Context -> mask entry, of every bucket in use.
        train: Optimisation settings.
        num_slots: Input slots, see ``input_slots``.
    """

    # Tensors that were made in the caller's inference mode could not be trained or written to.
    @torch.inference_mode(mode=False)
    def __init__(
        self,
        *,
        group: Group,
        placement: Placement,
        drafter_config: DrafterConfig,
        target: FrozenTarget,
        entries: Mapping[int, MaskEntry],
        train: DFlashTrain,
        num_slots: int = 2,
    ) -> None:
        self.group = group
        self.device = placement.devices[group.index]
        self.threads = placement.threads
        self.train = train
        self.pool = GraphPool(self.device)
        self.sums = Sums(drafter_config.draft_block_size)
        size = len(self.sums) + len(COUNTERS)
        self.totals = torch.zeros(size, dtype=torch.float32, device=self.device)
        self.drafter = Drafter(drafter_config).to(self.device)
        self.optimizer = FlatAdamW(
            self.drafter,
            adamw_settings(train),
            device=self.device,
            dtype=placement.compute_dtype,
            num_sums=len(self.sums),
            stages=backward_stages(self.drafter),
        )
        with self.pool.activated():
            # Autograd accumulates a leaf's gradient on the stream that was current when its
            # accumulator was made, and hooks make it: that stream must be the captured one.
            self.exchange = GradientExchange(self.optimizer, group, reduce_dtype=train.reduce_dtype)
        objective = draft_objective
        if self.device.type == "cuda":
            objective = compiled_objective(self.drafter)
        batch = train.global_batch // group.size
        self.draft_steps = {
            context: DraftStep(
                drafter=self.drafter,
                target=target,
                masks=BucketMasks(entry, batch, self.device),
                exchange=self.exchange,
                totals=self.totals,
                gamma=train.gamma,
                objective=objective,
            )
            for context, entry in sorted(entries.items(), reverse=True)
        }
        fields = (step.inputs.fields for step in self.draft_steps.values())
        self.free = input_slots(fields, self.device, num_slots)
        self.steps = {
            context: StaticStep(
                step, self.pool, f"ctx{context} on {self.device}", memory_hint=MEMORY_HINT
            )
            for context, step in self.draft_steps.items()
        }

    def prepare(self, report: Callable[[str], None]) -> None:
        """Warm up and capture every bucket, largest first, on the calling thread.

        Nothing is reduced while warming up, since the other ranks do not step along; nothing is
        updated either, since the inputs are still without a supervised token.
        """
        enter_thread(self.device, self.threads)
        self.pool.wait_for_device()
        for step in self.steps.values():
            report(f"warming up {step.name}")
            step.warm_up()
        self.exchange.reducing = self.group.size > 1
        for step in self.steps.values():
            step.capture()
        with self.pool.activated():
            self.totals.zero_()
        self.pool.synchronize()

    def fields(self, context: int) -> Mapping[str, Field]:
        """What a slot of this bucket carries."""
        return self.draft_steps[context].inputs.fields

    def run(self, step: Step, slot: InputSlot) -> None:
        """Enqueue one step on the current stream."""
        self.draft_steps[step.context].inputs.take(slot)
        self.steps[step.context].run()

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
        """Start from given drafter weights with fresh moments."""
        with self.pool.activated():
            flat = {name: torch.zeros_like(view) for name, view in self.optimizer.state().items()}
            for name, weight in weights.items():
                flat[f"master.{name}"] = weight.detach().float()
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
        return dict(zip((*self.sums.names, *COUNTERS), values, strict=True))

    def lr(self) -> float:
        """Learning rate of the last step."""
        return float(self.optimizer.lr)

    @property
    def replays(self) -> int:
        """Graph replays so far."""
        return sum(step.replays for step in self.steps.values())

    def teardown(self) -> None:
        """Free the graphs."""
        self.pool.synchronize()
        for step in self.steps.values():
            step.teardown()


def backward_stages(drafter: Drafter) -> list[list[str]]:
    """Parameter names as the backward pass finishes them: last layer first, the fusion last."""
    layers = range(len(drafter.layers) - 1, -1, -1)
    prefixes = [("norm.",), *((f"layers.{index}.",) for index in layers), ("fc.", "hidden_norm.")]
    names = [name for name, _ in drafter.named_parameters()]
    return [[name for name in names if name.startswith(prefix)] for prefix in prefixes]


def adamw_settings(train: TrainConfig) -> AdamWSettings:
    """The optimizer's part of ``[train]``."""
    return AdamWSettings(
        lr=train.lr,
        min_lr_ratio=train.min_lr_ratio,
        warmup_steps=round(train.steps * train.warmup_ratio),
        total_steps=train.steps,
        betas=(train.beta1, train.beta2),
        weight_decay=train.weight_decay,
        clip=train.clip,
    )
