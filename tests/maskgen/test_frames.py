"""Frames of masks at their limits, refusals word for word, and masks of batches and heads."""

import sys

import pytest
import torch

import maskgen
from maskgen import (
    BackendUnavailableError,
    BlockTables,
    MaskSpecError,
    RowIntervals,
    UnsupportedMaskError,
    compile_mask,
    spans_mask_mod,
    tables_into,
    to_block_mask,
)
from maskgen.block_mask import check_gpu_limits


def mask_of(dense):
    """Row intervals of a dense mask bool ``[B, H, Q, KV]``, a slot for each cell that is seen."""
    dense = torch.as_tensor(dense)
    starts = torch.arange(dense.shape[3]).view(1, 1, -1, 1) * dense.transpose(2, 3)
    return RowIntervals(starts.int(), (starts + dense.transpose(2, 3)).int(), dense.shape[3])


def random_dense(B, H, Q_LEN, KV_LEN, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(B, H, Q_LEN, KV_LEN, generator=generator) < 0.5


def refusal(call):
    with pytest.raises(MaskSpecError) as caught:
        call()
    return str(caught.value)


MASK = mask_of(random_dense(1, 1, 3, 8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: MASK.crop(q=(0, 4)),
            "q = (0, 4): must be a range (a, b), 0 <= a < b <= 3",
        ),
        (lambda: MASK.crop(q=(-1, 2)), "q = (-1, 2): must be a range (a, b), 0 <= a < b <= 3"),
        (lambda: MASK.crop(kv=(3, 3)), "kv = (3, 3): must be a range (a, b), 0 <= a < b <= 8"),
        (lambda: MASK.crop(kv=(5, 3)), "kv = (5, 3): must be a range (a, b), 0 <= a < b <= 8"),
        (lambda: MASK.pad_to(Q_LEN=2), "Q_LEN = 2: padding cannot go below 3; use crop()"),
        (lambda: MASK.pad_to(KV_LEN=7), "KV_LEN = 7: padding cannot go below 8; use crop()"),
        (
            lambda: MASK.pad_to(Q_LEN=2**31),
            "Q_LEN = 2147483648: a length must be below 2**31: spans are int32",
        ),
        (
            lambda: MASK & MASK.crop(kv=(0, 7)),
            "KV_LEN = 7: both masks of & must have one KV_LEN, 8 here",
        ),
        (
            lambda: MASK | MASK.crop(q=(0, 2)),
            "Q_LEN = 2: both masks of | must have one Q_LEN, 3 here",
        ),
        (
            lambda: RowIntervals.concat([MASK, MASK, MASK.crop(q=(0, 2))], "kv"),
            "Q_LEN = 2: both masks of concat must have one Q_LEN, 3 here",
        ),
        (
            lambda: RowIntervals.concat([MASK, MASK, MASK.crop(kv=(0, 2))], "q"),
            "KV_LEN = 2: both masks of concat must have one KV_LEN, 8 here",
        ),
        (lambda: RowIntervals.concat([], "q"), "masks = []: concat needs at least one mask"),
        (lambda: RowIntervals.concat([MASK], "x"), 'dim = \'x\': must be "q" or "kv"'),
        (
            lambda: mask_of(random_dense(2, 1, 3, 8)) & mask_of(random_dense(3, 1, 3, 8)),
            "B = 3: must be 2 as in the other mask of &, or 1",
        ),
        (
            lambda: mask_of(random_dense(1, 2, 3, 8)) | mask_of(random_dense(1, 3, 3, 8)),
            "H = 3: must be 2 as in the other mask of |, or 1",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    assert refusal(call) == message


def test_ranges_and_lengths_at_their_limits():
    dense = MASK.dense()
    assert torch.equal(MASK.crop().dense(), dense)
    assert torch.equal(MASK.crop(q=(0, 3), kv=(0, 8)).dense(), dense)
    assert torch.equal(MASK.crop(q=(2, 3), kv=(7, 8)).dense(), dense[..., 2:, 7:])
    assert MASK.pad_to(Q_LEN=3, KV_LEN=8).equals(MASK)
    assert MASK.pad_to(KV_LEN=2**31 - 1).shape == (1, 1, 3, 2**31 - 1)
    padded = MASK.pad_to(Q_LEN=5, KV_LEN=9).dense()
    assert torch.equal(padded, torch.nn.functional.pad(dense, (0, 1, 0, 2)))
    for q, kv in ((3, 0), (-3, 0), (0, 8), (0, -8), (9, 99), (-9, -99)):
        assert not MASK.shift(q=q, kv=kv).dense().any()
    assert torch.equal(MASK.shift(q=2).dense()[..., 2, :], dense[..., 0, :])
    assert torch.equal(MASK.shift(q=-2).dense()[..., 0, :], dense[..., 2, :])
    assert torch.equal(MASK.shift(kv=7).dense()[..., 7], dense[..., 0])
    assert MASK.shift().equals(MASK)


def test_masks_of_batches_and_heads_are_combined():
    a, b = random_dense(2, 1, 4, 7, 1), random_dense(1, 3, 4, 7, 2)
    A, B = mask_of(a), mask_of(b)
    for found, wanted in (
        (A & B, a & b),
        (A | B, a | b),
        (~A, ~a),
        (A.crop(q=(1, 3), kv=(2, 6)), a[:, :, 1:3, 2:6]),
        (A.shift(q=1), torch.cat([torch.zeros(2, 1, 1, 7).bool(), a[:, :, :-1]], 2)),
        (
            RowIntervals.concat([A, B], "q"),
            torch.cat([a.expand(2, 3, 4, 7), b.expand(2, 3, 4, 7)], 2),
        ),
        (
            RowIntervals.concat([A, B, A], "kv"),
            torch.cat([x.expand(2, 3, 4, 7) for x in (a, b, a)], 3),
        ),
    ):
        assert found.shape == tuple(wanted.shape)
        assert torch.equal(found.dense(), wanted)
        assert found.is_canonical
        assert torch.equal(found.row_counts(), wanted.sum(3).int())
    one = mask_of(a[:1].expand(2, 1, 4, 7))
    assert (one.B, one.canonical().B) == (2, 1)
    assert one.equals(mask_of(a[:1]))
    assert not A.equals(mask_of(a[:1]))


def test_a_span_that_leaves_the_columns_is_named_with_its_row():
    starts = torch.zeros(2, 3, 2, 4, dtype=torch.int32)
    ends = starts + 9
    assert RowIntervals(starts, ends, 9).KV_LEN == 9
    ends[1, 2, 1, 3] = 10
    assert refusal(lambda: RowIntervals(starts, ends, 9)) == (
        "(starts, ends) = (0, 10): span 1 of row (b=1, h=2, q=3) must lie inside [0, KV_LEN=9)"
    )
    ends[1, 2, 1, 3], starts[0, 1, 0, 2] = 9, -1
    assert refusal(lambda: RowIntervals(starts, ends, 9)) == (
        "(starts, ends) = (-1, 9): span 0 of row (b=0, h=1, q=2) must lie inside [0, KV_LEN=9)"
    )


def test_what_is_picked_of_a_batch_keeps_its_order():
    dense = random_dense(4, 2, 3, 6, 5)
    mask = mask_of(dense)
    picked = mask.select(torch.tensor([3, 0, 3]))
    assert torch.equal(picked.dense(), dense[[3, 0, 3]])
    assert picked.K == mask.K
    tables = compile_mask(mask, 16)
    for name, table in tables.select(torch.tensor([3, 0, 3])).as_dict().items():
        assert torch.equal(table, getattr(tables, name)[[3, 0, 3]]), name


def test_what_is_moved_is_known_to_be_canonical_or_not():
    assert MASK.to("cpu").is_canonical == MASK.is_canonical
    canonical = MASK.canonical()
    assert canonical.to("meta").is_canonical
    assert canonical.to("meta").device.type == "meta"
    assert canonical.disjoint() is canonical
    touching = RowIntervals(
        torch.tensor([0, 2]).int().view(1, 1, 2, 1), torch.tensor([2, 4]).int().view(1, 1, 2, 1), 4
    )
    # They share no key, so tables take them as they are.
    assert touching.disjoint() is touching
    overlapping = RowIntervals(touching.starts, touching.ends.clamp(min=3), 4)
    assert overlapping.disjoint().starts.flatten().tolist() == [0]
    assert overlapping.disjoint().ends.flatten().tolist() == [4]


@pytest.mark.parametrize(("B", "H"), [(2, 1), (1, 3), (2, 3)])
def test_spans_of_one_batch_row_or_head_serve_tables_of_more(B, H):
    dense = random_dense(B, H, 20, 40, 7)
    tables = compile_mask(mask_of(dense), (16, 32))
    one = mask_of(dense[:1, :1])
    block_mask = to_block_mask(tables, one)
    assert block_mask.shape == (B, H, 20, 40)
    assert to_block_mask(compile_mask(one, 16), mask_of(dense)).shape == (1, 1, 20, 40)
    other = (
        mask_of(random_dense(B + 1, H, 20, 40)) if B > 1 else mask_of(random_dense(1, 4, 20, 40))
    )
    field, found, wanted = ("B", B + 1, B) if B > 1 else ("H", 4, H)
    assert refusal(lambda: to_block_mask(tables, other)) == (
        f"spans.{field} = {found}: the tables have {field}={wanted}"
    )


def test_a_block_mask_takes_every_table_to_its_own_place():
    dense = random_dense(1, 1, 70, 50, 3)
    dense[..., :32, :32] = True
    dense[..., 48:, 16:] = False
    mask = mask_of(dense)
    tables = compile_mask(mask, 16)
    block_mask = to_block_mask(tables, mask)
    values = [getattr(block_mask, name) for name in tables.as_dict()]
    assert all(a is b for a, b in zip(values, tables.as_dict().values(), strict=True))
    assert block_mask.seq_lengths == (70, 50)
    assert block_mask.BLOCK_SIZE == (16, 16)


@pytest.mark.parametrize(
    ("size", "lengths", "message"),
    [
        (
            (128, 64),
            (256, 256),
            "both sizes of BLOCK_SIZE must be multiples of 128 on a GPU with torch below 2.14 (its "
            "default backward tiles are 64 x 128 and 128 x 64), but BLOCK_SIZE is (128, 64) and "
            "torch 2.13.0: compile the mask with BLOCK_SIZE=128",
        ),
        (
            (128, 256),
            (256, 384),
            "lengths that are multiples of 128 must be multiples of BLOCK_SIZE too on a GPU with "
            "torch below 2.14 (it leaves out bounds checks), but Q_LEN=256, KV_LEN=384, "
            "BLOCK_SIZE=(128, 256) and torch 2.13.0: compile with BLOCK_SIZE=128",
        ),
    ],
)
def test_what_an_older_torch_cannot_run_is_said_in_full(size, lengths, message):
    with pytest.raises(UnsupportedMaskError) as caught:
        check_gpu_limits(size, *lengths, "2.13.0")
    assert str(caught.value) == message
    # Where one length is no multiple of 128, bounds are checked.
    check_gpu_limits((128, 256), 256, 300, "2.13.0")
    check_gpu_limits((256, 128), 300, 256, "2.13.0")


def test_block_sizes_at_their_limits():
    dense = random_dense(1, 1, 20, 40)
    for size in (16, 1024, (16, 1024), (1024, 16), [48, 16]):
        found = compile_mask(mask_of(dense), size).BLOCK_SIZE
        assert found == ((size, size) if isinstance(size, int) else tuple(size))
    assert compile_mask(mask_of(dense)).BLOCK_SIZE == (128, 128)
    assert BlockTables.empty(Q_LEN=4, KV_LEN=4).BLOCK_SIZE == (128, 128)
    assert refusal(lambda: compile_mask(mask_of(dense), (16, 1040))) == (
        "BLOCK_SIZE = (16, 1040): must be one or two multiples of 16 up to 1024"
    )


def test_too_many_spans_name_the_row_of_its_head():
    dense = torch.zeros(2, 2, 3, 70, dtype=torch.bool)
    dense[1, 0, 2, : 2 * 32 : 2] = True
    compile_mask(mask_of(dense), 16)
    dense[1, 0, 2, 66] = True
    dense[1, 1, 0, ::2] = True
    with pytest.raises(UnsupportedMaskError) as caught:
        compile_mask(mask_of(dense), 16)
    assert str(caught.value) == (
        "a row may have at most 32 spans of visible keys, but row (b=1, h=0, q=2) has 33; "
        "such scattered masks need create_block_mask"
    )
    assert caught.value.row == (1, 0, 2)


def test_buffers_take_the_tables_of_each_batch_row_and_head():
    dense = random_dense(2, 3, 50, 70, 9)
    dense[1, 2, :32, :64] = True
    mask = mask_of(dense)
    tables = BlockTables.empty(B=2, H=3, Q_LEN=50, KV_LEN=70, BLOCK_SIZE=(16, 32))
    tables_into(tables, mask.starts, mask.ends)
    padded = torch.nn.functional.pad(dense, (0, 96 - 70, 0, 64 - 50)).view(2, 3, 4, 16, 3, 32)
    sums = padded.sum((3, 5))
    kinds = (sums > 0).int() + (sums == 512).int()
    assert torch.equal(tables.block_kinds().int(), kinds)
    assert torch.equal(tables.block_kinds(), compile_mask(mask, (16, 32)).block_kinds())
    assert tables.full_kv_num_blocks[1, 2].tolist() == [2, 2, 0, 0]
    assert tables.full_q_num_blocks[1, 2].tolist() == [2, 2, 0]
    counts = tables.counts()
    assert [counts.empty, counts.partial, counts.full] == kinds.flatten().bincount().tolist()
    assert counts.total == kinds.numel()
    mask_mod = spans_mask_mod(mask.starts, mask.ends)
    b, h, q, kv = torch.meshgrid(*map(torch.arange, dense.shape), indexing="ij")
    assert torch.equal(mask_mod(b, h, q, kv), dense)


@pytest.mark.parametrize("field", ["B", "H", "Q_LEN", "KV_LEN"])
def test_buffers_have_at_least_one_of_everything(field):
    size = {"B": 1, "H": 1, "Q_LEN": 1, "KV_LEN": 1}
    assert BlockTables.empty(**size).counts().total == 1
    for value in (0, 2**31):
        assert refusal(lambda value=value: BlockTables.empty(**{**size, field: value})) == (
            f"{field} = {value}: must be at least 1 and below 2**31"
        )


def test_blocks_are_counted_over_batch_and_heads():
    size = {"Q_LEN": 2**19, "KV_LEN": 2**19, "BLOCK_SIZE": 16, "device": "meta"}
    assert BlockTables.empty(**size).kv_indices.numel() == 2**30
    for more in ({"B": 2}, {"H": 2}):
        assert refusal(lambda more=more: BlockTables.empty(**size, **more)) == (
            "blocks = 2147483648: "
            "B * H * R * C must be below 2**31 (kernels index in 32 bits): use larger blocks"
        )


@pytest.mark.parametrize(
    ("starts", "ends", "message"),
    [
        (
            torch.zeros(2, 3, 1, 40).int(),
            torch.zeros(2, 3, 1, 40),
            "ends = ((2, 3, 1, 40), torch.float32): must be contiguous int32 [B, H, K, Q_LEN]",
        ),
        (
            torch.zeros(2, 3, 1, 40).int(),
            torch.zeros(2, 3, 2, 40).int(),
            "ends.shape = (2, 3, 2, 40): must equal the shape of starts, (2, 3, 1, 40)",
        ),
        (
            torch.zeros(3, 3, 1, 40).int(),
            torch.zeros(3, 3, 1, 40).int(),
            "starts.shape = (3, 3, 1, 40): "
            "must be [B, H, K, Q_LEN] with B, H, Q_LEN of the tables, (2, 3, 40)",
        ),
        (
            torch.zeros(2, 3, 1, 40).int(),
            torch.zeros(2, 1, 1, 40).int(),
            "ends.shape = (2, 1, 1, 40): "
            "must be [B, H, K, Q_LEN] with B, H, Q_LEN of the tables, (2, 3, 40)",
        ),
        (
            torch.zeros(2, 3, 1, 41).int(),
            torch.zeros(2, 3, 1, 41).int(),
            "starts.shape = (2, 3, 1, 41): "
            "must be [B, H, K, Q_LEN] with B, H, Q_LEN of the tables, (2, 3, 40)",
        ),
    ],
)
def test_spans_of_other_buffers_are_named(starts, ends, message):
    tables = BlockTables.empty(B=2, H=3, Q_LEN=40, KV_LEN=30, BLOCK_SIZE=16)
    assert refusal(lambda: tables_into(tables, starts, ends)) == message


def test_a_kernel_needs_triton_and_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "maskgen.kernels", raising=False)
    monkeypatch.delattr(maskgen, "kernels", raising=False)
    tables = BlockTables.empty(Q_LEN=16, KV_LEN=16, BLOCK_SIZE=16)
    spans = torch.zeros(1, 1, 1, 16, dtype=torch.int32)
    # The host builder is what the CPU takes.
    tables_into(tables, spans, spans + 1)
    assert tables.kv_num_blocks.tolist() == [[[1]]]
    with pytest.raises(BackendUnavailableError) as caught:
        tables_into(tables, spans, spans, impl="triton")
    assert str(caught.value) == (
        "tables_into on a GPU needs triton, which is not installed: pip install 'triton>=3.6'"
    )
