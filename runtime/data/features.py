"""The target's hidden states over finished samples, and their size."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from maskgen.progress import Progress
from runtime.target.model import Target

FORWARD_TOKENS = 1024
"""Tokens of one forward pass; with 4096 it takes half as long again on two cores."""


def features_of(
    target: Target, layer_ids: Sequence[int], samples: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Features from forward passes over samples of similar length.

    Batches follow from the samples alone, so that features do not depend on how and when the
    answers were made.

    Args:
        target: The model.
        layer_ids: K layers whose outputs are taken, as ``Target.features`` takes them.
        samples: Token ids of each, S of them.

    Returns:
        bfloat16 ``[S, K * H]`` of each, on the CPU.
    """
    order = sorted(range(len(samples)), key=lambda index: len(samples[index]))
    found: dict[int, Tensor] = {}
    batch: list[int] = []
    with Progress(f"features of {len(samples)} samples", len(samples)) as progress:
        for position, index in enumerate(order):
            batch.append(index)
            longest = len(samples[index])
            if position + 1 == len(order) or longest * (len(batch) + 1) > FORWARD_TOKENS:
                rows = [[*samples[i], *[0] * (longest - len(samples[i]))] for i in batch]
                ids = torch.tensor(rows, dtype=torch.int64, device=target.device)
                features = target.features(ids, layer_ids).to(torch.bfloat16).cpu()
                for row, i in enumerate(batch):
                    found[i] = features[row, : len(samples[i])].clone()
                progress.advance(len(batch))
                batch = []
    return [found[index] for index in range(len(samples))]


def is_finite(features: Tensor) -> bool:
    """Whether no number is infinite or none."""
    return bool(features.isfinite().all())


def scale_of(features: Iterable[Tensor], num_layers: int) -> list[float]:
    """Root mean square of each layer's features, K numbers, over samples that are finite.

    The first token of each sample is left out: models park a huge constant there, which would set
    the scale alone.

    Args:
        features: ``[S, K * H]`` of each sample.
        num_layers: K.
    """
    squares = torch.zeros(num_layers, dtype=torch.float64, device="cpu")
    positions = 0
    for sample in filter(is_finite, features):
        rows = sample[1:].float().reshape(-1, num_layers, sample.shape[1] // num_layers)
        squares += rows.square().mean(dim=-1).sum(dim=0, dtype=torch.float64)
        positions += rows.shape[0]
    return [float(value) for value in (squares / max(1, positions)).sqrt()]
