import dataclasses
import random
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from maskgen import (
    TABLE_FIELDS,
    BlockTables,
    LayoutInvariantError,
    MaskSpecError,
    RowIntervals,
    compile_mask,
    spans_mask_mod,
    tables_into,
)

EMPTY_MASK = RowIntervals(*torch.zeros(2, 1, 1, 1, 40, dtype=torch.int32), 40)


def causal(Q_LEN, KV_LEN, B=1):
    ends = torch.arange(1, Q_LEN + 1, dtype=torch.int32).clamp(max=KV_LEN).expand(B, 1, 1, Q_LEN)
    return RowIntervals(torch.zeros_like(ends), ends, KV_LEN)


def check_equal_to_torch(tables, mask_mod, B, H):
    """Counts and live indices equal create_block_mask's, and tails are zero."""
    size = (tables.Q_LEN, tables.KV_LEN)
    wanted = create_block_mask(mask_mod, B, H, *size, device="cpu", BLOCK_SIZE=tables.BLOCK_SIZE)
    for counts_name, indices_name in zip(TABLE_FIELDS[::2], TABLE_FIELDS[1::2], strict=True):
        counts, indices = getattr(wanted, counts_name), getattr(wanted, indices_name)
        assert torch.equal(getattr(tables, counts_name), counts), counts_name
        live = torch.arange(indices.shape[-1]) < counts[..., None]
        found = getattr(tables, indices_name)
        assert torch.equal(found, torch.where(live, indices, 0)), indices_name
        assert found.is_contiguous()


