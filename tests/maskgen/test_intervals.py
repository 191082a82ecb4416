import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maskgen import MAX_INTERVALS, MaskSpecError, RowIntervals, UnsupportedMaskError, compile_mask


def drawn(*rows):
    """A dense bool mask ``[1, 1, Q, KV]`` from rows drawn with # and dots."""
    return torch.tensor([[cell == "#" for cell in row] for row in rows])[None, None]


def of_rows(rows, KV_LEN):
    """Spans from a list of (start, end) lists, one list a row; K is the longest."""
    K = max(1, *(len(row) for row in rows))
    spans = torch.zeros(2, 1, 1, K, len(rows), dtype=torch.int32)
    for q, row in enumerate(rows):
        for k, (start, end) in enumerate(row):
            spans[0, 0, 0, k, q], spans[1, 0, 0, k, q] = start, end
    return RowIntervals(spans[0], spans[1], KV_LEN)


@st.composite
def masks(draw, B=(1, 2), H=(1, 2), Q_LEN=None, KV_LEN=None):
    """Any spans: unsorted, overlapping, touching, empty ones anywhere, also reversed ones."""
    B, H, K = draw(st.sampled_from(B)), draw(st.sampled_from(H)), draw(st.integers(1, 4))
    Q_LEN, KV_LEN = Q_LEN or draw(st.integers(1, 6)), KV_LEN or draw(st.integers(1, 12))
    count = B * H * K * Q_LEN
    points = st.lists(st.integers(0, KV_LEN), min_size=count, max_size=count)
    starts, ends = (
        torch.tensor(draw(points), dtype=torch.int32).view(B, H, K, Q_LEN) for _ in range(2)
    )
    return RowIntervals(starts, ends, KV_LEN)


def check_canonical(spans):
    """The canonical form by its definition, row by row."""
    assert spans.is_canonical
    longest = 0
    for b in range(spans.B):
        for h in range(spans.H):
            for q in range(spans.Q_LEN):
                row = list(
                    zip(
                        spans.starts[b, h, :, q].tolist(),
                        spans.ends[b, h, :, q].tolist(),
                        strict=True,
                    )
                )
                held = [span for span in row if span[1] > span[0]]
                assert row == held + [(0, 0)] * (len(row) - len(held))
                assert all(a[1] < b[0] for a, b in itertools.pairwise(held))
                assert all(0 <= start < end <= spans.KV_LEN for start, end in held)
                longest = max(longest, len(held))
    assert max(1, longest) == spans.K
    dense = spans.dense()
    assert spans.B == 1 or not (dense == dense[:1]).all()
    assert spans.H == 1 or not (dense == dense[:, :1]).all()


def test_a_drawn_mask_and_its_canonical_spans():
    spans = of_rows([[(4, 6), (0, 2)], [(3, 3), (1, 4)], [(2, 4), (0, 3)], [(0, 2), (2, 5)], []], 6)
    expected = drawn("##..##", ".###..", "####..", "#####.", "......")
    assert torch.equal(spans.dense(), expected)
    assert not spans.is_canonical
    canonical = spans.canonical()
    assert canonical.starts[0, 0].tolist() == [[0, 1, 0, 0, 0], [4, 0, 0, 0, 0]]
    assert canonical.ends[0, 0].tolist() == [[2, 4, 4, 5, 0], [6, 0, 0, 0, 0]]
    assert torch.equal(canonical.dense(), expected)
    assert canonical.canonical() is canonical
    assert spans.row_counts()[0, 0].tolist() == [4, 3, 4, 5, 0]


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ([[(0, 2), (0, 0)], [(1, 4)]], [[(0, 2)], [(1, 4)]]),
        ([[(0, 2), (2, 4)]], [[(0, 4)]]),
        ([[(0, 2), (1, 4)]], [[(0, 4)]]),
        ([[(3, 5), (0, 2)]], [[(0, 2), (3, 5)]]),
        ([[(0, 0), (0, 2)]], [[(0, 2)]]),
        ([[(4, 4)], [(0, 2)]], [[(0, 0)], [(0, 2)]]),
    ],
    ids=["spare slot", "touching", "overlapping", "unsorted", "empty first", "empty elsewhere"],
)
def test_what_is_not_the_canonical_form(rows, wanted):
    spans = of_rows(rows, 6)
    assert not spans.is_canonical
    canonical, wanted = spans.canonical(), of_rows(wanted, 6)
    assert wanted.is_canonical
    assert torch.equal(canonical.starts, wanted.starts)
    assert torch.equal(canonical.ends, wanted.ends)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_canonical_form_and_complement_equal_the_dense_mask(data):
    spans = data.draw(masks())
    canonical = spans.canonical()
    check_canonical(canonical)
    assert torch.equal(canonical.dense().expand(spans.shape), spans.dense())
    assert spans.equals(canonical)
    inverted = ~spans
    check_canonical(inverted)
    assert torch.equal(inverted.dense().expand(spans.shape), ~spans.dense())
    assert (~inverted).equals(spans)
    assert torch.equal(
        spans.row_counts(), spans.dense().sum(-1, dtype=torch.int32)[: spans.B, : spans.H]
    )


