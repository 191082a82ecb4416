import threading

import pytest
import torch
import torch._dynamo
import torch.fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import maskgen
from maskgen import host_builds
from runtime.errors import FrozenError
from runtime.static.freeze import (
    COMPILE,
    EAGER_FLEX,
    FX_TRACE,
    GRAPH_RECORDING,
    MASK_BUILD,
    FreezeGuard,
)
from runtime.static.torch_internals import EAGER_ATTENTION, MASK_BUILDER


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def spans():
    ends = torch.arange(1, 9, dtype=torch.int32).view(1, 1, 1, 8)
    return maskgen.RowIntervals(torch.zeros_like(ends), ends, 8)


def compile_something():
    torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.ones(3))


def compile_a_module():
    torch.compile(torch.nn.Linear(3, 3), backend="eager")(torch.ones(3))


def compile_what_breaks_in_two():
    def broken(x):
        torch._dynamo.graph_break()
        return x * 2

    torch.compile(broken, backend="eager")(torch.ones(3))


def compile_a_condition():
    one = torch.ones(3)
    torch.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (one,))


def attend():
    x = torch.ones(1, 1, 8, 16)
    return flex_attention(x, x, x)


TABLES = maskgen.compile_mask(spans(), BLOCK_SIZE=16)
PROVOCATIONS = {
    "compile": (compile_something, COMPILE, "DYNAMO"),
    "compile a module": (compile_a_module, COMPILE, "DYNAMO"),
    "compile in pieces": (compile_what_breaks_in_two, COMPILE, "DYNAMO"),
    "compile a condition": (compile_a_condition, COMPILE, "DYNAMO"),
    "trace": (lambda: torch.fx.symbolic_trace(torch.nn.ReLU()), FX_TRACE, "trace was called"),
    "create_block_mask": (
        lambda: create_block_mask(causal, None, None, 8, 8, device="cpu"),
        MASK_BUILD,
        "create_mask",
    ),
    "compile_mask": (lambda: maskgen.compile_mask(spans()), MASK_BUILD, "compile_mask"),
    "from_mask_mod": (
        lambda: maskgen.from_mask_mod(causal, Q_LEN=8, KV_LEN=8),
        MASK_BUILD,
        "from_mask_mod",
    ),
    "to_block_mask": (
        lambda: maskgen.to_block_mask(TABLES, spans()),
        MASK_BUILD,
        "to_block_mask",
    ),
    "eager attention": (attend, EAGER_FLEX, "setup_compilation_env"),
}


def hooks():
    """All that the guard puts in place."""
    return (
        list(torch._dynamo.callback.callback_handler.start_callbacks),
        host_builds._callbacks,
        torch.fx.Tracer.trace,
        torch.cuda.CUDAGraph.capture_begin,
        *(getattr(*place) for place in (MASK_BUILDER, EAGER_ATTENTION)),
    )


def provoke_in_a_worker(provoke, guard):
    """Run it in a thread of its own under the guard; gives what it raised."""
    raised = []

    def work():
        try:
            provoke()
        except BaseException as error:
            raised.append(error)

    before = hooks()
    with guard.active():
        assert all(now != then for now, then in zip(hooks(), before, strict=True))
        thread = threading.Thread(target=work, name="worker-7")
        thread.start()
        thread.join()
    assert hooks() == before
    (error,) = raised
    return error


def frozen_error(error):
    """The message of the guard's error, which comes out of torch as it is, on one line."""
    assert isinstance(error, FrozenError)
    assert "\n" not in str(error)
    return str(error)


@pytest.mark.parametrize(
    ("provoke", "kind", "cause"), PROVOCATIONS.values(), ids=PROVOCATIONS.keys()
)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_whatever_comes_after_freeze_raises_in_its_thread_and_is_counted(provoke, kind, cause):
    torch._dynamo.reset()
    guard = FreezeGuard()
    message = frozen_error(provoke_in_a_worker(provoke, guard))
    assert message.startswith(f"{kind} after freeze in thread 'worker-7': ")
    assert cause in message
    assert guard.counts == {kind: 1}
    provoke()


def test_a_backward_pass_that_was_not_warmed_up_is_a_compile():
    torch._dynamo.reset()
    x = torch.ones(3, requires_grad=True)
    loss = torch.compile(lambda x: x.sin().sum(), backend="aot_eager", fullgraph=True)(x)
    guard = FreezeGuard()
    message = frozen_error(provoke_in_a_worker(loss.backward, guard))
    assert "compile after freeze" in message
    assert "LAZY_BACKWARD" in message
    assert guard.counts == {COMPILE: 1}


