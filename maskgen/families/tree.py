"""A token tree in depth-first order after a prefix: each node sees the prefix and its ancestors.

Legend: B batch, N nodes = Q_LEN, P prefix tokens = KV_LEN - N.
"""

from typing import Any

import torch
from torch import Tensor

from maskgen.errors import MaskSpecError
from maskgen.families.causal import CAUSAL
from maskgen.families.draw import Draw
from maskgen.families.family import Family, MaskMod, Spans
from maskgen.families.params import Param, RuntimeParam
from maskgen.families.spans import rows, stack_spans
from maskgen.intervals import RowIntervals


def tree(
    Q_LEN: int,
    KV_LEN: int,
    *,
    parents: Tensor | list[int],
    max_depth: int | None = None,
    device: torch.device | str | None = None,
) -> RowIntervals:
    """Tree attention, as verifying or training on a tree of drafts needs it.

    Args:
        Q_LEN: N nodes.
        KV_LEN: Prefix tokens and then the N nodes.
        parents: Parent of each node, integers ``[B, N]``, -1 for a root, in depth-first order:
            a node follows its parent and the whole subtrees of its earlier siblings. Unused
            nodes at the end are roots.
        max_depth: Nodes on the longest path from a root; N by default. It bounds K.
        device: Where the spans lie; by default where the tensors given lie, else the CPU.

    Raises:
        MaskSpecError: A value breaks its rule.
    """
    return TREE.intervals(Q_LEN, KV_LEN, device=device, parents=parents, max_depth=max_depth)


def _paths(parents: Tensor, max_depth: int | None) -> list[Tensor]:
    """Each node, its parent, its parent's parent and so on; -1 past the root, ``[B, N]``."""
    N = parents.shape[1]
    node = torch.arange(N, dtype=torch.int32, device=parents.device).expand_as(parents)
    path = [node]
    for _ in range(1, N if max_depth is None else min(max_depth, N)):
        above = parents.gather(1, node.clamp(min=0).long())
        node = torch.where(node < 0, -1, above)
        path.append(node)
    return path


def _spans(
    Q_LEN: int, KV_LEN: int, device: torch.device, *, max_depth: int | None, parents: Tensor
) -> Spans:
    P = KV_LEN - Q_LEN
    pairs: list[tuple[Tensor | int, Tensor | int]] = [(0, P)]
    path = _paths(parents, max_depth)
    pairs += [(P + node, P + node + (node >= 0)) for node in path]
    return stack_spans(pairs, Q_LEN, KV_LEN, rows(Q_LEN, device))


def _mask_mod(
    Q_LEN: int, KV_LEN: int, device: torch.device, *, max_depth: int | None, parents: Tensor
) -> MaskMod:
    P = KV_LEN - Q_LEN
    # In depth-first order a node's subtree is the run of nodes from it on: count its members.
    size = torch.zeros_like(parents)
    for node in _paths(parents, max_depth):
        size.scatter_add_(1, node.clamp(min=0).long(), (node >= 0).to(torch.int32))
    subtree_end = rows(Q_LEN, device) + size
    batched = int(parents.shape[0] > 1)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        node = (kv_idx - P).clamp(min=0)
        below = (q_idx >= node) & (q_idx < subtree_end[b * batched, node])
        return (kv_idx < P) | below

    return mask_mod


def _check(Q_LEN: int, KV_LEN: int, params: dict[str, Any]) -> None:
    if KV_LEN < Q_LEN:
        rule = f"must be at least Q_LEN = {Q_LEN}: the nodes are columns too"
        raise MaskSpecError("KV_LEN", KV_LEN, rule)
    if "parents" not in params:
        return
    parents = params["parents"]
    if parents.shape[1] != Q_LEN:
        rule = f"must name a parent for each of the {Q_LEN} nodes"
        raise MaskSpecError("parents", list(parents.shape), rule)
    deepest = max(_depth(row) for row in parents.tolist())
    if params["max_depth"] is None:
        params["max_depth"] = deepest
    elif params["max_depth"] < deepest:
        rule = f"must be at least {deepest}, the longest path of parents"
        raise MaskSpecError("max_depth", params["max_depth"], rule)


def _depth(parents: list[int]) -> int:
    """Nodes on the longest path, once the order is known to be depth-first."""
    path: list[int] = []
    deepest = 0
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            rule = f"of node {node} must be -1 or a node before it"
            raise MaskSpecError("parents", parent, rule)
        while path and path[-1] != parent:
            path.pop()
        if parent >= 0 and not path:
            rule = f"of node {node} must be on the path of node {node - 1}: depth-first order"
            raise MaskSpecError("parents", parent, rule)
        path.append(node)
        deepest = max(deepest, len(path))
    return deepest


def _bounds(Q_LEN: int, KV_LEN: int, *, max_depth: int | None) -> tuple[RowIntervals, RowIntervals]:
    """Roots alone, and one chain."""
    must = tree(Q_LEN, KV_LEN, parents=[-1] * Q_LEN)
    return must, CAUSAL.intervals(Q_LEN, KV_LEN, offset=KV_LEN - Q_LEN)


def _draw(draw: Draw, Q_LEN: int, KV_LEN: int, *, max_depth: int | None) -> dict[str, Any]:
    """Each node below one of the path to the node before it, or a new root."""
    path: list[int] = []
    parents: list[int] = []
    for node in range(Q_LEN):
        path = path[: draw.below(min(len(path), (max_depth or Q_LEN) - 1) + 1)]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return {"parents": parents}


TREE = Family(
    name="tree",
    revision=1,
    formula="kv < P | kv - P is node q or an ancestor of it, P = KV_LEN - Q_LEN",
    source="SpecInfer (arXiv 2305.09781) section 4.2; Medusa (arXiv 2401.10774) section 2.1.2",
    params=(Param("max_depth", "int", "nodes on the longest path", default=None, minimum=1),),
    runtime=(RuntimeParam("parents", "B, N", "parent of each node, -1 for a root", minimum=-1),),
    span_fn=_spans,
    mask_mod_fn=_mask_mod,
    max_k_fn=lambda Q_LEN, KV_LEN, max_depth: 1 + min(max_depth or Q_LEN, Q_LEN),
    check_fn=_check,
    bounds_fn=_bounds,
    draw_fn=_draw,
)
