"""Run by test_kernels.py with TRITON_INTERPRET=1: the kernels against the CPU builder.

Triton reads that variable when it is imported, hence a process of its own. Prints one JSON line a
case: its name, how many blocks are full and partial, and the tables that differ.
"""

import json

import torch

from maskgen import TABLE_FIELDS, BlockTables, compile_mask, kernels, tables_into
from maskgen.intervals import RowIntervals


def causal(Q_LEN, KV_LEN):
    ends = torch.arange(1, Q_LEN + 1, dtype=torch.int32).clamp(max=KV_LEN).view(1, 1, 1, Q_LEN)
    return RowIntervals(torch.zeros_like(ends), ends, KV_LEN)


def everything(Q_LEN, KV_LEN):
    starts, ends = torch.zeros(2, 1, 1, 1, Q_LEN, dtype=torch.int32)
    return RowIntervals(starts, ends + KV_LEN, KV_LEN)


def drafts(B, anchors, size, context):
    """A DFlash-like mask: each row sees the context before its anchor, and its own block."""
    Q_LEN = anchors * size
    generator = torch.Generator().manual_seed(B)
    anchor = torch.randint(0, context, (B, anchors), generator=generator).sort(1).values
    block = context + torch.arange(anchors) * size
    rows = torch.arange(Q_LEN) // size
    starts = torch.stack([torch.zeros(B, Q_LEN), block[rows].expand(B, Q_LEN)], 1)
    ends = torch.stack([anchor[:, rows], (block[rows] + size).expand(B, Q_LEN)], 1)
    return RowIntervals(starts.int()[:, None], ends.int()[:, None], context + Q_LEN)


def scattered(B, H, K, Q_LEN, KV_LEN, seed, rows=24):
    """Spans that are long over neighbouring rows, with empty and reversed ones among them."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randint(0, KV_LEN + 1, (2 * K, B, H, -(-Q_LEN // rows)), generator=generator)
    points = points.sort(0).values.int().repeat_interleave(rows, 3)[..., :Q_LEN]
    starts, ends = points[0::2].permute(1, 2, 0, 3), points[1::2].permute(1, 2, 0, 3)
    empty = torch.rand(starts.shape, generator=generator) < 0.1
    return RowIntervals(torch.where(empty, KV_LEN, starts), torch.where(empty, 0, ends), KV_LEN)


CASES = {
    "causal": (causal(512, 512), 128),
    "causal ragged": (causal(300, 500), (64, 32)),
    "many columns": (causal(48, 700), 16),
    "many block rows": (causal(700, 40), (16, 16)),
    "wide rows": (causal(1024, 64), (1024, 16)),
    "odd blocks": (scattered(2, 1, 2, 200, 300, 0), (48, 112)),
    "batch and heads": (scattered(2, 3, 2, 130, 200, 1), (32, 64)),
    "many spans": (scattered(1, 1, 8, 100, 300, 2), 32),
    "long rows of spans": (scattered(1, 1, 3, 256, 700, 3, rows=256), 64),
    "drafts": (drafts(2, 32, 8, 200), 32),
    # Every cell visible: only a ragged last row or column of blocks is partial.
    "everything, ragged rows": (everything(40, 320), 16),
    "everything, ragged columns": (everything(64, 300), (32, 16)),
    "everything, both": (everything(19, 50), 16),
    "nothing": (RowIntervals(*torch.zeros(2, 1, 1, 1, 40, dtype=torch.int32), 40), 16),
    "one cell": (causal(1, 1), 16),
}


def main():
    # Small steps, so that small masks take several of them.
    kernels._COLUMNS = kernels._BLOCK_ROWS = 16
    for name, (spans, BLOCK_SIZE) in CASES.items():
        wanted = compile_mask(spans, BLOCK_SIZE)
        size = {"B": spans.B, "H": spans.H, "Q_LEN": spans.Q_LEN, "KV_LEN": spans.KV_LEN}
        found = BlockTables.empty(**size, BLOCK_SIZE=BLOCK_SIZE)
        for table in found.as_dict().values():
            table.fill_(-7)
        tables_into(found, spans.starts, spans.ends, impl="triton")
        differing = [
            field
            for field in TABLE_FIELDS
            if not torch.equal(getattr(found, field), getattr(wanted, field))
        ]
        counts = wanted.counts()
        case = {"case": name, "full": counts.full, "partial": counts.partial, "bad": differing}
        print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main()
