import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from maskgen import (
    BlockTables,
    MaskSpecError,
    RowIntervals,
    UnsupportedMaskError,
    block_mask_over,
    compile_mask,
    spans_mask_mod,
    tables_into,
    to_block_mask,
)
from maskgen.block_mask import check_gpu_limits


def window(Q_LEN, KV_LEN, width=40):
    ends = torch.arange(1, Q_LEN + 1, dtype=torch.int32).view(1, 1, 1, Q_LEN).clamp(max=KV_LEN)
    return RowIntervals((ends - width).clamp(min=0), ends, KV_LEN)


def test_the_block_mask_equals_torchs_own():
    spans = window(200, 180)
    block_mask = to_block_mask(compile_mask(spans, (64, 32)), spans)

    def mask_mod(b, h, q, kv):
        return (q >= kv) & (q - kv < 40)

    wanted = create_block_mask(mask_mod, None, None, 200, 180, device="cpu", BLOCK_SIZE=(64, 32))
    assert block_mask.shape == wanted.shape
    assert block_mask.seq_lengths == wanted.seq_lengths
    assert block_mask.BLOCK_SIZE == wanted.BLOCK_SIZE
    assert torch.equal(block_mask.to_dense(), wanted.to_dense())
    dense = create_mask(block_mask.mask_mod, 1, 1, 200, 180, device="cpu")
    assert torch.equal(dense, spans.dense()[..., :200, :])
    assert torch.equal(block_mask.full_q_num_blocks, wanted.full_q_num_blocks)


def test_an_analytic_mask_mod_is_taken_as_it_is():
    spans = window(64, 64)

    def analytic(b, h, q, kv):
        return (q >= kv) & (q - kv < 40)

    assert to_block_mask(compile_mask(spans, 16), spans, mask_mod=analytic).mask_mod is analytic


def test_attention_through_it_equals_a_dense_softmax():
    spans = window(48, 64, width=10)
    q, k, v = (torch.randn(1, 2, n, 16) for n in (48, 64, 64))
    block_mask = to_block_mask(compile_mask(spans, 16), spans)
    with pytest.warns(UserWarning, match="without torch.compile"):
        found = flex_attention(q, k, v, block_mask=block_mask)
    scores = (q @ k.transpose(-1, -2) / 4).masked_fill(~spans.dense(), -torch.inf)
    torch.testing.assert_close(found, scores.softmax(-1) @ v)


def test_a_block_mask_over_static_buffers_follows_them():
    tables = BlockTables.empty(Q_LEN=64, KV_LEN=64, BLOCK_SIZE=16)
    starts, ends = torch.zeros(2, 1, 1, 1, 64, dtype=torch.int32)
    block_mask = block_mask_over(tables, spans_mask_mod(starts, ends))
    assert block_mask.kv_indices is tables.kv_indices
    spans = window(64, 64)
    starts.copy_(spans.starts)
    ends.copy_(spans.ends)
    tables_into(tables, starts, ends)
    assert torch.equal(block_mask.to_dense(), to_block_mask(tables, spans).to_dense())
    assert torch.equal(create_mask(block_mask.mask_mod, 1, 1, 64, 64, "cpu"), spans.dense())


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        (window(64, 48), "spans.KV_LEN = 48: the tables have KV_LEN=64"),
        (window(48, 64), "spans.Q_LEN = 48: the tables have Q_LEN=64"),
        (window(1, 64), "spans.Q_LEN = 1: the tables have Q_LEN=64"),
        (window(64, 1), "spans.KV_LEN = 1: the tables have KV_LEN=64"),
    ],
)
def test_spans_of_another_mask_are_refused(spans, message):
    tables = compile_mask(window(64, 64), 16)
    with pytest.raises(MaskSpecError, match=message):
        to_block_mask(tables, spans)


def test_a_batch_of_another_size_is_refused():
    two, three = (torch.arange(n * 16, dtype=torch.int32).view(n, 1, 1, 16) for n in (2, 3))
    tables = compile_mask(RowIntervals(torch.zeros_like(two), two, 64), 16)
    with pytest.raises(MaskSpecError, match=r"spans.B = 3: the tables have B=2"):
        to_block_mask(tables, RowIntervals(torch.zeros_like(three), three, 64))


@pytest.mark.parametrize(
    ("size", "Q_LEN", "KV_LEN", "message"),
    [
        ((64, 128), 256, 256, r"multiples of 128 on a GPU with torch below 2.14.*\(64, 128\)"),
        ((128, 16), 256, 256, r"multiples of 128 on a GPU with torch below 2.14"),
        ((256, 128), 384, 384, "must be multiples of BLOCK_SIZE too on a GPU with torch below"),
    ],
)
def test_what_older_torch_cannot_run_on_a_gpu_is_refused(size, Q_LEN, KV_LEN, message):
    for version in ("2.11.0+cu130", "2.12.1", "2.13.0+cpu"):
        with pytest.raises(UnsupportedMaskError, match=message):
            check_gpu_limits(size, Q_LEN, KV_LEN, version)
    for version in ("2.14.0", "2.14.0+cu130", "2.14.1+cu130"):
        check_gpu_limits(size, Q_LEN, KV_LEN, version)


@pytest.mark.parametrize(
    ("size", "Q_LEN", "KV_LEN"), [((128, 128), 8192, 11264), ((256, 128), 300, 384)]
)
def test_what_every_torch_can_run_passes(size, Q_LEN, KV_LEN):
    for version in ("2.11.0+cu130", "2.13.0", "2.14.1"):
        check_gpu_limits(size, Q_LEN, KV_LEN, version)


def test_to_block_mask_asks_for_the_limits_of_the_installed_torch(monkeypatch):
    spans = window(64, 64)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    with pytest.raises(
        UnsupportedMaskError, match=r"but BLOCK_SIZE is \(16, 16\) and torch 2.13.0"
    ):
        to_block_mask(compile_mask(spans, 16), spans, device="cuda")


@pytest.mark.parametrize("size", [64, (128, 16), 256])
def test_a_block_mask_over_buffers_of_a_gpu_asks_for_them_too(monkeypatch, size):
    monkeypatch.setattr(torch, "__version__", "2.13.1+cu130")
    with FakeTensorMode():
        tables = BlockTables.empty(Q_LEN=384, KV_LEN=640, BLOCK_SIZE=size, device="cuda")
        with pytest.raises(UnsupportedMaskError, match=r"torch 2\.13\.1\+cu130"):
            block_mask_over(tables, None)
        monkeypatch.setattr(torch, "__version__", "2.14.0+cu130")
        assert block_mask_over(tables, None).seq_lengths == (384, 640)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    spans = window(128, 128)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedMaskError, match=r"it is cuda:1 and torch .* has no GPU"):
        to_block_mask(compile_mask(spans, 128), spans, device="cuda:1")
