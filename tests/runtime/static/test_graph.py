import re
from pathlib import Path

import pytest
import torch

from runtime.static.graph import CaptureError, GraphPool, StaticStep, memory_left

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