@st.composite
def expressions(draw, depth=3):
    """An expression over masks of one frame, and its value in dense booleans."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        mask = draw(masks(Q_LEN=5, KV_LEN=9))
        return mask, mask.dense()
    kind = draw(st.sampled_from(["and", "or", "not", "shift", "crop"]))
    mask, dense = draw(expressions(depth=depth - 1))
    if kind in ("and", "or"):
        other, other_dense = draw(expressions(depth=depth - 1))
        return (
            (mask & other, dense & other_dense)
            if kind == "and"
            else (
                mask | other,
                dense | other_dense,
            )
        )
    if kind == "not":
        return ~mask, ~dense
    if kind == "shift":
        q, kv = draw(st.integers(-7, 7)), draw(st.integers(-11, 11))
        moved = torch.zeros_like(dense)
        for row in range(5):
            for key in range(9):
                if 0 <= row - q < 5 and 0 <= key - kv < 9:
                    moved[..., row, key] = dense[..., row - q, key - kv]
        return mask.shift(q=q, kv=kv), moved
    q0, kv0 = draw(st.integers(0, 4)), draw(st.integers(0, 8))
    q1, kv1 = draw(st.integers(q0 + 1, 5)), draw(st.integers(kv0 + 1, 9))
    cut = torch.zeros_like(dense)
    cut[..., : q1 - q0, : kv1 - kv0] = dense[..., q0:q1, kv0:kv1]
    return mask.crop(q=(q0, q1), kv=(kv0, kv1)).pad_to(Q_LEN=5, KV_LEN=9), cut


@settings(deadline=None, max_examples=60)
@given(expressions())
def test_expressions_equal_dense_booleans(expression):
    mask, dense = expression
    assert (mask.dense() == dense).all()


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_concat_equals_dense_concat(data):
    parts = data.draw(st.lists(masks(B=(1,), Q_LEN=4, KV_LEN=5), min_size=1, max_size=3))
    H = max(part.H for part in parts)
    dense = [part.dense().expand(-1, H, -1, -1) for part in parts]
    for dim, along in (("q", 2), ("kv", 3)):
        joined = RowIntervals.concat(parts, dim)
        check_canonical(joined)
        assert (joined.dense() == torch.cat(dense, along)).all()


def test_select_and_to_keep_the_shape_of_buffers():
    starts = torch.zeros(3, 1, 2, 4, dtype=torch.int32)
    ends = starts.clone()
    ends[:, :, 0] = torch.arange(1, 4, dtype=torch.int32).view(3, 1, 1)
    spans = RowIntervals(starts, ends, 6)
    picked = spans.select(torch.tensor([2, 0]))
    assert picked.starts.shape == (2, 1, 2, 4)
    assert picked.row_counts()[:, 0, 0].tolist() == [3, 1]
    single = spans.select(torch.tensor([1]))
    assert single.select(torch.tensor([0, 0, 0])) is single
    assert spans.to("cpu").equals(spans)
    assert repr(single) == "RowIntervals(B=1, H=1, K=2, Q_LEN=4, KV_LEN=6, device='cpu')"


def test_shift_does_not_wrap_near_the_largest_length():
    most = 2**31 - 1
    spans = of_rows([[(most - 2, most)]], most)
    assert not (spans.shift(kv=most).row_counts()).any()
    assert spans.shift(kv=-(most - 2)).ends.item() == 2
    # Its end leaves the frame and its start does not.
    moved = spans.shift(kv=1)
    assert (moved.starts.item(), moved.ends.item()) == (most - 1, most)


def test_concat_reaches_the_largest_length_and_no_further():
    half = of_rows([[(2**30 - 2, 2**30 - 1)]], 2**30 - 1)
    whole = of_rows([[(0, 1), (2**30 - 1, 2**30)]], 2**30)
    joined = RowIntervals.concat([whole, half], "kv")
    assert joined.KV_LEN == 2**31 - 1
    assert joined.starts.flatten().tolist() == [0, 2**30 - 1, 2**31 - 2]
    for parts in ([whole, whole], [half, whole, of_rows([[(0, 1)]], 1)], [whole] * 3):
        with pytest.raises(MaskSpecError, match=r"KV_LEN = \d+: .* below 2\*\*31"):
            RowIntervals.concat(parts, "kv")


def test_masks_have_no_truth_value_and_no_equality_by_content():
    spans = of_rows([[(0, 1)]], 1)
    with pytest.raises(TypeError, match="combine masks with &"):
        bool(spans)
    with pytest.raises(TypeError, match="combine masks with &"):
        _ = spans or spans
    assert spans != of_rows([[(0, 1)]], 1)
    with pytest.raises(TypeError, match="unsupported operand"):
        spans & 1
    with pytest.raises(TypeError, match="unsupported operand"):
        spans | None


def test_equals_needs_equal_frames():
    spans = of_rows([[(0, 1)]], 4)
    assert not spans.equals(of_rows([[(0, 1)]], 5))
    assert not spans.equals(of_rows([[(0, 2)]], 4))


INT = torch.zeros(1, 1, 1, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("starts", "ends", "KV_LEN", "message"),
    [
        (INT.long(), INT, 4, r"starts.dtype = torch.int64: spans must be torch.int32"),
        (INT, INT.float(), 4, r"ends.dtype = torch.float32"),
        (INT[0], INT[0], 4, r"starts.shape = \(1, 1, 4\): must be \[B, H, K, Q_LEN\]"),
        (INT[..., :0], INT[..., :0], 4, r"starts.shape = \(1, 1, 1, 0\)"),
        (INT, INT[..., :3], 4, r"ends.shape = \(1, 1, 1, 3\): must equal the shape of starts"),
        (INT, INT.to("meta"), 4, "ends.device = 'meta': must be the device of starts, cpu"),
        (INT, INT, 0, "KV_LEN = 0: a length must be at least 1"),
        (INT, INT, 2**31, r"KV_LEN = 2147483648: .* below 2\*\*31"),
        (INT - 1, INT + 2, 4, r"= \(-1, 2\): span 0 of row \(b=0, h=0, q=0\) must lie inside"),
        (INT, INT + 5, 4, r"= \(0, 5\): span 0 .* inside \[0, KV_LEN=4\)"),
    ],
)
def test_bad_spans_are_refused(starts, ends, KV_LEN, message):
    with pytest.raises(MaskSpecError, match=message) as info:
        RowIntervals(starts, ends, KV_LEN)
    assert info.value.field
    assert info.value.exit_code == 2


def test_spans_beyond_32_bit_addressing_are_refused():
    huge = torch.zeros(1, dtype=torch.int32).expand(2, 32, 32, 2**20)
    with pytest.raises(MaskSpecError, match=r"starts.numel\(\) = 2147483648: .* below 2\*\*31"):
        RowIntervals(huge, huge, 4)


@pytest.mark.parametrize(("start", "end"), [(9, -3), (9, 7), (-3, -7), (5, 5), (-2, -2)])
def test_an_empty_span_may_have_any_ends(start, end):
    spans = RowIntervals(INT + start, INT + end, 4)
    assert not spans.dense().any()
    assert spans.canonical().starts.tolist() == [[[[0, 0, 0, 0]]]]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda m: m.crop(q=(2, 2)), r"q = \(2, 2\): must be a range \(a, b\), 0 <= a < b <= 3"),
        (lambda m: m.crop(kv=(0, 9)), r"kv = \(0, 9\): .* b <= 8"),
        (lambda m: m.pad_to(Q_LEN=2), r"Q_LEN = 2: padding cannot go below 3"),
        (lambda m: m.pad_to(KV_LEN=2**31), r"KV_LEN = 2147483648: .* below 2\*\*31"),
        (lambda m: m & m.crop(q=(0, 2)), "Q_LEN = 2: both masks of & must have one Q_LEN, 3 here"),
        (lambda m: m | m.crop(kv=(0, 2)), "KV_LEN = 2: both masks of |"),
        (lambda m: RowIntervals.concat([m, m.crop(kv=(0, 2))], "q"), "KV_LEN = 2: .* concat"),
        (lambda m: RowIntervals.concat([m, m.crop(q=(0, 2))], "kv"), "Q_LEN = 2: .* concat"),
        (lambda m: RowIntervals.concat([], "q"), "needs at least one mask"),
        (lambda m: RowIntervals.concat([m], "rows"), "dim = 'rows'"),
    ],
)
def test_frames_that_do_not_fit_are_refused(use, message):
    with pytest.raises(MaskSpecError, match=message):
        use(of_rows([[(0, 1)], [(2, 3)], [(4, 8)]], 8))


def test_batches_that_do_not_fit_are_refused():
    two = torch.zeros(2, 1, 1, 4, dtype=torch.int32)
    three = torch.zeros(3, 1, 1, 4, dtype=torch.int32)
    with pytest.raises(MaskSpecError, match="B = 3: must be 2 as in the other mask"):
        RowIntervals(two, two, 4) | RowIntervals(three, three, 4)


def test_a_row_over_the_limit_is_refused_by_compile_mask_with_row_and_count():
    fine = [(2 * k, 2 * k + 1) for k in range(MAX_INTERVALS)]
    compile_mask(of_rows([fine], 80), 16)
    over = of_rows([fine, [*fine, (70, 71)]], 80)
    with pytest.raises(UnsupportedMaskError, match=r"row \(b=0, h=0, q=1\) has 33") as info:
        compile_mask(over, 16)
    assert (info.value.row, info.value.count, info.value.limit) == ((0, 0, 1), 33, MAX_INTERVALS)
    # More slots than the limit are fine where no row needs them.
    compile_mask(of_rows([fine, [*fine, (70, 70), (71, 71)]], 80), 16)


def test_row_counts_keep_heads_that_turn_out_equal():
    # Two spans that overlap in one head, one span in the other: the same row once joined.
    starts = torch.tensor([[[[0], [0]], [[0], [0]]]], dtype=torch.int32)
    ends = torch.tensor([[[[1], [1]], [[1], [0]]]], dtype=torch.int32)
    assert RowIntervals(starts, ends, 1).row_counts().tolist() == [[[1], [1]]]


@pytest.mark.parametrize(
    "slots",
    [[(1, 4), (0, 0)], [(1, 4), (4, 6)], [(0, 0), (1, 4)], [(4, 6), (1, 3)], [(1, 4), (5, 5)]],
    ids=["a spare slot", "touching", "empty first", "unsorted", "an empty span at 5"],
)
def test_one_mask_has_one_canonical_form(slots):
    spans = torch.tensor(slots, dtype=torch.int32).T.reshape(2, 1, 1, 2, 1)
    mask = RowIntervals(*spans, 9)
    assert not mask.is_canonical
    check_canonical(mask.canonical())
    assert torch.equal(mask.canonical().dense(), mask.dense())
