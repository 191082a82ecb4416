"""What a captured step calls: spans without host syncs, buffers in place, traceable mask_mods."""

import types

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from maskgen import RowIntervals
from maskgen.errors import MaskSpecError
from maskgen.families import families, spans_into
from tests.maskgen.families.cases import CASES

RUNTIME_CASES = [
    case
    for case in CASES
    if any(case.params.get(given) is not None for given in families[case.family].runtime_params)
]
RUNTIME_EACH = {case.family: case for case in RUNTIME_CASES}
ONE_EACH = {case.family: case for case in CASES} | RUNTIME_EACH


def on_device(case):
    """The parameters of a case as a step has them: runtime values as int32 tensors."""
    runtime = families[case.family].runtime_params
    return {
        name: torch.tensor(value, dtype=torch.int32) if name in runtime else value
        for name, value in case.params.items()
    }


def buffers_like(spans):
    """Buffers with two more slots than the spans, filled with what must not stay."""
    B, _, K, Q_LEN = spans.shape
    return torch.full((2, B, 1, K + 2, Q_LEN), 7, dtype=torch.int32)


def split(params):
    """Static parameters and runtime tensors."""
    runtime = {name: value for name, value in params.items() if isinstance(value, torch.Tensor)}
    return {name: value for name, value in params.items() if name not in runtime}, runtime


@pytest.mark.parametrize("case", RUNTIME_CASES, ids=str)
def test_spans_of_a_batch_need_no_host_sync(case):
    static, runtime = split(on_device(case))
    size = {"KV_LEN": case.KV_LEN, **static}
    starts, ends = families[case.family].spans(case.Q_LEN, **size, **runtime)
    into = buffers_like(starts)
    spans_into(into[0], into[1], case.family, **size, **runtime)
    K = starts.shape[2]
    assert torch.equal(into[0, :, :, :K], starts)
    assert torch.equal(into[1, :, :, :K], ends)
    assert not into[:, :, :, K:].any()
    # Fake tensors have no values: reading one, or a shape that depends on one, would raise.
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(value) for name, value in runtime.items()}
        fake_into = mode.from_tensor(into)
        spans_into(fake_into[0], fake_into[1], case.family, **size, **fake)


@pytest.mark.parametrize("case", RUNTIME_EACH.values(), ids=str)
def test_spans_of_a_batch_are_one_compiled_graph(case):
    static, runtime = split(on_device(case))
    size = {"KV_LEN": case.KV_LEN, **static}
    starts, ends = families[case.family].spans(case.Q_LEN, **size, **runtime)
    into = buffers_like(starts)

    def step(into, runtime):
        spans_into(into[0], into[1], case.family, **size, **runtime)

    torch._dynamo.reset()
    torch.compile(step, fullgraph=True, backend="eager", dynamic=False)(into, runtime)
    assert torch.equal(into[0, :, :, : starts.shape[2]], starts)
    assert torch.equal(into[1, :, :, : ends.shape[2]], ends)


@pytest.mark.gpu
@pytest.mark.parametrize("case", RUNTIME_CASES, ids=str)
def test_spans_of_a_batch_are_captured_by_a_cuda_graph(case):
    static, host = split(on_device(case))
    size = {"KV_LEN": case.KV_LEN, **static}
    starts, ends = families[case.family].spans(case.Q_LEN, **size, **host)
    runtime = {name: value.cuda() for name, value in host.items()}
    into = buffers_like(starts).cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        spans_into(into[0], into[1], case.family, **size, **runtime)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        spans_into(into[0], into[1], case.family, **size, **runtime)
    into.fill_(7)
    graph.replay()
    assert torch.equal(into[0, :, :, : starts.shape[2]].cpu(), starts)
    assert torch.equal(into[1, :, :, : ends.shape[2]].cpu(), ends)


def closure_of(function):
    """Everything that a mask_mod captures, functions followed."""
    for cell in function.__closure__ or ():
        if isinstance(cell.cell_contents, types.FunctionType):
            yield from closure_of(cell.cell_contents)
        else:
            yield cell.cell_contents


