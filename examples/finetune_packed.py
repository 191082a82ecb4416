"""Fine-tune a Hugging Face causal LM on packed documents; on a GPU every step is one CUDA graph.

A row holds several documents and each sees itself only, so every batch has a mask of its own, of
the ``document`` family of a mask cache. docs/static_step.md has the rules of a static step. Run:

    python examples/finetune_packed.py --steps 30 [--model FOLDER] [--text FILE] [--device cuda:0]
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
from packed_attention import load_model
from packed_rows import Row, make_row, pack, read_documents
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

import cache
import maskgen
from maskgen.build import build
from maskgen.entry import MaskEntry, load_entry
from maskgen.spec import read_specs
from runtime.data.plan import StepPlan
from runtime.errors import NonFiniteError
from runtime.options import Command
from runtime.ranks.collectives import Group
from runtime.ranks.devices import Placement, enter_thread, place
from runtime.static.attention import dense_mask
from runtime.static.buffers import Field, StaticInputs, input_slots
from runtime.static.compilation import size_recompile_limits
from runtime.static.exchange import GradientExchange
from runtime.static.freeze import FreezeGuard
from runtime.static.graph import GraphPool, StaticStep
from runtime.static.optimizer import AdamWSettings, FlatAdamW

# --- 1. The masks: one cache entry a row length --------------------------------------------------


def load_masks(location: str, lengths: Sequence[int]) -> dict[int, MaskEntry]:
    """Row length -> entry. Parametric: the spans of each batch are computed inside the step."""
    entry = {"name": "packed", "family": "document", "kind": "parametric", "Q_LEN": list(lengths)}
    specs = read_specs({"masks": {"entry": [entry]}})
    store = cache.open_store(location, writable=True)
    build(specs, store)  # copies what the cache has already
    return {spec.Q_LEN: load_entry(store, spec.name) for spec in specs}


# --- 2. One row length: what its steps read, and the loss they share -----------------------------


class PackedBucket:
    """Static inputs, the mask in static tensors, and the loss over them.

    Args:
        model: Called on rows of this length.
        entry: Its mask.
        blanks: A batch of empty rows.
        device: Where all of it lies.
    """

    def __init__(
        self, model: Any, entry: MaskEntry, blanks: Sequence[Row], device: torch.device
    ) -> None:
        self.model, self.entry, self.blanks, self.device = model, entry, blanks, device
        B, L, K = len(blanks), entry.bucket.Q_LEN, entry.bucket.K
        fields = {name: Field((B, *t.shape), t.dtype) for name, t in blanks[0].items()}
        self.inputs = StaticInputs(fields, device)
        self.free = input_slots([fields], device)
        self.starts = torch.zeros((B, 1, K, L), dtype=torch.int32, device=device)
        self.ends = torch.zeros_like(self.starts)
        self.tables = maskgen.BlockTables.empty(
            B=B, H=1, Q_LEN=L, KV_LEN=L, BLOCK_SIZE=entry.bucket.BLOCK_SIZE, device=device
        )
        mask_mod = maskgen.spans_mask_mod(self.starts, self.ends)
        self.block_mask = maskgen.block_mask_over(self.tables, mask_mod)

    def fill(self, batch: Sequence[Row]) -> None:
        """Enqueue the copies of a batch, completed by blank rows, by way of an input slot."""
        slot = self.free.get()
        for name, tensor in slot.open(self.inputs.fields).items():
            for index, row in enumerate([*batch, *self.blanks[len(batch) :]]):
                tensor[index] = row[name]
        slot.send()
        self.inputs.take(slot)

    def mask(self) -> BlockMask | Tensor:
        """Write the batch's mask into the static tensors, and give the form that attends."""
        spec, doc_offsets = self.entry.spec, self.inputs.tensors["doc_offsets"]
        params = {"KV_LEN": spec.KV_LEN, "doc_offsets": doc_offsets, **spec.family_params}
        maskgen.spans_into(self.starts, self.ends, spec.family, **params)
        if self.device.type == "cpu":
            return dense_mask(self.starts, self.ends, spec.KV_LEN)
        maskgen.tables_into(self.tables, self.starts, self.ends)
        return self.block_mask

    def loss(self) -> Tensor:
        """Sum of the cross entropies of the batch, and how many predictions it has: ``[2]``."""
        input_ids, used = self.inputs.tensors["input_ids"], self.inputs.tensors["used"]
        mask = self.mask()
        # A causal row's one span starts where its document does, which tells all the rest.
        doc_start = self.starts[:, 0, 0]
        position = torch.arange(input_ids.shape[1], device=self.device)
        logits = self.model(
            input_ids, attention_mask=mask, position_ids=position - doc_start, use_cache=False
        ).logits
        same_document = doc_start[:, 1:] == doc_start[:, :-1]
        weights = (same_document & (position[1:] < used[:, None])).flatten().float()
        flat = logits[:, :-1].flatten(0, 1).float()
        losses = functional.cross_entropy(flat, input_ids[:, 1:].flatten(), reduction="none")
        return torch.stack(((losses * weights).sum(), weights.sum()))


