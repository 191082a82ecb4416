import threading

import pytest
import torch

from maskgen import (
    HostBuildForbiddenError,
    RowIntervals,
    block_mask_over,
    compile_mask,
    from_mask_mod,
    host_builds,
    spans_mask_mod,
    tables_into,
    to_block_mask,
)


def refuse(what):
    raise HostBuildForbiddenError(what, "training runs")


def causal(n=32):
    ends = torch.arange(1, n + 1, dtype=torch.int32).view(1, 1, 1, n)
    return RowIntervals(torch.zeros_like(ends), ends, n)


def test_each_host_build_is_refused_by_name_while_somebody_watches():
    spans = causal()
    tables = compile_mask(spans, 16)
    builds = {
        "compile_mask": lambda: compile_mask(spans, 16),
        "from_mask_mod": lambda: from_mask_mod(lambda b, h, q, kv: q >= kv, Q_LEN=4, KV_LEN=4),
        "to_block_mask": lambda: to_block_mask(tables, spans),
    }
    with host_builds.watched(refuse):
        for name, build in builds.items():
            with pytest.raises(HostBuildForbiddenError, match=f"{name} may not run now") as info:
                build()
            assert (info.value.what, info.value.reason) == (name, "training runs")
    for build in builds.values():
        build()


def test_what_writes_static_buffers_is_no_host_build():
    spans = causal()
    tables = compile_mask(spans, 16)
    with host_builds.watched(refuse):
        tables_into(tables, spans.starts, spans.ends)
        block_mask_over(tables, spans_mask_mod(spans.starts, spans.ends))


def test_callbacks_nest_count_and_see_other_threads():
    outer, inner = [], []
    with host_builds.watched(outer.append), host_builds.watched(inner.append):
        thread = threading.Thread(target=host_builds.announce, args=("a",))
        thread.start()
        thread.join()
    with host_builds.watched(outer.append):
        host_builds.announce("b")
    host_builds.announce("c")
    assert outer == ["a", "b"]
    assert inner == ["a"]


def test_one_callback_may_hold_the_gate_twice():
    seen = []
    with host_builds.watched(seen.append):
        with host_builds.watched(seen.append):
            host_builds.announce("twice")
        host_builds.announce("once")
    assert seen == ["twice", "twice", "once"]


def test_contexts_may_overlap():
    first, second = [], []
    outer, inner = host_builds.watched(first.append), host_builds.watched(second.append)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    host_builds.announce("one left")
    inner.__exit__(None, None, None)
    host_builds.announce("none left")
    assert (first, second) == ([], ["one left"])


def test_a_refused_build_leaves_the_watcher_in_place():
    seen = []
    raises = pytest.raises(HostBuildForbiddenError)
    with host_builds.watched(seen.append), raises, host_builds.watched(refuse):
        compile_mask(causal(), 16)
    compile_mask(causal(), 16)
    assert seen == ["compile_mask"]
