"""A method of one's own: one layer of attention learns to predict the next token.

    python -m runtime.train --config my.toml --set run.method=next_token:METHOD

in the folder of this file. How far back it sees is what the run's masks say; docs/methods.md says
what each member is for.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from maskgen.entry import MaskEntry
from runtime.config import Config
from runtime.data.dataset import Dataset, open_splits
from runtime.errors import CheckpointError
from runtime.ranks.devices import Placement
from runtime.static import Attention, BucketMasks, Field, dense_attention
from runtime.training.evaluation import Evaluation
from runtime.training.inputs import Inputs
from runtime.training.method import Method, Trainee
from runtime.training.saved_state import Checkpoint

WEIGHTS, RECORD = "weights.safetensors", "run.json"


class Net(nn.Module):
    """Tokens in, logits out: an embedding, one head of attention, a projection."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 32)
        self.head = nn.Linear(32, vocab_size)

    def forward(self, input_ids: Tensor, attention: Attention) -> Tensor:
        """Logits ``[B, S, V]`` of int64 ``[B, S]``."""
        x = self.embed(input_ids)[:, None]
        logits: Tensor = self.head((x + attention(x, x, x))[:, 0])
        return logits


def summed_loss(logits: Tensor, input_ids: Tensor, learned: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the cross entropies of the learned tokens, and how many there are."""
    losses = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), input_ids[:, 1:].flatten(), reduction="none"
    )
    weights = learned[:, 1:].flatten().float()
    return (losses * weights).sum(), weights.sum()


class NextTokenLoss:
    """The loss of one bucket: what a graph records, over tensors that never move."""

    def __init__(self, net: Callable[..., Tensor], masks: BucketMasks, length: int) -> None:
        self.net = net
        self.masks = masks
        shape = (masks.batch, length)
        self.fields = {"ids": Field(shape, torch.int64), "learned": Field(shape, torch.bool)}

    def __call__(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The summed loss with its graph, and the sums ``loss`` and ``weight``."""
        logits = self.net(inputs["ids"], self.masks.attention())
        loss, weight = summed_loss(logits, inputs["ids"], inputs["learned"])
        return loss, torch.stack((loss.detach(), weight))


def write_product(folder: Path, weights: Mapping[str, Tensor], run: Mapping[str, Any]) -> None:
    """Write weights, and last the record that they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).unlink(missing_ok=True)
    save_file(dict(weights), folder / WEIGHTS)
    (folder / RECORD).write_text(json.dumps(dict(run)))


class Predictor(Trainee):
    """What a run trains, loaded."""

    def __init__(self, config: Config, dataset: Dataset) -> None:
        self.dataset = dataset
        self.seed = config.run.seed
        self.vocab_size = dataset.meta["vocab_size"]
        self.published = {"vocab_size": self.vocab_size}

    def module(self, device: torch.device) -> nn.Module:
        """The same on every device; the first weights come later."""
        return Net(self.vocab_size).to(device)

    def first_weights(self) -> Mapping[str, Tensor]:
        """Random ones."""
        torch.manual_seed(self.seed)
        return Net(self.vocab_size).state_dict()

    def objective(
        self, module: nn.Module, length: int, entry: MaskEntry, batch: int, index: int
    ) -> NextTokenLoss:
        """The loss of one bucket; compiled where FlexAttention attends."""
        masks = BucketMasks(entry, batch, next(module.parameters()).device)
        compiled = masks.backend.compiled
        net = torch.compile(module, fullgraph=True, dynamic=False) if compiled else module
        return NextTokenLoss(net, masks, length)

    def fill(self, tensors: Mapping[str, Tensor], row: int, number: int, *, epoch: int) -> None:
        """A sample a row; what is left of the row stays 0 and is not learned."""
        sample = self.dataset.sample(number)
        length = len(sample.input_ids)
        tensors["ids"][row, :length] = sample.input_ids
        tensors["learned"][row, :length] = sample.loss_mask

    def export(self, folder: Path, weights: Mapping[str, Tensor], run: Mapping[str, Any]) -> None:
        """Write the product."""
        write_product(folder, weights, run)


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss(Evaluation):
    """Mean cross entropy of held-out tokens, in nats."""

    loss: float
    uniform: float
    """Of a guess among all tokens."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON, and for the table."""
        return {"loss": self.loss, "uniform": self.uniform}


class NextToken(Method[Config]):
    """What a run file of this method means; all that is not here is as the protocol has it."""

    name = "next_token:METHOD"
    product = "predictor"
    config_type = Config

    def load(
        self,
        config: Config,
        inputs: Inputs,
        placement: Placement,
        apart: Placement | None,
        *,
        ranks: int,
        fresh: bool,
        report: Callable[[str], None],
    ) -> Predictor:
        """Nothing is read but the data."""
        return Predictor(config, inputs.dataset)

    def evaluate(self, config: Config, folder: str | Path | None) -> HeldOutLoss:
        """Score the held-out samples with a causal mask as far back as they go."""
        where = Path(folder or Path(config.run.folder) / self.product)
        if not (where / WEIGHTS).exists():
            raise CheckpointError(f"there is no {self.product} in {where}")
        _, heldout = open_splits(config.data.folder)
        net = Net(heldout.meta["vocab_size"])
        net.load_state_dict(load_file(where / WEIGHTS))
        loss, weight = 0.0, 0.0
        for number in range(len(heldout)):
            sample = heldout.sample(number)
            ids, learned = sample.input_ids[None].long(), sample.loss_mask[None]
            seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[None, None]
            with torch.no_grad():
                found = summed_loss(net(ids, dense_attention(seen)), ids, learned)
            loss, weight = loss + float(found[0]), weight + float(found[1])
        return HeldOutLoss(loss=loss / weight, uniform=math.log(heldout.meta["vocab_size"]))

    def export_checkpoint(self, checkpoint: Checkpoint, folder: Path) -> Path:
        """Write the product of a checkpoint."""
        write_product(folder, checkpoint.learned_weights(), checkpoint.run)
        return folder

    def is_of(self, folder: Path, run: Mapping[str, Any]) -> bool:
        """Whether the product of this run and step is there."""
        record = folder / RECORD
        return record.exists() and json.loads(record.read_text()) == dict(run)


METHOD = NextToken()
