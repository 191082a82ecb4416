import threading

import pytest
import torch
import torch._dynamo
import torch.fx
from torch.nn.attention.flex_attention import create_block_mask

import maskgen
from runtime.errors import FrozenError
from runtime.freeze import COMPILE, FX_TRACE, MASK_BUILD, FreezeGuard


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def spans():
    ends = torch.arange(1, 9, dtype=torch.int32).view(1, 1, 1, 8)
    return maskgen.RowIntervals(torch.zeros_like(ends), ends, 8)


def compile_something():
    torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.ones(3))


PROVOCATIONS = [
    (compile_something, COMPILE, "compile"),
    (lambda: torch.fx.symbolic_trace(torch.nn.ReLU()), FX_TRACE, "trace was called"),
    (lambda: create_block_mask(causal, None, None, 8, 8, device="cpu"), MASK_BUILD, "create_mask"),
    (lambda: maskgen.compile_mask(spans()), MASK_BUILD, "compile_mask"),
    (
        lambda: maskgen.from_mask_mod(causal, Q_LEN=8, KV_LEN=8),
        MASK_BUILD,
        "from_mask_mod",
    ),
]


@pytest.mark.parametrize(("provoke", "kind", "cause"), PROVOCATIONS)
def test_whatever_comes_after_freeze_raises_and_is_counted(provoke, kind, cause):
    torch._dynamo.reset()
    guard = FreezeGuard()
    with guard.active(), pytest.raises(Exception, match=f"{kind} after freeze.*{cause}") as caught:
        provoke()
    chain = [caught.value]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    assert any(isinstance(error, FrozenError) for error in chain) or "FrozenError" in str(chain[0])
    assert guard.counts == {kind: 1}
    provoke()


def test_the_error_names_the_thread():
    guard = FreezeGuard()
    caught = []

    def work():
        try:
            maskgen.compile_mask(spans())
        except FrozenError as error:
            caught.append(str(error))

    with guard.active():
        thread = threading.Thread(target=work, name="worker-7")
        thread.start()
        thread.join()
    assert "in thread 'worker-7'" in caught[0]


def test_what_was_compiled_before_runs_on():
    torch._dynamo.reset()
    add = torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)
    add(torch.ones(3))
    guard = FreezeGuard()
    with guard.active():
        assert add(torch.zeros(3)).tolist() == [1, 1, 1]
    assert guard.counts == {}


def test_the_summary_line():
    guard = FreezeGuard()
    line = guard.summary(1400, 0, eager=True)
    expected = "after freeze: 0 compiles, 0 FX traces, 0 host mask builds, 1,400 steps (eager)"
    assert line == expected
    line = guard.summary(20, 40, eager=False)
    assert line.endswith("20 steps (40 graph replays)")
