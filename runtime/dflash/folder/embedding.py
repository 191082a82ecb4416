"""What a target's embedding module makes of its rows, and which servers feed a drafter that.

Most modules return rows of their weight; Gemma's multiplies them by the root of the hidden size. A
drafter shares the weight alone, so the factor is a number in its config.
"""

import torch

from runtime.dflash.network.config import DrafterConfig
from runtime.errors import ConfigError
from runtime.target.outline import TargetOutline

PROBES = 64
"""Rows that are compared, spread over the vocabulary."""


@torch.no_grad()
def module_scale(target: TargetOutline) -> float | None:
    """The constant by which the target's embedding module multiplies the rows of its weight.

    None where it does something else with them.
    """
    weight = target.embed_weight
    ids = torch.linspace(
        0, weight.shape[0] - 1, PROBES, dtype=torch.float32, device=weight.device
    ).long()
    rows, made = weight[ids], target.model.get_input_embeddings()(ids[None])[0]
    if made.shape != rows.shape:
        return None
    # A module keeps its constant in the weight's dtype, to which the mean of many rows rounds.
    x, y = rows.double(), made.double()
    scale = float(((x * y).sum() / (x * x).sum()).to(weight.dtype))
    rounding = 4 * torch.finfo(weight.dtype).eps
    fits = scale > 0 and torch.allclose(rows * scale, made, rtol=rounding, atol=0.0)
    return scale if fits else None


def fed_scale(target: TargetOutline, embedding: str) -> float:
    """``DrafterConfig.embedding_scale`` of a run.

    Args:
        target: The target.
        embedding: ``drafter.embedding``: ``module`` or ``rows``.

    Raises:
        ConfigError: The module's output is wanted, and it is no multiple of the rows.
    """
    scale = module_scale(target) if embedding == "module" else 1.0
    if scale is None:
        raise ConfigError(
            "drafter.embedding",
            embedding,
            f"must be 'rows' for {target.name!r}, whose embedding module does not multiply the "
            "rows of its weight by one constant",
        )
    return scale


def serving_note(config: DrafterConfig, target: TargetOutline | None = None) -> str | None:
    """One line where a server feeds the drafter otherwise than it is trained; else None.

    Args:
        config: The drafter's.
        target: Where it is at hand: with bare rows it alone shows that its module scales them.
    """
    if config.embedding_scale != 1.0:
        return (
            f"note: the drafter is fed the target's embedding times {config.embedding_scale:.6g}, "
            "as z-lab's reference and SGLang feed it; vLLM 0.33 feeds bare rows, for which "
            'drafter.embedding = "rows" trains'
        )
    made = None if target is None else module_scale(target)
    if made in (None, 1.0):
        return None
    return (
        f"note: the drafter is fed bare rows of the target's embedding, as vLLM 0.33 and z-lab's "
        f"reference feed it; SGLang feeds them times {made:.6g}, for which drafter.embedding = "
        '"module" trains'
    )
