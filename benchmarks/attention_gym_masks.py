"""Every mask generator of attention-gym through from_mask_mod; prints the table of the docs.

    python -m benchmarks.attention_gym_masks

Each generator comes at the size of its own demonstration and at a real size. A mask is either
read exactly, compared cell by cell with torch's create_mask, or refused with the row and count.

Source: attention-gym 0.0.17, ``attn_gym/masks``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import attn_gym.masks as gym
import torch
from attn_gym.masks.document_mask import length_to_offsets
from torch.nn.attention.flex_attention import create_mask, noop_mask

import maskgen


@dataclass(frozen=True)
class GymCase:
    """One generator at one size; ``make`` gives the mask_mod."""

    name: str
    size: str
    Q_LEN: int
    KV_LEN: int
    make: Callable[[], Any]


def _documents(lengths: list[int], inner: Any) -> Callable[[], Any]:
    return lambda: gym.generate_doc_mask_mod(inner, length_to_offsets(lengths, "cpu"))


def _flamingo(texts: int, images: int, tokens: int) -> Callable[[], Any]:
    firsts = torch.arange(images) * (texts // images)
    intervals = torch.stack([firsts, (firsts + 2 * (texts // images)).clamp(max=texts)], 1)
    return lambda: gym.generate_vision_cross_attention_mask_mod(intervals.int(), tokens)


def _is_global(length: int, step: int) -> torch.Tensor:
    return torch.arange(length) % step == 0


def _tree(parents: list[int], prefix: int) -> Callable[[], Any]:
    return lambda: gym.generate_jetspec_tree_causal_mask_mod(
        prefix, gym.build_tree_ancestor_matrix(parents, device="cpu")
    )


def _shared(lengths: list[int], prefixes: list[int]) -> Callable[[], Any]:
    return lambda: gym.generate_shared_prefix_mask_mod(
        length_to_offsets(lengths, "cpu"), torch.tensor(prefixes)
    )


def _vsa(tiles: int, numel: int, top_k: int) -> Callable[[], Any]:
    def make() -> Any:
        generator = torch.Generator().manual_seed(0)
        chosen = torch.rand(1, 1, tiles, tiles, generator=generator).argsort(-1)[..., :top_k]
        return gym.generate_vsa_mask_mod(chosen, tile_numel=numel)

    return make


_Sized: TypeAlias = tuple[int, int, Callable[[], Any], str]


def _pair(name: str, demo: _Sized, real: _Sized) -> list[GymCase]:
    return [GymCase(name, size, Q, KV, make) for Q, KV, make, size in (demo, real)]


def _square(n: int, make: Callable[[], Any], size: str = "") -> _Sized:
    return n, n, make, size


CASES = [
    *_pair(
        "batchify_mask_mod",
        _square(12, lambda: gym.batchify_mask_mod(noop_mask, 4), "batches of 4"),
        _square(
            4096, lambda: gym.batchify_mask_mod(gym.causal_mask, 512), "causal, batches of 512"
        ),
    ),
    *_pair(
        "generate_block_diffusion_mask",
        _square(24, lambda: gym.generate_block_diffusion_mask(12, block_size=4), "blocks of 4"),
        _square(4096, lambda: gym.generate_block_diffusion_mask(2048, 32), "blocks of 32"),
    ),
    *_pair(
        "causal_mask",
        _square(12, lambda: gym.causal_mask),
        _square(4096, lambda: gym.causal_mask),
    ),
    *_pair(
        "generate_dilated_sliding_window",
        _square(24, lambda: gym.generate_dilated_sliding_window(4, 2), "window 4, dilation 2"),
        _square(
            4096, lambda: gym.generate_dilated_sliding_window(256, 4), "window 256, dilation 4"
        ),
    ),
    *_pair(
        "generate_doc_mask_mod",
        _square(21, _documents([6, 5, 4, 6], gym.causal_mask), "4 causal documents"),
        _square(4096, _documents([512] * 8, noop_mask), "8 documents"),
    ),
    *_pair(
        "generate_packed_causal_doc_mask_mod",
        _square(
            21,
            lambda: gym.generate_packed_causal_doc_mask_mod(length_to_offsets([6, 5, 4, 6], "cpu")),
            "4 documents",
        ),
        _square(
            4096,
            lambda: gym.generate_packed_causal_doc_mask_mod(length_to_offsets([512] * 8, "cpu")),
            "8 documents",
        ),
    ),
    *_pair(
        "generate_vision_cross_attention_mask_mod",
        (12, 9, _flamingo(12, 3, 3), "3 images of 3 tokens"),
        (4096, 4096, _flamingo(4096, 16, 256), "16 images of 256 tokens"),
    ),
    *_pair(
        "generate_global_sliding_window",
        _square(
            16,
            lambda: gym.generate_global_sliding_window(3, _is_global(16, 8)),
            "window 3, 2 global tokens",
        ),
        _square(
            4096,
            lambda: gym.generate_global_sliding_window(256, _is_global(4096, 64)),
            "window 256, 64 global tokens",
        ),
    ),
    *_pair(
        "generate_jetspec_tree_causal_mask_mod",
        (7, 7, _tree([-1, 0, 1, 1, 3, 3, 0], 0), "7 nodes"),
        (63, 2111, _tree([-1, *[(i - 1) // 2 for i in range(1, 63)]], 2048), "63 nodes after 2048"),
    ),
    *_pair(
        "generate_jetspec_training_mask_mod",
        (12, 17, lambda: gym.generate_jetspec_training_mask_mod(5, 4), "prefix 5, blocks of 4"),
        (
            2048,
            4096,
            lambda: gym.generate_jetspec_training_mask_mod(2048, 16),
            "prefix 2048, blocks of 16",
        ),
    ),
    *_pair(
        "generate_natten",
        _square(36, lambda: gym.generate_natten(6, 6, 3, 3), "canvas 6 x 6, kernel 3"),
        _square(4096, lambda: gym.generate_natten(64, 64, 13, 13), "canvas 64 x 64, kernel 13"),
    ),
    *_pair(
        "generate_tiled_natten",
        _square(36, lambda: gym.generate_tiled_natten(6, 6, 3, 3, 2, 2), "6 x 6, tiles of 2"),
        _square(
            4096, lambda: gym.generate_tiled_natten(64, 64, 13, 13, 8, 8), "64 x 64, tiles of 8"
        ),
    ),
    *_pair(
        "generate_morton_natten",
        _square(64, lambda: gym.generate_morton_natten(8, 8, 3, 3), "8 x 8, kernel 3"),
        _square(4096, lambda: gym.generate_morton_natten(64, 64, 13, 13), "64 x 64, kernel 13"),
    ),
    *_pair(
        "generate_prefix_lm_mask",
        _square(12, lambda: gym.generate_prefix_lm_mask(4), "prefix 4"),
        _square(4096, lambda: gym.generate_prefix_lm_mask(1024), "prefix 1024"),
    ),
    *_pair(
        "generate_shared_prefix_mask_mod",
        _square(
            18,
            _shared([3, 2, 2, 2, 3, 2, 2, 2], [0, 0, 0, 0, 4, 4, 4, 4]),
            "8 documents, 2 prefixes",
        ),
        _square(4096, _shared([1024, *[512] * 6], [0] * 7), "1 prefix, 6 answers"),
    ),
    *_pair(
        "generate_sliding_window",
        _square(12, lambda: gym.generate_sliding_window(3), "window 3"),
        _square(4096, lambda: gym.generate_sliding_window(1024), "window 1024"),
    ),
    *_pair(
        "generate_sta_mask_mod_2d",
        _square(
            576,
            lambda: gym.generate_sta_mask_mod_2d((24, 24), (12, 12), (4, 4)),
            "24 x 24, tiles 4",
        ),
        _square(
            4096,
            lambda: gym.generate_sta_mask_mod_2d((64, 64), (24, 24), (8, 8)),
            "64 x 64, tiles 8",
        ),
    ),
    *_pair(
        "generate_sta_mask_mod_3d",
        _square(
            13824,
            lambda: gym.generate_sta_mask_mod_3d((24, 24, 24), (12, 12, 12), (4, 4, 4)),
            "24 x 24 x 24, tiles 4",
        ),
        _square(
            4096,
            lambda: gym.generate_sta_mask_mod_3d((16, 16, 16), (8, 8, 8), (4, 4, 4)),
            "16 x 16 x 16, tiles 4",
        ),
    ),
    *_pair(
        "generate_spatial_head_mask_mod",
        _square(
            142,
            lambda: gym.generate_spatial_head_mask_mod(2, 10, 14, 2, round_width=4),
            "10 frames",
        ),
        _square(
            4096, lambda: gym.generate_spatial_head_mask_mod(256, 15, 256, 2), "15 frames of 256"
        ),
    ),
    *_pair(
        "generate_temporal_head_mask_mod",
        _square(142, lambda: gym.generate_temporal_head_mask_mod(2, 10, 14, 2), "10 frames"),
        _square(
            4096, lambda: gym.generate_temporal_head_mask_mod(256, 15, 256, 2), "15 frames of 256"
        ),
    ),
    *_pair(
        "generate_vsa_mask_mod",
        _square(24, _vsa(6, 4, 2), "6 tiles of 4, top 2"),
        _square(4096, _vsa(64, 64, 16), "64 tiles of 64, top 16"),
    ),
]
"""The generators of the package, alphabetical by file, each at two sizes."""


def outcome(case: GymCase) -> str:
    """What from_mask_mod makes of a case, in words; checked cell by cell.

    Raises:
        AssertionError: The spans differ from the mask.
    """
    mask_mod = case.make()
    try:
        spans = maskgen.from_mask_mod(mask_mod, Q_LEN=case.Q_LEN, KV_LEN=case.KV_LEN)
    except maskgen.UnsupportedMaskError as error:
        if error.row is None:
            raise
        return f"refused: row {error.row[2]} has {error.count} spans"
    for q0 in range(0, case.Q_LEN, 512):
        rows = min(512, case.Q_LEN - q0)
        dense = create_mask(
            lambda b, h, q, kv, q0=q0: mask_mod(b, h, q + q0, kv), 1, 1, rows, case.KV_LEN, "cpu"
        )
        if not torch.equal(spans.crop(q=(q0, q0 + rows)).dense(), dense):
            raise AssertionError(f"{case.name} at {case.Q_LEN} x {case.KV_LEN} differs")
    return f"equal, K {spans.K}"


def main() -> None:
    """Print the table."""
    print("| generator | demonstration | outcome | real size | outcome |")
    print("|---|---|---|---|---|")
    for demo, real in zip(CASES[::2], CASES[1::2], strict=True):
        cells = []
        for case in (demo, real):
            size = f"{case.Q_LEN} x {case.KV_LEN}" + (f", {case.size}" if case.size else "")
            cells += [size, outcome(case)]
        print(f"| `{demo.name}` | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