def test_attention_that_was_compiled_is_let_through():
    torch._dynamo.reset()
    x = torch.randn(1, 1, 8, 16)
    compiled = torch.compile(flex_attention, backend="eager", fullgraph=True)
    before = compiled(x, x, x)
    guard = FreezeGuard()
    with guard.active():
        assert torch.equal(compiled(x, x, x), before)
    assert guard.counts == {}


def test_a_shape_that_was_not_warmed_up_is_a_compile():
    torch._dynamo.reset()
    double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    double(torch.ones(3))
    guard = FreezeGuard()
    assert "DYNAMO" in frozen_error(provoke_in_a_worker(lambda: double(torch.ones(4)), guard))
    assert guard.counts == {COMPILE: 1}


@pytest.mark.gpu
def test_a_graph_recorded_after_freeze_raises():
    x = torch.zeros(4, device="cuda")

    def record():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add_(1)

    record()
    guard = FreezeGuard()
    message = frozen_error(provoke_in_a_worker(record, guard))
    assert message.startswith(f"{GRAPH_RECORDING} after freeze in thread 'worker-7': ")
    assert guard.counts == {GRAPH_RECORDING: 1}
    record()


@pytest.mark.gpu
def test_compiled_attention_on_a_gpu_is_let_through_and_eager_is_not():
    x = torch.randn(1, 1, 128, 64, device="cuda", requires_grad=True)
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    compiled(x, x, x).sum().backward()
    guard = FreezeGuard()
    with guard.active():
        compiled(x, x, x).sum().backward()
        assert guard.counts == {}
        with pytest.raises(FrozenError, match=EAGER_FLEX):
            flex_attention(x, x, x)
    assert guard.counts == {EAGER_FLEX: 1}


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
    for kind, times in ((COMPILE, 1), (FX_TRACE, 2), (MASK_BUILD, 3), (EAGER_FLEX, 4)):
        for _ in range(times):
            with pytest.raises(FrozenError):
                guard.trip(kind, "tried")
    line = guard.summary(1234567, 2345678, eager=False)
    assert line == (
        "after freeze: 1 compiles, 2 FX traces, 3 host mask builds, 1,234,567 steps (2,345,678 "
        "graph replays)"
    )
    assert guard.counts == {COMPILE: 1, FX_TRACE: 2, MASK_BUILD: 3, EAGER_FLEX: 4}


def test_the_error_names_kind_thread_and_cause():
    with pytest.raises(FrozenError) as caught:
        FreezeGuard().trip(MASK_BUILD, "create_mask was called")
    assert str(caught.value) == (
        "host mask build after freeze in thread 'MainThread': create_mask was called; all of it "
        "must be done before the steps begin"
    )


def test_a_graph_that_torch_records_by_itself_is_no_compile():
    guard = FreezeGuard()
    for trigger, kind in (("CUDAGRAPH_RECORDING", GRAPH_RECORDING), ("DYNAMO", COMPILE)):
        with pytest.raises(FrozenError, match=f"{kind} after .*: {trigger}, compile id 3/1;"):
            guard._on_compile(trigger, "3/1")
    assert guard.counts == {GRAPH_RECORDING: 1, COMPILE: 1}


def test_counts_are_a_copy():
    guard = FreezeGuard()
    guard.counts[COMPILE] = 9
    assert guard.counts == {}


def test_what_kept_a_hook_of_the_guard_is_free_again_after_it():
    """As a module that was imported meanwhile."""
    guard = FreezeGuard()
    with guard.active() as given:
        kept = torch.fx.Tracer.trace
    assert given is guard
    assert kept(torch.fx.Tracer(), torch.nn.ReLU()) is not None
    assert kept.__name__ == "trace"
    assert guard.counts == {}


def test_an_error_of_the_run_takes_the_hooks_away_and_is_not_counted():
    before, guard = hooks(), FreezeGuard()
    with pytest.raises(ZeroDivisionError), guard.active():
        raise ZeroDivisionError
    assert hooks() == before
    compile_something()
    assert guard.counts == {}
    # The same guard counts on.
    torch._dynamo.reset()
    with pytest.raises(FrozenError), guard.active():
        compile_something()
    assert guard.counts == {COMPILE: 1}
