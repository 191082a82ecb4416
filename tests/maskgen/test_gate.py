import threading

import pytest
import torch

from maskgen import (
    HostBuildForbiddenError,
    RowIntervals,
    block_mask_over,
    compile_mask,
    from_mask_mod,
    gate,
    spans_mask_mod,
    tables_into,
    to_block_mask,
)


def refuse(what):
    raise HostBuildForbiddenError(what, "training runs")


def causal(n=32):
    ends = torch.arange(1, n + 1, dtype=torch.int32).view(1, 1, 1, n)
    return RowIntervals(torch.zeros_like(ends), ends, n)


def test_each_host_build_is_refused_by_name_while_the_gate_is_closed():
    spans = causal()
    tables = compile_mask(spans, 16)
    builds = {
        "compile_mask": lambda: compile_mask(spans, 16),
        "from_mask_mod": lambda: from_mask_mod(lambda b, h, q, kv: q >= kv, Q_LEN=4, KV_LEN=4),
        "to_block_mask": lambda: to_block_mask(tables, spans),
    }
    with gate.closed(refuse):
        for name, build in builds.items():
            with pytest.raises(HostBuildForbiddenError, match=f"{name} may not run now") as info:
                build()
            assert (info.value.what, info.value.reason) == (name, "training runs")
    for build in builds.values():
        build()


def test_what_writes_static_buffers_does_not_pass_the_gate():
    spans = causal()
    tables = compile_mask(spans, 16)
    with gate.closed(refuse):
        tables_into(tables, spans.starts, spans.ends)
        block_mask_over(tables, spans_mask_mod(spans.starts, spans.ends))


def test_callbacks_nest_count_and_see_other_threads():
    outer, inner = [], []
    with gate.closed(outer.append), gate.closed(inner.append):
        thread = threading.Thread(target=gate.passing, args=("a",))
        thread.start()
        thread.join()
    with gate.closed(outer.append):
        gate.passing("b")
    gate.passing("c")
    assert outer == ["a", "b"]
    assert inner == ["a"]


def test_one_callback_may_hold_the_gate_twice():
    seen = []
    with gate.closed(seen.append):
        with gate.closed(seen.append):
            gate.passing("twice")
        gate.passing("once")
    assert seen == ["twice", "twice", "once"]
