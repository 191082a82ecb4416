import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import maskgen
from maskgen import (
    MAX_INTERVALS,
    MaskSpecError,
    RowIntervals,
    UnsupportedMaskError,
    from_mask_mod,
    spans_mask_mod,
)
from maskgen import mask_mod as mask_mod_file

DOCS = torch.tensor([0] * 7 + [1] * 20 + [2] * 13, dtype=torch.int32)
LENGTHS = torch.tensor([5, 31], dtype=torch.int32)
TILES = torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.5
NEAR = torch.arange(40) < torch.tensor([0, 2, 5])[:, None]


def document(b, h, q, kv):
    return (DOCS[q] == DOCS[kv]) & (q >= kv)


def by_batch_and_head(b, h, q, kv):
    return (kv < LENGTHS[b]) & (kv >= 2 * h) | ((q - kv).abs() < 2)


def stripes(b, h, q, kv):
    return (kv + q) % 4 < 2


def by_tables(b, h, q, kv):
    return TILES[b, q // 8, kv // 8] | NEAR[h][(q - kv).abs()]


@pytest.mark.parametrize("mask_mod", [document, by_batch_and_head, stripes, by_tables])
@pytest.mark.parametrize("rows", [13, 40])
@pytest.mark.parametrize("cached", [1, 1 << 20])
def test_spans_of_a_mask_mod_equal_its_dense_mask(mask_mod, rows, cached, monkeypatch):
    monkeypatch.setattr(mask_mod_file, "_CACHED_CELLS", cached)
    spans = from_mask_mod(mask_mod, 2, 3, Q_LEN=40, KV_LEN=40, budget_bytes=rows * 40 * 32)
    dense = create_mask(mask_mod, 2, 3, 40, 40, device="cpu")
    assert spans.is_canonical
    assert torch.equal(spans.dense().expand(2, 3, 40, 40), dense)
    expected = (2, 3) if mask_mod in (by_batch_and_head, by_tables) else (1, 1)
    assert expected == (spans.B, spans.H)


@pytest.mark.parametrize("mask_mod", [document, stripes])
def test_the_changes_found_by_torch_and_by_numpy_are_the_same(mask_mod):
    tile = create_mask(mask_mod, 1, 1, 40, 40, device="cpu")[0, 0]
    K, *by_torch = mask_mod_file._changes(tile)
    wanted_K, *by_numpy = mask_mod_file._changes_on_cpu(tile)
    assert wanted_K == K
    assert all(map(torch.equal, by_torch, by_numpy))


@pytest.mark.gpu
def test_a_mask_mod_on_a_gpu_gives_the_same_spans():
    docs, tiles = DOCS.cuda(), TILES.cuda()

    def on_gpu(b, h, q, kv):
        return ((docs[q] == docs[kv]) & (q >= kv)) | tiles[b, q // 8, kv // 8]

    def on_cpu(b, h, q, kv):
        return document(b, h, q, kv) | TILES[b, q // 8, kv // 8]

    size = {"Q_LEN": 40, "KV_LEN": 40, "budget_bytes": 13 * 40 * 32}
    spans = from_mask_mod(on_gpu, 2, **size, device="cuda")
    assert spans.device.type == "cuda"
    assert spans.to("cpu").equals(from_mask_mod(on_cpu, 2, **size))
    with pytest.raises(UnsupportedMaskError, match=r"row \(b=0, h=0, q=17\) has 33"):
        from_mask_mod(comb, 2, Q_LEN=100, KV_LEN=80, device="cuda")


def test_b_and_h_are_0_when_they_are_none():
    seen = from_mask_mod(by_batch_and_head, Q_LEN=6, KV_LEN=40)
    wanted = create_mask(by_batch_and_head, None, None, 6, 40, device="cpu")
    assert torch.equal(seen.dense(), wanted)


def test_a_mask_mod_that_reads_no_index():
    nothing = from_mask_mod(lambda b, h, q, kv: q < 0, Q_LEN=5, KV_LEN=7)
    assert not nothing.dense().any()
    assert nothing.K == 1
    everything = from_mask_mod(lambda b, h, q, kv: b == 0, 2, Q_LEN=5, KV_LEN=7)
    assert everything.row_counts()[:, 0, 0].tolist() == [7, 0]


def comb(b, h, q, kv):
    return (kv % 2 == 0) & ((q < 11) | (b == 0)) & (kv < 2 * MAX_INTERVALS + 2 * (q == 17))


@pytest.mark.parametrize("cells", ["numpy", "torch"])
def test_a_row_of_just_the_largest_number_of_spans_is_taken(cells, monkeypatch):
    if cells == "torch":
        monkeypatch.setattr(mask_mod_file, "_changes_on_cpu", mask_mod_file._changes)
    # A row at a time: none may be the last that is looked at.
    monkeypatch.setattr(mask_mod_file, "_CACHED_CELLS", 64)
    spans = from_mask_mod(lambda b, h, q, kv: (kv % 2 == 0) & (q > 0), Q_LEN=3, KV_LEN=64)
    assert spans.K == MAX_INTERVALS == 32
    assert spans.row_counts().tolist() == [[[0, 32, 32]]]


@pytest.mark.parametrize("cells", ["numpy", "torch"])
def test_evaluation_stops_at_the_first_row_over_the_limit(cells, monkeypatch):
    if cells == "torch":
        monkeypatch.setattr(mask_mod_file, "_changes_on_cpu", mask_mod_file._changes)
    calls = []

    def counted(b, h, q, kv):
        calls.append(1)
        return comb(b, h, q, kv)

    with pytest.raises(UnsupportedMaskError, match=r"row \(b=0, h=0, q=17\) has 33") as info:
        from_mask_mod(counted, 2, Q_LEN=100, KV_LEN=80, budget_bytes=10 * 80 * 32)
    assert (info.value.row, info.value.count, info.value.limit) == ((0, 0, 17), 33, MAX_INTERVALS)
    assert len(calls) == 2


def raising(b, h, q, kv):
    raise ZeroDivisionError("no such mask")


@pytest.mark.parametrize(
    ("mask_mod", "message"),
    [
        (lambda b, h, q, kv: (q - kv) / 2.0, "must return one boolean a cell, not torch.float32"),
        (lambda b, h, q, kv: q - kv, "must return one boolean a cell, not torch.int64"),
        (lambda b, h, q, kv: (q >= kv)[None], r"one boolean a cell, not torch.bool of shape"),
        (lambda b, h, q, kv: torch.ones(3).bool() & (q >= kv), r"one boolean a cell, not torch"),
        (lambda b, h, q, kv: True, "must run under torch.vmap, but raised"),
        (lambda b, h, q, kv: q >= kv and q >= 0, "must run under torch.vmap, but raised"),
        (raising, "but raised ZeroDivisionError: no such mask"),
        (lambda score, b, h, q, kv: score, r"must take \(b, h, q_idx, kv_idx\)"),
        (lambda b, h: b, r"must take \(b, h, q_idx, kv_idx\)"),
        ("causal", "must be callable"),
    ],
)
def test_bad_mask_mods_are_refused(mask_mod, message):
    with pytest.raises(MaskSpecError, match=message) as info:
        from_mask_mod(mask_mod, Q_LEN=4, KV_LEN=4)
    assert info.value.field == "mask_mod"


@pytest.mark.parametrize(
    ("field", "sizes"),
    [
        ("B", {"B": 0}),
        ("H", {"H": -1}),
        ("Q_LEN", {"Q_LEN": 0}),
        ("KV_LEN", {"KV_LEN": 0}),
        ("budget_bytes", {"budget_bytes": 100}),
        ("budget_bytes", {"budget_bytes": 1.5e8}),
        ("Q_LEN", {"Q_LEN": 4.0}),
        ("B", {"B": True}),
        ("KV_LEN", {"KV_LEN": "4"}),
        (r"B \* H \* Q_LEN", {"B": 2, "Q_LEN": 2**30}),
    ],
)
def test_bad_sizes_are_refused(field, sizes):
    with pytest.raises(MaskSpecError, match=f"{field} = ") as info:
        from_mask_mod(document, **({"Q_LEN": 4, "KV_LEN": 4} | sizes))
    assert info.value.field == field.replace("\\", "")


@pytest.mark.parametrize(("B", "H"), [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("K", [1, 3])
def test_the_mask_mod_of_spans_equals_them(B, H, K):
    generator = torch.Generator().manual_seed(K)
    starts, ends = torch.randint(0, 20, (2, B, H, K, 12), generator=generator, dtype=torch.int32)
    spans = RowIntervals(starts, ends, 20)
    dense = create_mask(spans_mask_mod(starts, ends), B, H, 12, 20, device="cpu")
    assert torch.equal(dense, spans.dense())


def test_spans_of_batch_and_head_1_serve_every_batch_and_head():
    starts, ends = torch.zeros(1, 1, 1, 4).int(), torch.arange(4).int().view(1, 1, 1, 4)
    dense = create_mask(spans_mask_mod(starts, ends), 3, 2, 4, 4, device="cpu")
    assert torch.equal(dense, RowIntervals(starts, ends, 4).dense().expand(3, 2, 4, 4))


def test_masks_of_equal_shapes_share_one_compiled_function():
    counter = CompileCounter()
    index = torch.arange(4)

    @torch.compile(backend=counter, fullgraph=True)
    def evaluate(mask_mod, q_idx):
        return mask_mod(None, None, q_idx[:, None], q_idx[None])

    for shift in range(5):
        starts = torch.zeros(1, 1, 2, 4).int()
        ends = starts + shift
        dense = evaluate(spans_mask_mod(starts, ends), index)
        assert torch.equal(dense[None, None], RowIntervals(starts, ends, 4).dense())
    assert counter.frame_count == 1


def test_lengths_may_be_numpys_integers():
    length = np.int64(8)
    causal = maskgen.causal(8, 8)
    assert maskgen.causal(length, np.int32(8)).equals(causal)
    found = maskgen.from_mask_mod(lambda b, h, q, kv: q >= kv, Q_LEN=length, KV_LEN=length)
    assert found.equals(causal)


@pytest.mark.parametrize("B", [None, 1, 2])
def test_arguments_stand_in_the_order_of_create_block_mask(B):
    mask_mod = lambda b, h, q, kv: (q >= kv) & (kv >= b)  # noqa: E731
    spans = maskgen.from_mask_mod(mask_mod, B, None, 20, 30, "cpu")
    theirs = create_block_mask(mask_mod, B, None, 20, 30, "cpu", 16)
    ours = maskgen.to_block_mask(maskgen.compile_mask(spans, 16), spans)
    dense = create_mask(mask_mod, B, None, 20, 30, "cpu")
    assert torch.equal(spans.dense(), dense)
    assert torch.equal(ours.to_dense(), theirs.to_dense())


@pytest.mark.parametrize("size", [{"Q_LEN": 4}, {"KV_LEN": 4}, {}])
def test_lengths_are_required(size):
    with pytest.raises(MaskSpecError, match="_LEN = None: must be an integer of at least 1"):
        maskgen.from_mask_mod(lambda b, h, q, kv: q >= kv, **size)


@pytest.mark.parametrize("builtin", [torch.ge, torch.where, max, dict, print])
def test_a_builtin_is_refused_as_any_other_function(builtin):
    with pytest.raises(MaskSpecError, match="mask_mod = "):
        maskgen.from_mask_mod(builtin, None, None, 4, 4)


@pytest.mark.parametrize("KV_LEN", [1, 7, 40])
def test_a_budget_of_just_one_row_is_enough(KV_LEN):
    mask_mod = lambda b, h, q, kv: (q >= kv) & (kv >= b) & (kv + h != q)  # noqa: E731
    size = {"Q_LEN": 11, "KV_LEN": KV_LEN}
    found = from_mask_mod(mask_mod, 2, 2, **size, budget_bytes=32 * KV_LEN)
    assert torch.equal(found.dense(), create_mask(mask_mod, 2, 2, 11, KV_LEN, device="cpu"))
    with pytest.raises(MaskSpecError) as caught:
        from_mask_mod(mask_mod, 2, 2, **size, budget_bytes=32 * KV_LEN - 1)
    rule = f"one row of KV_LEN={KV_LEN} takes {32 * KV_LEN} bytes"
    assert str(caught.value) == f"budget_bytes = {32 * KV_LEN - 1}: {rule}"


def test_a_mask_mod_that_is_refused_is_named():
    def wrong(b, h, q, kv):
        return q - kv

    with pytest.raises(MaskSpecError) as caught:
        from_mask_mod(wrong, Q_LEN=3, KV_LEN=4)
    assert caught.value.value == wrong.__qualname__
    assert caught.value.rule == (
        "must return one boolean a cell, not torch.int64 of shape (1, 1, 3, 4) for cells of shape "
        "(1, 1, 3, 4)"
    )


def test_the_row_over_the_limit_is_that_of_its_batch_and_head():
    def late(b, h, q, kv):
        return (kv % 2 == 0) & (q == 5) & (b == 1) & (h == 2)

    with pytest.raises(UnsupportedMaskError) as caught:
        from_mask_mod(late, 2, 3, Q_LEN=9, KV_LEN=70, budget_bytes=4 * 70 * 32)
    assert (caught.value.row, caught.value.count, caught.value.limit) == ((1, 2, 5), 35, 32)