@pytest.mark.parametrize("case", ONE_EACH.values(), ids=str)
def test_analytic_mask_mod_runs_in_compiled_flex(case):
    family = families[case.family]
    Q, KV = case.Q_LEN, case.KV_LEN
    params = on_device(case)
    mask_mod = family.mask_mod(Q, KV, **params)
    captured = list(closure_of(mask_mod))
    assert all(isinstance(value, int | torch.Tensor) for value in captured)
    dense = family.intervals(Q, KV, **params).dense()
    B = dense.shape[0]
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(B, 1, Q, 16, generator=generator)
    key = torch.randn(B, 1, KV, 16, generator=generator)
    block_mask = create_block_mask(mask_mod, B, None, Q, KV, device="cpu")
    torch._dynamo.reset()
    flex = torch.compile(flex_attention, fullgraph=True, backend="eager")
    with torch.no_grad():
        out = flex(query, key, key, block_mask=block_mask)
        weights = (query @ key.mT / 4).masked_fill(~dense, -torch.inf).softmax(-1)
        expected = weights.nan_to_num() @ key
    torch.testing.assert_close(out, expected)


def test_spans_into_broadcasts_over_batch_and_heads_and_empties_unused_slots():
    buffers = torch.full((2, 3, 2, 4, 8), 5, dtype=torch.int32)
    spans_into(buffers[0], buffers[1], families["causal"], KV_LEN=8)
    mask = RowIntervals(buffers[0], buffers[1], 8)
    assert torch.equal(mask.dense(), torch.ones(3, 2, 8, 8).tril().bool())


def test_spans_into_follows_new_values():
    starts, ends = torch.zeros(2, 1, 1, 2, 8, dtype=torch.int32)
    anchors = torch.tensor([[2, 6]])
    where = {"KV_LEN": 16, "draft_block_size": 4, "anchors": anchors}
    spans_into(starts, ends, "dflash", **where)
    assert ends[0, 0, 0].tolist() == [2] * 4 + [6] * 4
    anchors.copy_(torch.tensor([[3, 7]]))
    spans_into(starts, ends, "dflash", **where)
    assert ends[0, 0, 0].tolist() == [3] * 4 + [7] * 4


@pytest.mark.parametrize(
    ("shapes", "params", "field", "rule"),
    [
        (((1, 1, 1, 8),) * 2, {}, "KV_LEN", "do not tell it"),
        (((1, 1, 1, 8),) * 2, {"KV_LEN": 8, "sinks": 1, "window": 2}, "starts", "must hold"),
        (((1, 1, 2, 8), (1, 1, 3, 8)), {"KV_LEN": 8, "sinks": 1, "window": 2}, "starts", "both"),
        (((1, 1, 2, 8),) * 2, {"KV_LEN": 8, "sinks": 1}, "window", "required"),
    ],
)
def test_spans_into_refuses_what_does_not_fit(shapes, params, field, rule):
    starts, ends = (torch.zeros(shape, dtype=torch.int32) for shape in shapes)
    with pytest.raises(MaskSpecError, match=rule) as caught:
        spans_into(starts, ends, "sink_window", **params)
    assert caught.value.field == field


def test_spans_into_refuses_a_batch_that_the_buffers_do_not_have():
    starts, ends = torch.zeros(2, 2, 1, 1, 8, dtype=torch.int32)
    lengths = torch.tensor([1, 2, 3])
    with pytest.raises(MaskSpecError, match="B broadcast"):
        spans_into(starts, ends, "full", KV_LEN=8, lengths=lengths)


def test_spans_lie_where_the_tensors_lie():
    anchors = torch.zeros(1, 2, dtype=torch.int32, device="meta")
    starts, ends = families["dflash"].spans(8, 12, draft_block_size=4, anchors=anchors)
    assert starts.device.type == ends.device.type == "meta"
    assert starts.shape == (1, 1, 2, 8)