# --- 3. The steps: functions without arguments over tensors that never move ----------------------


class FineTuner:
    """A model, its optimizer, and two static steps a row length, on one device.

    Args:
        model: Its parameters become views into the optimizer's flat tensors.
        masks: Row length -> entry.
        blanks: Row length -> a batch of empty rows.
        placement: Device, compute dtype and threads.
        settings: Of the optimizer.
    """

    def __init__(
        self,
        model: Any,
        masks: Mapping[int, MaskEntry],
        blanks: Mapping[int, Sequence[Row]],
        placement: Placement,
        settings: AdamWSettings,
    ) -> None:
        device, dtype = placement.devices[0], placement.compute_dtype
        enter_thread(device, placement.threads)
        size_recompile_limits(len(masks), 1)
        self.pool = GraphPool(device)
        # All that a graph reads is made on its stream, and held here: a graph keeps nothing alive.
        with self.pool.activated():
            self.optimizer = FlatAdamW(model, settings, device=device, dtype=dtype, num_sums=2)
            self.exchange = GradientExchange(self.optimizer, Group(None, 0, 1))
            self.totals = torch.zeros(3, device=device)  # loss, predictions, skipped steps
            self.begun = torch.zeros((), device=device)
            self.buckets = {
                length: PackedBucket(model, masks[length], blanks[length], device)
                for length in sorted(masks, reverse=True)
            }
        self.steps = {
            (kind, length): StaticStep(partial(step, bucket), self.pool, f"{kind} rows of {length}")
            for length, bucket in self.buckets.items()
            for kind, step in (("train", self._train), ("evaluate", self._evaluate))
        }

    def _train(self, bucket: PackedBucket) -> None:
        sums = bucket.loss()
        self.exchange.backward(sums[0])
        with torch.no_grad():
            self.optimizer.sums.copy_(sums)
            self.exchange.finish()  # gradients and sums of all ranks; here there is one
            skipped = self.optimizer.step(self.optimizer.sums[1], self.begun)
            self.totals.add_(torch.cat((self.optimizer.sums, skipped[None])))
            self.begun.add_(1)

    @torch.no_grad()
    def _evaluate(self, bucket: PackedBucket) -> None:
        self.totals[:2].add_(bucket.loss())

    def prepare(self, *, capture: bool = True) -> None:
        """Warm up and capture all steps, longest rows first; blank rows change no weight."""
        with self.pool.activated():
            for bucket in self.buckets.values():
                bucket.fill([])
        for step in self.steps.values():
            step.warm_up()
        for step in self.steps.values() if capture else ():
            step.capture()
        with self.pool.activated():
            self.totals.zero_()
            self.begun.zero_()

    def run(self, kind: str, batch: Sequence[Row]) -> None:
        """Enqueue one step on rows of one length; nothing here waits for the device."""
        length = len(batch[0]["input_ids"])
        with self.pool.activated():
            self.buckets[length].fill(batch)
            self.steps[kind, length].run()

    def read_totals(self) -> list[float]:
        """Read and clear loss, predictions and skipped steps; waits for the device."""
        with self.pool.activated():
            totals: list[float] = self.totals.tolist()
            self.totals.zero_()
        return totals

    def evaluate(self, rows: Sequence[Row]) -> float:
        """Mean loss of a prediction, in nats."""
        for length, bucket in self.buckets.items():
            fitting = [row for row in rows if len(row["input_ids"]) == length]
            size = len(bucket.blanks)
            for first in range(0, len(fitting), size):
                self.run("evaluate", fitting[first : first + size])
        loss, predictions, _ = self.read_totals()
        return loss / predictions

    def close(self) -> None:
        """Free the graphs."""
        self.pool.synchronize()
        for step in self.steps.values():
            step.teardown()


