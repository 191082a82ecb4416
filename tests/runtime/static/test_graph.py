import contextlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runtime.static.graph import CAPTURE_LOCK, CaptureError, GraphPool, StaticStep, memory_left

CPU = torch.device("cpu")
PAGE = Path(__file__).parents[3] / "docs" / "static_step.md"


def counting_step(name="ctx128 on cpu"):
    runs = torch.zeros((), dtype=torch.int64)
    return StaticStep(lambda: runs.add_(1), GraphPool(CPU), name), runs


def test_on_the_cpu_the_function_itself_runs_each_time():
    step, runs = counting_step()
    step.warm_up()
    assert runs.item() == 1
    step.capture()
    assert runs.item() == 1
    assert not step.captured
    for expected in (2, 3, 4):
        step.run()
        assert runs.item() == expected
    assert step.replays == 0
    step.teardown()
    step.run()
    assert runs.item() == 5


def test_steps_of_one_pool_run_in_any_order():
    pool, log = GraphPool(CPU), []
    steps = [StaticStep(lambda n=n: log.append(n), pool, f"step {n}") for n in range(3)]
    for index in (2, 0, 1, 0):
        with pool.activated():
            steps[index].run()
    pool.synchronize()
    assert log == [2, 0, 1, 0]


def test_a_pool_on_the_cpu_has_neither_stream_nor_memory():
    pool = GraphPool(CPU)
    assert (pool.stream, pool.handle) == (None, None)
    pool.synchronize()
    pool.wait_for_device()


def test_a_warm_up_that_fails_names_the_step_and_keeps_the_cause():
    def fn():
        raise ValueError("shapes differ")

    step = StaticStep(fn, GraphPool(CPU), "ctx128 on cuda:0")
    with pytest.raises(CaptureError, match="cannot warm up ctx128 on cuda:0: shapes differ") as e:
        step.warm_up()
    assert isinstance(e.value.__cause__, ValueError)
    assert not step.captured


def test_a_warm_up_out_of_memory_says_so():
    def fn():
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    step = StaticStep(fn, GraphPool(CPU), "ctx4096 on cuda:1")
    wanted = "cannot warm up ctx4096 on cuda:1: tried to allocate 80 GiB; use smaller buckets"
    with pytest.raises(CaptureError, match=wanted):
        step.warm_up()


def test_what_to_lower_is_said_where_memory_alone_is_short():
    def fn():
        raise error

    step = StaticStep(fn, GraphPool(CPU), "ctx64", memory_hint="lower train.global_batch")
    error = torch.OutOfMemoryError("too much")
    for act, doing in ((step.warm_up, "warm up"), (step.run, "run")):
        with pytest.raises(CaptureError) as caught:
            act()
        assert str(caught.value) == f"cannot {doing} ctx64: too much; lower train.global_batch"
        assert caught.value.__cause__ is error
    error = ValueError("wrong shape")
    with pytest.raises(CaptureError) as caught:
        step.warm_up()
    assert str(caught.value) == "cannot warm up ctx64: wrong shape"
    assert step.replays == 0
    assert memory_left(CPU) == ""


def test_a_step_runs_in_the_modes_of_training_whatever_the_caller_is_in():
    seen = []

    def fn():
        seen.append(
            (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.ones(2, requires_grad=True).sum().requires_grad,
            )
        )

    step = StaticStep(fn, GraphPool(CPU), "step")
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with mode:
            step.warm_up()
            with step.pool.activated():
                step.run()
            autocast = torch.is_autocast_enabled("cpu")
            assert (torch.is_grad_enabled(), autocast) != (True, False)
    assert seen == [(True, False, False, True)] * 6


class Cuda:
    """What a step asks of CUDA, where there is none; tests on a GPU see what comes of it."""

    def __init__(self, monkeypatch):
        self.log, self.options = [], {}
        self.stream, self.graph = self.named("stream"), self.named("graph")
        for name, made in (
            ("Stream", lambda device: self.stream),
            ("CUDAGraph", lambda: self.graph),
            ("graph_pool_handle", lambda: "handle"),
            ("graph", self.capturing),
            ("device", lambda device: self.within(f"on {device}")),
            ("synchronize", lambda device: self.log.append(f"wait for {device}")),
            ("mem_get_info", lambda device: (1_000, 80_000_000)),
            ("memory_reserved", lambda device: 7_000_000),
        ):
            monkeypatch.setattr(torch.cuda, name, made)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: self.within("on its stream"))

    def named(self, name):
        return SimpleNamespace(
            synchronize=lambda: self.log.append(f"wait for {name}"),
            replay=lambda: self.log.append("replay"),
            reset=lambda: self.log.append("reset"),
        )

    @contextlib.contextmanager
    def within(self, what):
        self.log.append(what)
        yield

    @contextlib.contextmanager
    def capturing(self, graph, **options):
        self.options = {"graph": graph, **options}
        assert CAPTURE_LOCK.locked()
        assert not torch.autograd.is_multithreading_enabled()
        self.log.append("capture")
        yield
        self.log.append("captured")


def test_on_a_gpu_a_step_runs_thrice_is_captured_once_and_then_only_replayed(monkeypatch):
    cuda = Cuda(monkeypatch)
    pool = GraphPool(torch.device("cuda", 1))
    step = StaticStep(lambda: cuda.log.append("run"), pool, "ctx16 on cuda:1")
    pool.wait_for_device()
    step.warm_up()
    assert cuda.log == [
        "wait for cuda:1",
        *("on cuda:1", "on its stream", "run", "run", "run", "wait for stream"),
    ]
    cuda.log.clear()
    assert not step.captured
    step.capture()
    assert cuda.log == ["on cuda:1", "capture", "run", "captured"]
    assert cuda.options == {
        "graph": cuda.graph,
        "pool": "handle",
        "stream": cuda.stream,
        "capture_error_mode": "thread_local",
    }
    assert step.captured
    assert not CAPTURE_LOCK.locked()
    assert torch.autograd.is_multithreading_enabled()
    cuda.log.clear()
    step.run()
    step.run()
    assert (cuda.log, step.replays) == (["replay", "replay"], 2)
    step.teardown()
    step.teardown()
    assert cuda.log[2:] == ["reset"]
    assert not step.captured


def test_a_gpu_that_is_full_says_of_what(monkeypatch):
    Cuda(monkeypatch)

    def fn():
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    step = StaticStep(fn, GraphPool(torch.device("cuda", 1)), "ctx16", memory_hint="lower it")
    for act, doing in ((step.warm_up, "warm up"), (step.capture, "capture"), (step.run, "run")):
        with pytest.raises(CaptureError) as caught:
            act()
        assert str(caught.value) == (
            f"cannot {doing} ctx16: tried to allocate 80 GiB; cuda:1 has 80,000,000 bytes, of "
            "which this process has reserved 7,000,000 and 1,000 are free; lower it"
        )
    assert not step.captured
    assert not CAPTURE_LOCK.locked()


def test_what_is_interrupted_is_no_failure_to_capture():
    def fn():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        StaticStep(fn, GraphPool(CPU), "step").warm_up()


def test_a_step_that_fails_later_raises_its_own_error():
    def fn():
        raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        StaticStep(fn, GraphPool(CPU), "step").run()


def test_the_example_of_the_page_runs_and_attends_within_documents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    x, out = names["host"]["x"], names["out"]
    for start, end in ((0, 10), (10, 64)):
        document = x[:, :, start:end]
        alone = torch.nn.functional.scaled_dot_product_attention(
            document, document, document, is_causal=True
        )
        torch.testing.assert_close(out[:, :, start:end], alone)
