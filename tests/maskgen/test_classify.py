import numpy as np
import pytest
import torch

from maskgen import classify


def spans(*rows):
    """``[1, 1, K, Q]`` spans from rows of (start, end)."""
    points = torch.tensor([list(row) for row in rows], dtype=torch.int32)
    return [points[:, :, i].T[None, None].contiguous() for i in (0, 1)]


def test_a_drawn_mask():
    # Blocks of 16 x 16 over 20 rows x 40 keys: rows 0-15 see [0, 24), rows 16-19 see [16, 40).
    starts, ends = spans(*[[(0, 24)]] * 16, *[[(16, 40)]] * 4)
    kinds = classify.block_kinds(starts, ends, 40, (16, 16))
    # The last block row has 4 rows only and the last column 8 keys: neither can be full.
    assert kinds[0, 0].tolist() == [[2, 1, 0], [0, 1, 1]]
    counts, indices = torch.full((1, 1, 2), 9, dtype=torch.int32), torch.full((1, 1, 2, 3), 9).int()
    classify.fill_tables(kinds, classify.PARTIAL, counts, indices)
    assert counts.tolist() == [[[1, 2]]]
    assert indices.tolist() == [[[[1, 0, 0], [1, 2, 0]]]]
    classify.fill_tables(kinds, classify.FULL, counts, indices)
    assert counts.tolist() == [[[1, 0]]]
    assert indices.tolist() == [[[[0, 0, 0], [0, 0, 0]]]]


def test_two_halves_of_a_block_by_two_spans_make_it_full():
    starts, ends = spans(*[[(8, 16), (0, 8)]] * 16)
    assert classify.block_kinds(starts, ends, 16, (16, 16)).tolist() == [[[[2]]]]


@pytest.mark.parametrize("reversed_span", [(12, 3), (20, 0), (16, 15)])
def test_a_span_that_ends_before_it_starts_counts_nothing(reversed_span):
    # One row sees one cell of the first block; what the others say must not take it away.
    starts, ends = spans(*[[reversed_span]] * 15, [(5, 6)])
    assert classify.block_kinds(starts, ends, 32, (16, 16)).tolist() == [[[[1, 0]]]]


def dense_kinds(starts, ends, KV_LEN, BLOCK_SIZE):
    kv = torch.arange(KV_LEN)
    dense = ((kv >= starts[..., None]) & (kv < ends[..., None])).any(2).numpy()
    QB, KB = BLOCK_SIZE
    pad = [(0, 0), (0, 0), (0, -dense.shape[2] % QB), (0, -dense.shape[3] % KB)]
    padded = np.pad(dense, pad)
    B, H, Q, KV = padded.shape
    sums = padded.reshape(B, H, Q // QB, QB, KV // KB, KB).sum((3, 5))
    return torch.from_numpy((sums > 0).astype(np.uint8) + (sums == QB * KB))


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 18])
def test_pieces_of_any_size_give_the_dense_kinds(piece, monkeypatch):
    monkeypatch.setattr(classify, "_PIECE", piece)
    generator = torch.Generator().manual_seed(7)
    for B, H, Q_LEN, KV_LEN, BLOCK_SIZE in (
        (1, 1, 100, 130, (16, 16)),
        (3, 2, 70, 90, (16, 48)),
        (2, 1, 200, 64, (32, 64)),
        (1, 3, 33, 200, (64, 80)),
    ):
        # Sorted quadruples are two disjoint spans; many long ones, so that full blocks occur.
        points = torch.randint(0, KV_LEN + 1, (4, B, H, Q_LEN // 20 + 1), generator=generator)
        points = points.sort(0).values.int().repeat_interleave(20, 3)[..., :Q_LEN]
        starts, ends = points[[0, 2]].permute(1, 2, 0, 3), points[[1, 3]].permute(1, 2, 0, 3)
        starts, ends = starts.contiguous(), ends.contiguous()
        kinds = classify.block_kinds(starts, ends, KV_LEN, BLOCK_SIZE)
        assert torch.equal(kinds, dense_kinds(starts, ends, KV_LEN, BLOCK_SIZE))
        for kind in (classify.PARTIAL, classify.FULL):
            counts = torch.empty(kinds.shape[:3], dtype=torch.int32)
            indices = torch.full(kinds.shape, -1, dtype=torch.int32)
            classify.fill_tables(kinds, kind, counts, indices)
            for row, count, listed in zip(
                kinds.view(-1, kinds.shape[3]),
                counts.view(-1),
                indices.view(-1, kinds.shape[3]),
                strict=True,
            ):
                wanted = (row == kind).nonzero().view(-1).tolist()
                assert count == len(wanted)
                assert listed.tolist() == wanted + [0] * (len(row) - len(wanted))