# --- 4. The run: load, warm up, capture, freeze, step --------------------------------------------


@click.command(cls=Command)
@click.option("--model", default="smollm2-135m", show_default=True, help="Name or folder.")
@click.option("--text", default="examples/prompts.jsonl", show_default=True, help="JSONL or text.")
@click.option("--lengths", default="128,256", show_default=True, help="Row lengths, in tokens.")
@click.option("--rows", default=2, show_default=True, help="Rows of a step.")
@click.option("--max-documents", default=32, show_default=True, help="Most documents of a row.")
@click.option("--steps", default=30, show_default=True)
@click.option("--lr", default=2e-5, show_default=True)
@click.option("--device", default="auto", show_default=True, help="cpu, cuda:N or auto.")
@click.option("--threads", default=0, show_default=True, help="CPU threads; 0 takes all cores.")
@click.option("--masks", default="build/packed.zarr", show_default=True, help="A cache of its own.")
def main(**given: Any) -> None:
    """Fine-tune a causal LM on packed documents and show the held-out loss before and after."""
    options = SimpleNamespace(**given)
    placement = place(options.device, threads=options.threads)
    lengths = sorted({int(length) for length in options.lengths.split(",")})
    target = load_model(options.model, placement.devices[0])
    longest = min(lengths[-1], target.max_positions or lengths[-1])
    documents = read_documents(options.text, target.tokenizer, longest)
    packed = pack(documents, lengths, options.max_documents)
    held_out, training = packed[::8], [row for index, row in enumerate(packed) if index % 8]
    settings = AdamWSettings(
        lr=options.lr,
        min_lr_ratio=0.1,
        warmup_steps=3,
        total_steps=options.steps,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        clip=1.0,
    )
    blanks = {L: [make_row([], L, options.max_documents)] * options.rows for L in lengths}
    masks = load_masks(options.masks, lengths)
    tuner = FineTuner(target.model, masks, blanks, placement, settings)
    print(f"warming up {len(tuner.steps)} steps; {len(training)} rows, {len(held_out)} held out")
    tuner.prepare()

    used = np.array([int(row["used"]) for row in training])
    sizes = np.array([len(row["input_ids"]) for row in training])
    plan = StepPlan(used, sizes, options.rows, seed=1)
    with FreezeGuard().active() as guard:
        before = tuner.evaluate(held_out)
        begin, tokens = time.perf_counter(), 0
        for number in range(options.steps):
            indices = [index for index in plan[number].samples if index >= 0]
            tuner.run("train", [training[index] for index in indices])
            tokens += int(used[indices].sum())
        _, _, skipped = tuner.read_totals()
        seconds = time.perf_counter() - begin
        after = tuner.evaluate(held_out)
    replays = sum(step.replays for (kind, _), step in tuner.steps.items() if kind == "train")
    tuner.close()
    if skipped:
        rule = f"{skipped:.0f} of {options.steps} steps were not finite and changed nothing"
        raise NonFiniteError(f"{rule}; lower --lr")
    print(f"\n{'held-out loss':<16}{'before':>10}{'after':>10}{'tokens/s':>12}")
    print(f"{'nats a token':<16}{before:>10.4f}{after:>10.4f}{tokens / seconds:>12,.0f}")
    print(guard.summary(options.steps, replays, eager=not replays))


if __name__ == "__main__":
    main()
