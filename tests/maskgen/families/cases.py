"""Parameters and shapes that every family is tried at: square, rectangular, ragged, batched."""

import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    family: str
    Q_LEN: int
    KV_LEN: int
    params: dict[str, Any]
    tight: bool = False
    """Some row of this mask needs as many spans as the family states."""

    def __str__(self):
        text = ",".join(f"{k}={v}".replace(" ", "")[:28] for k, v in self.params.items())
        return f"{self.family}-{self.Q_LEN}x{self.KV_LEN}-{text}"


def sampled_elements(L, num_depths, keep, seed, padded_to):
    """Elements of P-EAGLE: all of depth 0, a share of each next depth, padding at the end."""
    draw = random.Random(seed)
    elements = [(0, a) for a in range(L)]
    anchors = list(range(L))
    for depth in range(1, num_depths):
        anchors = sorted(draw.sample(anchors, max(1, int(len(anchors) * keep))))
        elements += [(depth, a) for a in anchors]
    padding = padded_to - len(elements)
    assert padding >= 0
    return [a for _, a in elements] + [0] * padding, [d for d, _ in elements] + [-1] * padding


def tree_parents(N, seed, roots=1):
    """A random tree in depth-first order."""
    draw = random.Random(seed)
    parents, path = [], []
    for node in range(N):
        if node < roots or not path:
            path = []
        elif draw.random() < 0.5:
            path = path[: draw.randrange(1, len(path) + 1)]
        parents.append(path[-1] if path else -1)
        path = [*path, node]
    return parents


ELEMENTS = sampled_elements(20, 6, 0.7, seed=1, padded_to=80)
ELEMENT_DOCS = [0 if a < 9 else 1 if a < 16 else -1 for a in ELEMENTS[0]]
DEPTH_2 = sampled_elements(13, 2, 0.5, seed=2, padded_to=19)
IDS = [0] * 7 + [3] * 20 + [1] * 5 + [-1] * 4 + [2] * 30 + [-1] * 2
OFFSETS = [[0, 5, 6, 40, 60], [0, 31, 60, 60, 60]]

