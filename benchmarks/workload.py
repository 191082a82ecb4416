"""A drafter's training load of stated size, with random weights, text and features.

The masks are real entries, built into a cache on the spot; everything that a step reads lies on the
device, so that all variants of a benchmark are fed alike.
"""

import contextlib
import io
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import cache
from maskgen.build import build
from maskgen.entry import MaskEntry, load_entry
from maskgen.spec import read_specs
from runtime.dflash.network.drafter import Drafter, DrafterConfig, backward_stages
from runtime.dflash.settings import DFlashTrain
from runtime.dflash.step.draft_bucket import DraftBucket
from runtime.dflash.step.draft_loss import loss_on_device
from runtime.dflash.step.objective import DraftObjective
from runtime.dflash.step.recipe import Recipe
from runtime.dflash.step.sums import sum_names
from runtime.ranks.collectives import Group
from runtime.ranks.devices import Placement
from runtime.target.frozen import FrozenTarget
from runtime.training.replica import Replica


@dataclass(frozen=True, kw_only=True)
class Size:
    """One model and batch size."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_features: int
    anchors: int
    draft_block_size: int
    contexts: tuple[int, ...]

    def drafter_config(self) -> DrafterConfig:
        """The drafter of this size."""
        return DrafterConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            vocab_size=self.vocab_size,
            draft_block_size=self.draft_block_size,
            mask_token_id=self.vocab_size - 1,
            target_layer_ids=tuple(range(1, 1 + self.num_features)),
            num_target_layers=self.num_features + 4,
            max_position_embeddings=1 << 16,
        )


LARGE = Size(
    name="qwen3-8b drafter",
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=5,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    num_features=5,
    anchors=512,
    draft_block_size=16,
    contexts=(1024, 1536, 2048),
)
SMALL = Size(
    name="small drafter",
    hidden_size=576,
    intermediate_size=1536,
    num_layers=4,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    num_features=5,
    anchors=256,
    draft_block_size=8,
    contexts=(256, 384, 512),
)
TINY = Size(
    name="tiny drafter",
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=512,
    num_features=2,
    anchors=16,
    draft_block_size=8,
    contexts=(128, 256),
)
DECAY = Recipe(gamma=4.0)
SIZES = {"large": LARGE, "small": SMALL, "tiny": TINY}


def build_entries(size: Size, kind: str = "layouts", *, draws: int = 4) -> dict[int, MaskEntry]:
    """Build one entry for each context, through a cache in a temporary folder."""
    spec = {
        "BLOCK_SIZE": 128,
        "entry": [
            {
                "name": "dflash",
                "family": "dflash",
                "kind": kind,
                "context": list(size.contexts),
                "anchors": size.anchors,
                "draft_block_size": size.draft_block_size,
                **({"draws": draws} if kind == "layouts" else {}),
            }
        ],
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        store = cache.open_store(str(Path(folder) / "masks.zarr"), writable=True)
        build(read_specs({"masks": spec}), store)
        return {context: load_entry(store, f"dflash/ctx{context}") for context in size.contexts}


def frozen_target(
    size: Size, placement: Placement, device: torch.device, *, teacher: bool = False
) -> FrozenTarget:
    """Random frozen parts; features are a slice of one resident tensor."""
    generator = torch.Generator(device).manual_seed(1)
    dtype = placement.compute_dtype

    def randn(*shape: int, scale: float) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return values * scale

    width = (size.num_features + teacher) * size.hidden_size
    pool = randn(1, max(size.contexts), width, scale=1.0)

    def features(input_ids: Tensor) -> Tensor:
        return pool[:, : input_ids.shape[1]].expand(input_ids.shape[0], -1, -1)

    return FrozenTarget(
        embed_weight=randn(size.vocab_size, size.hidden_size, scale=0.02),
        head_weight=randn(size.vocab_size, size.hidden_size, scale=0.02),
        feature_scale=torch.ones(size.num_features, device=device),
        features=features,
    )


class RandomTrainee:
    """A drafter of random weights over random features, as a ``Trainee`` without data.

    Args:
        size: Of everything.
        target: Frozen parts.
        recipe: Of the loss; with a teacher the target's features end with its last hidden state.
        markov_rank: Of a Markov head; with a teacher there is a confidence head as well.
    """

    remote_targets = ()
    memory_hint = "take a smaller size"
    published = MappingProxyType({})

    def __init__(
        self,
        size: Size,
        target: FrozenTarget,
        recipe: Recipe = DECAY,
        markov_rank: int = 0,
    ) -> None:
        self.size = size
        self.target = target
        self.recipe = recipe
        self.losses: dict[Drafter, Any] = {}
        self.network = replace(
            size.drafter_config(),
            markov_rank=markov_rank,
            confidence_head=bool(markov_rank) and recipe.has_teacher,
        )
        self.sums = sum_names(self.network, recipe)

    def module(self, device: torch.device) -> Drafter:
        """The network."""
        return Drafter(self.network).to(device)

    def stages(self, module: Drafter) -> list[list[str]]:
        """Parameter names as the backward pass finishes them."""
        return backward_stages(module)

    def objective(
        self, module: Drafter, length: int, entry: MaskEntry, batch: int, index: int
    ) -> DraftObjective:
        """The loss of one bucket."""
        del length, index
        if module not in self.losses:
            self.losses[module] = loss_on_device(module, self.recipe)
        teacher = self.recipe.has_teacher
        bucket = DraftBucket(module, self.target, entry, batch, teacher=teacher)
        return DraftObjective(bucket, self.recipe, self.losses[module])


def make_replica(
    size: Size,
    placement: Placement,
    group: Group,
    entries: dict[int, MaskEntry],
    *,
    batch: int,
    steps: int = 1000,
    reduce_dtype: str = "float32",
    recipe: Recipe = DECAY,
    markov_rank: int = 0,
) -> Replica:
    """A replica with random first weights."""
    device = placement.devices[group.rank]
    target = frozen_target(size, placement, device, teacher=recipe.has_teacher)
    replica = Replica(
        group=group,
        placement=placement,
        trainee=RandomTrainee(size, target, recipe, markov_rank),
        entries=entries,
        train=DFlashTrain(
            steps=steps, global_batch=batch * group.size, lr=1e-4, reduce_dtype=reduce_dtype
        ),
    )
    fill_inputs(size, replica)
    return replica


def fill_inputs(size: Size, replica: Replica) -> None:
    """Put random supervised text into the static inputs of every bucket."""
    generator = torch.Generator().manual_seed(2 + replica.group.rank)
    for step in replica.train_steps.values():
        tensors = step.inputs.tensors
        shape = tensors["input_ids"].shape
        ids = torch.randint(size.vocab_size - 1, shape, generator=generator)
        tensors["input_ids"].copy_(ids)
        tensors["loss_mask"].fill_(True)
        if "layout" in tensors:
            layouts = step.objective.bucket.masks.entry.num_layouts
            tensors["layout"].copy_(torch.randint(layouts, shape[:1], generator=generator))
        else:
            for row in range(shape[0]):
                drawn = torch.randperm(shape[1] - 1, generator=generator)[: size.anchors]
                drawn = drawn.sort().values.int()
                tensors["anchors"][row, : len(drawn)].copy_(drawn)
                tensors["n_valid"][row] = len(drawn)