@st.composite
def disjoint_spans(draw):
    """Spans that are long over neighbouring rows, so that all kinds of blocks occur."""
    B, H, K = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])), draw(st.integers(1, 3))
    Q_LEN, KV_LEN = draw(st.integers(1, 200)), draw(st.integers(1, 200))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    steps = -(-Q_LEN // 24)
    points = torch.randint(0, KV_LEN + 1, (2 * K, B, H, steps), generator=generator)
    points = points.sort(0).values.int().repeat_interleave(24, 3)[..., :Q_LEN]
    starts = points[0::2].permute(1, 2, 0, 3).contiguous()
    return RowIntervals(starts, points[1::2].permute(1, 2, 0, 3).contiguous(), KV_LEN)


@settings(deadline=None, max_examples=40)
@given(disjoint_spans(), st.sampled_from([16, 32, (16, 48), (64, 32), 128, (48, 1024)]))
def test_tables_equal_create_block_mask(spans, BLOCK_SIZE):
    tables = compile_mask(spans, BLOCK_SIZE)
    mask_mod = spans_mask_mod(spans.starts, spans.ends)
    check_equal_to_torch(tables, mask_mod, spans.B, spans.H)


@pytest.mark.parametrize(
    ("Q_LEN", "KV_LEN", "BLOCK_SIZE"),
    [
        (512, 512, 128),
        (250, 250, 128),
        (512, 1024, (256, 128)),
        (1030, 600, (128, 512)),
        (1, 1, 16),
    ],
)
def test_causal_equals_create_block_mask(Q_LEN, KV_LEN, BLOCK_SIZE):
    tables = compile_mask(causal(Q_LEN, KV_LEN), BLOCK_SIZE)
    check_equal_to_torch(tables, lambda b, h, q, kv: q >= kv, None, None)


def test_a_ragged_last_block_is_never_full():
    spans = ~RowIntervals(*torch.zeros(2, 1, 1, 1, 250, dtype=torch.int32), 250)
    tables = compile_mask(spans, 128)
    assert tables.full_kv_num_blocks.tolist() == [[[1, 0]]]
    assert tables.kv_num_blocks.tolist() == [[[1, 2]]]
    assert tables.counts() == dataclasses.replace(tables.counts(), full=1, partial=3, empty=0)


def test_the_stored_rectangular_layout_of_causal_512():
    tables = compile_mask(causal(512, 512), (256, 128))
    assert tables.kv_num_blocks.tolist() == [[[2, 2]]]
    assert tables.kv_indices[0, 0, :, :2].tolist() == [[0, 1], [2, 3]]
    assert tables.full_kv_num_blocks.tolist() == [[[0, 2]]]


def test_overlapping_spans_are_not_counted_twice():
    starts = torch.tensor([0, 4], dtype=torch.int32).view(1, 1, 2, 1).expand(1, 1, 2, 16)
    ends = torch.tensor([12, 16], dtype=torch.int32).view(1, 1, 2, 1).expand(1, 1, 2, 16)
    tables = compile_mask(RowIntervals(starts, ends, 32), 16)
    assert tables.full_kv_num_blocks.tolist() == [[[1]]]
    assert tables.kv_num_blocks.tolist() == [[[0]]]


def test_rows_that_see_nothing():
    tables = compile_mask(EMPTY_MASK, 16)
    assert all(not table.any() for table in tables.as_dict().values())
    assert (tables.counts().empty, tables.counts().total) == (9, 9)


@pytest.mark.parametrize("K", [1, 3])
def test_spans_that_end_before_they_start_are_empty(K):
    starts = torch.full((1, 1, K, 40), 30, dtype=torch.int32)
    ends = starts - 29
    # One cell is seen, which what the empty spans lack must not hide.
    starts[..., 0, 3], ends[..., 0, 3] = 14, 15
    kinds = compile_mask(RowIntervals(starts, ends, 40), 16).block_kinds()
    assert kinds[0, 0].tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("B", [1, 3])
def test_kinds_and_counts_are_read_back_from_the_tables(B):
    spans = causal(100, 70, B=B)
    tables = compile_mask(spans, (32, 16))
    dense = torch.nn.functional.pad(spans.dense(), (0, -70 % 16, 0, -100 % 32))
    sums = dense.view(B, 1, 4, 32, 5, 16).sum((3, 5))
    kinds = (sums > 0).to(torch.uint8) + (sums == 512).to(torch.uint8)
    assert torch.equal(tables.block_kinds(), kinds)
    counts = tables.counts()
    assert [counts.empty, counts.partial, counts.full] == kinds.view(-1).bincount().tolist()


@settings(deadline=None, max_examples=30)
@given(disjoint_spans(), st.sampled_from([16, (16, 48), 128]))
def test_pack_and_unpack_are_inverse(spans, BLOCK_SIZE):
    tables = compile_mask(spans, BLOCK_SIZE)
    packed = tables.pack()
    assert tuple(packed) == TABLE_FIELDS
    assert packed["kv_indices"].numel() == tables.counts().partial
    size = {"B": spans.B, "H": spans.H, "Q_LEN": spans.Q_LEN, "KV_LEN": spans.KV_LEN}
    again = BlockTables.unpack(packed, **size, BLOCK_SIZE=BLOCK_SIZE)
    for name in TABLE_FIELDS:
        assert torch.equal(getattr(again, name), getattr(tables, name))


def damaged(**changes):
    packed = compile_mask(causal(64, 64), 16).pack()
    for name, change in changes.items():
        packed[name] = change(packed[name].clone())
    return {name: table for name, table in packed.items() if table is not None}


def put(position, value):
    def change(table):
        table[position] = value
        return table

    return change


@pytest.mark.parametrize(
    ("changes", "table", "message"),
    [
        ({"kv_indices": lambda t: None}, "kv_indices", "the table must be given"),
        ({"q_indices": lambda t: t.long()}, "q_indices", "packed as int32"),
        ({"kv_num_blocks": lambda t: t[:-1]}, "kv_num_blocks", "must have 4 counts"),
        ({"kv_num_blocks": put(0, 5)}, "kv_num_blocks", r"counts must lie in \[0, 4\]"),
        ({"kv_num_blocks": put(0, -1)}, "kv_num_blocks", r"counts must lie in \[0, 4\]"),
        ({"kv_num_blocks": put(0, 2)}, "kv_indices", "must have the 5 indices counted"),
        ({"full_kv_indices": put(0, 99)}, "full_kv_indices", r"indices must lie in \[0, 4\)"),
        ({"full_kv_indices": put(0, -1)}, "full_kv_indices", r"indices must lie in \[0, 4\)"),
        *(
            ({name: put(-1, 4)}, name, r"indices must lie in \[0, 4\), but found \(., 4\)")
            for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices")
        ),
        ({"full_kv_indices": put(5, 0)}, "full_kv_indices", "row 3.*|.*must ascend, .*row 3"),
        (
            {"q_num_blocks": put(0, 0), "q_indices": lambda t: t[1:]},
            "q_num_blocks",
            "must list as many blocks as kv_num_blocks",
        ),
        # Right for itself, but another mask's.
        (
            {"q_indices": lambda t: t.flip(0) * 0 + torch.tensor([1, 0, 2, 3], dtype=torch.int32)},
            "q_indices",
            r"the transpose of kv_indices, but found block \(b, h, row, column\) = \(0, 0, 1, 0\)",
        ),
        (
            {
                "full_q_num_blocks": put(slice(None), torch.tensor([2, 3, 1, 0])),
                "full_q_indices": put(slice(None), torch.tensor([1, 2, 1, 2, 3, 3])),
            },
            "full_q_indices",
            r"transpose of full_kv_indices, but found block .* = \(0, 0, 1, 1\)",
        ),
        (
            {"kv_indices": put(3, 2)},
            "full_kv_indices",
            r"both full and partial, but found block .* = \(0, 0, 3, 2\)",
        ),
    ],
)
def test_damaged_packed_tables_are_refused_by_name(changes, table, message):
    with pytest.raises(LayoutInvariantError, match=message) as info:
        BlockTables.unpack(damaged(**changes), Q_LEN=64, KV_LEN=64, BLOCK_SIZE=16)
    assert info.value.table == table
    assert info.value.exit_code == 3


def moved_blocks(tables, draw):
    """Packed tables in which one live index of one table is another one."""
    packed = tables.pack()
    name = draw.choice([name for name in TABLE_FIELDS if "indices" in name and len(packed[name])])
    at, width = draw.randrange(len(packed[name])), getattr(tables, name).shape[-1]
    packed[name][at] = draw.choice([i for i in range(width) if i != int(packed[name][at])])
    return packed


def test_no_single_index_can_be_another_one():
    draw = random.Random(4)
    tables = compile_mask(causal(90, 70, B=2), (32, 16))
    size = {"B": 2, "Q_LEN": 90, "KV_LEN": 70, "BLOCK_SIZE": (32, 16)}
    assert len(tables.pack()["full_kv_indices"])
    for _ in range(100):
        with pytest.raises(LayoutInvariantError):
            BlockTables.unpack(moved_blocks(tables, draw), **size)


def test_claimed_sizes_allocate_nothing_before_the_counts_are_compared():
    packed = compile_mask(causal(64, 64), 16).pack()
    tracemalloc.start()
    for size in ({"KV_LEN": 2**30}, {"Q_LEN": 2**30}, {"B": 2**20}):
        with pytest.raises(LayoutInvariantError, match="counts"):
            BlockTables.unpack(packed, **({"Q_LEN": 64, "KV_LEN": 64, "BLOCK_SIZE": 16} | size))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_the_text_of_tables_is_short():
    text = repr(compile_mask(causal(100, 60, B=1), (32, 16)))
    assert text == (
        "BlockTables(B=1, H=1, Q_LEN=100, KV_LEN=60, BLOCK_SIZE=(32, 16), "
        "full=5, partial=9, empty=2, device='cpu')"
    )
    on_meta = BlockTables.empty(Q_LEN=16, KV_LEN=16, BLOCK_SIZE=16, device="meta")
    assert "device='meta'" in repr(on_meta)


def test_what_is_no_mask_is_refused_with_what_makes_one():
    for wrong in (lambda b, h, q, kv: q >= kv, torch.ones(4, 4).bool(), None, "causal"):
        with pytest.raises(MaskSpecError, match=r"must be RowIntervals: .*from_mask_mod"):
            compile_mask(wrong)


def test_tables_into_overwrites_static_buffers():
    tables = BlockTables.empty(B=2, H=1, Q_LEN=100, KV_LEN=60, BLOCK_SIZE=(32, 16))
    addresses = [table.data_ptr() for table in tables.as_dict().values()]
    for spans in (~RowIntervals(*torch.zeros(2, 2, 1, 1, 100).int(), 60), causal(100, 60, B=2)):
        # Complement collapses the batch; a static buffer keeps it.
        starts, ends = (
            x.expand(2, 1, spans.K, 100).contiguous() for x in (spans.starts, spans.ends)
        )
        tables_into(tables, starts, ends)
        mask_mod = spans_mask_mod(starts, ends)
        check_equal_to_torch(tables, mask_mod, 2, 1)
    assert addresses == [table.data_ptr() for table in tables.as_dict().values()]


@pytest.mark.parametrize(
    ("starts", "ends", "message"),
    [
        (torch.zeros(1, 1, 1, 40), None, r"starts = \(\(1, 1, 1, 40\), torch.float32\)"),
        (torch.zeros(1, 1, 40, 2).int().transpose(2, 3), None, "must be contiguous int32"),
        (torch.zeros(2, 1, 1, 40).int(), None, r"starts.shape = .* of the tables, \(1, 1, 40\)"),
        (torch.zeros(1, 2, 1, 40).int(), None, r"starts.shape = .* of the tables, \(1, 1, 40\)"),
        (torch.zeros(1, 2, 1, 40).int(), None, r"starts.shape = \(1, 2, 1, 40\)"),
        (torch.zeros(1, 1, 1, 41).int(), None, r"starts.shape = \(1, 1, 1, 41\)"),
        (torch.zeros(1, 1, 1, 40).int(), torch.zeros(1, 1, 2, 40).int(), "ends.shape"),
        (torch.zeros(1, 1, 1, 40, dtype=torch.int32, device="meta"), None, "must be on cpu"),
    ],
)
def test_spans_that_do_not_fit_the_buffers_are_refused(starts, ends, message):
    tables = BlockTables.empty(Q_LEN=40, KV_LEN=40, BLOCK_SIZE=16)
    with pytest.raises(MaskSpecError, match=message):
        tables_into(tables, starts, starts if ends is None else ends)


def test_select_picks_masks_of_the_batch():
    ends = torch.arange(1, 4, dtype=torch.int32).view(3, 1, 1, 1).expand(3, 1, 1, 16) * 16
    tables = compile_mask(RowIntervals(torch.zeros_like(ends), ends, 64), 16)
    picked = tables.select(torch.tensor([2, 0]))
    assert picked.full_kv_num_blocks.tolist() == [[[3]], [[1]]]
    assert picked.full_kv_indices.is_contiguous()
    assert picked.to("cpu").full_kv_num_blocks.tolist() == [[[3]], [[1]]]
    single = tables.select(torch.tensor([1]))
    assert single.select(torch.tensor([0, 0])) is single


@pytest.mark.parametrize("size", [0, 8, 24, 1040, (128,), (128, 128, 128), (16, 20), 128.0, "128"])
def test_bad_block_sizes_are_refused(size):
    with pytest.raises(MaskSpecError, match=r"BLOCK_SIZE = .* must be one or two multiples of 16"):
        compile_mask(EMPTY_MASK, size)


def test_bad_sizes_of_buffers_are_refused():
    with pytest.raises(MaskSpecError, match="Q_LEN = 0: must be at least 1"):
        BlockTables.empty(Q_LEN=0, KV_LEN=4)
    with pytest.raises(MaskSpecError, match=r"blocks = 4294967296: .* below 2\*\*31"):
        BlockTables.empty(Q_LEN=2**20, KV_LEN=2**20, BLOCK_SIZE=16)
    tables = compile_mask(EMPTY_MASK, 16)
    fields = tables.as_dict() | {"q_indices": tables.q_indices.long()}
    with pytest.raises(
        MaskSpecError, match=r"q_indices = .*contiguous int32 tensor \(1, 1, 3, 3\)"
    ):
        BlockTables(Q_LEN=40, KV_LEN=40, BLOCK_SIZE=(16, 16), **fields)
    # Kernels go by addresses: a view of the right shape is none.
    for name in ("kv_indices", "q_indices", "full_kv_indices", "full_q_indices"):
        fields = tables.as_dict() | {name: tables.as_dict()[name].transpose(-1, -2)}
        with pytest.raises(MaskSpecError, match=rf"^{name} = .*must be a contiguous int32 tensor"):
            BlockTables(Q_LEN=40, KV_LEN=40, BLOCK_SIZE=(16, 16), **fields)
    fields = tables.as_dict() | {"q_indices": tables.q_indices.to("meta")}
    with pytest.raises(MaskSpecError, match=r"q_indices = .*must be on cpu as the others"):
        BlockTables(Q_LEN=40, KV_LEN=40, BLOCK_SIZE=(16, 16), **fields)


def test_table_fields_are_the_fields_of_the_class_in_order():
    names = [field.name for field in dataclasses.fields(BlockTables)]
    assert tuple(name for name in names if name in TABLE_FIELDS) == TABLE_FIELDS
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
        compile_mask(EMPTY_MASK, 16).Q_LEN = 3


def test_a_million_tokens_stay_within_the_memory_of_their_tables():
    spans = causal(1 << 20, 1 << 20)
    tracemalloc.start()
    tables = compile_mask(spans, 512)
    # NumPy reports its memory here; torch's, the tables themselves, comes on top.
    working = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert tables.nbytes == 4 * (2048 * 2048 + 2048) * 4
    assert working < 0.5 * tables.nbytes
    assert tables.counts().partial == 2048
    assert tables.counts().full == 2048 * 2047 // 2
    assert tables.full_q_indices[0, 0, 2046, :2].tolist() == [2047, 0]