CASES = [
    Case("full", 20, 33, {}, True),
    Case("full", 17, 40, {"lengths": [40, 1, 13]}, True),
    Case("causal", 48, 48, {}, True),
    Case("causal", 20, 67, {"offset": 47}, True),
    Case("causal", 67, 20, {}, True),
    Case("causal", 33, 21, {"offset": -9}, True),
    Case("sliding_window", 65, 65, {"window": 1}, True),
    Case("sliding_window", 65, 65, {"window": 16}, True),
    Case("sliding_window", 30, 70, {"window": 9, "offset": 40}, True),
    Case("sliding_window", 70, 30, {"window": 100}, True),
    Case("sliding_window", 50, 50, {"window": 8, "inclusive": True}, True),
    Case("sink_window", 64, 64, {"sinks": 4, "window": 10}, True),
    Case("sink_window", 50, 30, {"sinks": 0, "window": 7}),
    Case("sink_window", 30, 50, {"sinks": 17, "window": 3, "offset": 12}, True),
    Case("sink_window", 20, 20, {"sinks": 40, "window": 1}),
    Case("chunked", 70, 70, {"chunk": 16}, True),
    Case("chunked", 40, 71, {"chunk": 9, "offset": 31}, True),
    Case("chunked", 71, 40, {"chunk": 13, "offset": -3}, True),
    Case("prefix_lm", 48, 48, {"prefix": 0}, True),
    Case("prefix_lm", 49, 33, {"prefix": 20}, True),
    Case("prefix_lm", 33, 49, {"prefix": 49}, True),
    Case("prefix_lm", 30, 50, {"prefix_lens": [0, 11, 50], "offset": 20}, True),
    Case("document", 9, 9, {"doc_ids": [-1] * 9}),
    Case("document", 68, 68, {"doc_ids": IDS}, True),
    Case("document", 50, 68, {"doc_ids": [IDS, IDS[::-1]], "inner": "full"}, True),
    Case(
        "document",
        66,
        66,
        {"doc_offsets": OFFSETS, "inner": "sink_window", "sinks": 2, "window": 5},
        True,
    ),
    Case("document", 66, 60, {"doc_offsets": OFFSETS, "inner": "chunked", "chunk": 7}, True),
    Case("document", 60, 66, {"doc_offsets": OFFSETS, "inner": "prefix_lm", "prefix": 8}, True),
    Case(
        "document",
        66,
        66,
        {
            "doc_offsets": OFFSETS,
            "inner": "prefix_lm",
            "doc_prefix_lens": [[2, 0, 20, 9], [5, 40, 0, 0]],
        },
        True,
    ),
    Case(
        "document",
        68,
        68,
        {
            "doc_ids": [[-1] * 68, IDS],
            "inner": "prefix_lm",
            "doc_prefix_lens": [2, 0, 20, 9, 7],
        },
        True,
    ),
    Case("document", 40, 40, {"doc_offsets": [0, 40]}, True),
    Case("document", 68, 50, {"doc_ids": IDS, "inner": "sliding_window", "window": 6}, True),
    Case(
        "shared_prefix",
        66,
        66,
        {"doc_offsets": [0, 9, 20, 31, 40, 52], "prefix_docs": [0, 0, 0, 3, 3]},
        True,
    ),
    Case(
        "shared_prefix",
        50,
        66,
        {"doc_offsets": OFFSETS, "prefix_docs": [[0, 1, 0, 1], [0, 0, 2, 3]]},
        True,
    ),
    Case("global_prefix_window", 50, 50, {"global_tokens": 5, "radius": 3}, True),
    Case("global_prefix_window", 70, 33, {"global_tokens": 0, "radius": 6}),
    Case("global_prefix_window", 33, 70, {"global_tokens": 70, "radius": 0}),
    Case("block_diffusion", 64, 64, {"diffusion_block_size": 8}, True),
    Case("block_diffusion", 50, 50, {"diffusion_block_size": 7}, True),
    Case(
        "block_diffusion",
        66,
        66,
        {
            "diffusion_block_size": 4,
            "variant": "packed",
            "doc_offsets": [[0, 5, 6, 19, 30], [0, 33, 33, 33, 33]],
        },
        True,
    ),
    Case("block_diffusion", 50, 66, {"diffusion_block_size": 8, "variant": "block_causal"}, True),
    Case("block_diffusion", 66, 50, {"diffusion_block_size": 9, "variant": "block_causal"}, True),
    Case("dflash", 32, 64, {"draft_block_size": 4, "anchors": [0, 1, 5, 5, 9, 20, 30, 31]}, True),
    Case(
        "dflash",
        24,
        53,
        {
            "draft_block_size": 8,
            "anchors": [[3, 11, 28], [1, 0, 0], [0, 0, 0]],
            "n_valid": [3, 1, 0],
        },
        True,
    ),
    Case("dflash", 48, 49, {"draft_block_size": 16, "anchors": [0, 0, 0]}),
    Case(
        "dflash",
        20,
        55,
        {
            "draft_block_size": 5,
            "anchors": [[0, 8, 12, 34], [7, 9, 33, 30]],
            "n_valid": [4, 3],
            "doc_ids": [[0] * 8 + [1] * 10 + [4] * 17, [2] * 9 + [-1] * 20 + [0] * 6],
            "in_block": "causal",
        },
        True,
    ),
    *(
        Case(
            "dflash",
            24,
            64,
            {
                "draft_block_size": 6,
                "anchors": [[3, 11, 28, 39], [2, 20, 20, 0]],
                "n_valid": [4, 3],
                "layer": "sliding",
                "window": window,
                "convention": convention,
            },
            window == 9,
        )
        for convention in (
            "specforge",
            "speculators",
            "speculators_non_causal",
            "modelopt",
            "nemo",
            "sglang",
            "vllm",
        )
        for window in (3, 9)
    ),
    Case(
        "dflash",
        18,
        50,
        {
            "draft_block_size": 6,
            "anchors": [5, 20, 31],
            "doc_ids": [0] * 17 + [1] * 15,
            "layer": "sliding",
            "in_block": "bidirectional",
            "window": 7,
            "convention": "vllm",
        },
        True,
    ),
    # Every convention with the order in a block said by the caller; W is the shortest window that
    # all of them have a rule for.
    *(
        Case(
            "dflash",
            24,
            64,
            {
                "draft_block_size": 6,
                "anchors": [[3, 11, 28, 39], [2, 20, 20, 0]],
                "n_valid": [4, 3],
                "layer": "sliding",
                "in_block": in_block,
                "window": 6,
                "convention": convention,
            },
            True,
        )
        for convention in (
            "specforge",
            "speculators",
            "speculators_non_causal",
            "modelopt",
            "nemo",
            "sglang",
            "vllm",
        )
        for in_block in ("causal", "bidirectional")
    ),
    Case(
        "dflash",
        12,
        32,
        {"draft_block_size": 4, "anchors": [2, 9, 19], "layer": "sliding", "window": 3},
        True,
    ),
    # Anchors of unused blocks, beyond the context and before it.
    Case(
        "dflash",
        16,
        36,
        {
            "draft_block_size": 4,
            "anchors": [[3, 11, 99, -7], [8, 20, 21, 30_000]],
            "n_valid": [2, 1],
            "doc_ids": [0] * 5 + [1] * 10 + [-1] * 5,
        },
        True,
    ),
    Case("eagle3_ttt", 20, 20, {}, True),
    Case("eagle3_ttt", 30, 120, {"lengths": [30, 11, 2]}, True),
    Case("eagle3_ttt", 33, 33 * 8, {}, True),
    Case(
        "eagle3_ttt",
        36,
        108,
        {"variant": "speculators", "doc_ids": IDS[:36], "window": 5},
        True,
    ),
    Case("eagle3_ttt", 25, 150, {"variant": "speculators"}, True),
    Case("eagle3_ttt", 24, 96, {"variant": "modelopt"}, True),
    Case("eagle3_ttt", 5, 40, {"variant": "modelopt"}),
    Case("p_eagle", 19, 19, {"num_depths": 2, "anchors": DEPTH_2[0], "depths": DEPTH_2[1]}, True),
    Case("p_eagle", 80, 80, {"num_depths": 6, "anchors": ELEMENTS[0], "depths": ELEMENTS[1]}, True),
    Case(
        "p_eagle",
        80,
        80,
        {
            "num_depths": 6,
            "anchors": [ELEMENTS[0]] * 2,
            "depths": [ELEMENTS[1]] * 2,
            "doc_ids": [ELEMENT_DOCS, [0] * 80],
            "window": 5,
        },
        True,
    ),
    # Depths 2 and 3 without depth 1; padding that names anchors, in use or beyond all.
    Case(
        "p_eagle",
        13,
        13,
        {
            "num_depths": 4,
            "anchors": [0, 1, 2, 5, 1, 0, 2, 5, 0, 2, 1, 2, 30_000],
            "depths": [0, 0, 0, 0, 1, 2, 2, 2, 3, 3, -1, -1, -1],
            "doc_ids": [4, 4, 4, 2, 4, 4, 4, 2, 4, 4, 4, -1, 7],
        },
    ),
    Case(
        "p_eagle",
        8,
        8,
        {
            "num_depths": 3,
            "anchors": [[3, 4, 9, 3, 9, 4, 6, 1], [0, 0, 7, 7, 30_000, 1, 2, 3]],
            "depths": [[0, 0, 0, 2, 2, -1, -1, -1], [-1] * 8],
            "window": 2,
        },
    ),
    Case("tree", 7, 12, {"parents": [-1, 0, 1, 1, 3, 3, 0]}),
    Case("tree", 6, 6, {"parents": [-1, -1, -1, 2, 2, 4], "max_depth": 5}),
    Case("tree", 40, 65, {"parents": [tree_parents(40, 3), tree_parents(40, 4, roots=5)]}),
    # Every node of the path stands one off its parent, so no two spans touch.
    Case("tree", 12, 20, {"parents": [-1, -1, 1, 1, 3, 3, 5, 5, 7, 7, 9, 9]}, True),
    Case("natten", 40, 40, {"canvas": [40], "kernel": [7]}, True),
    Case("natten", 63, 63, {"canvas": [7, 9], "kernel": [5, 3]}, True),
    Case("natten", 63, 63, {"canvas": [9, 7], "kernel": [3, 7]}, True),
    Case("natten", 60, 60, {"canvas": [6, 10], "kernel": [1, 9]}, True),
]
