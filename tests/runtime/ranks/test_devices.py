import os

import pytest
import torch

from runtime.errors import ConfigError, DeviceUnavailableError
from runtime.ranks.devices import enter_thread, place


def test_cpu_workers_share_the_cores():
    one, two = place("cpu"), place("cpu, cpu")
    assert len(two.devices) == 2
    assert two.threads == max(1, one.threads // 2)
    assert one.compute_dtype == torch.float32
    assert place("cpu", threads=3).threads == 3
    assert place("cpu", dtype="bfloat16").compute_dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("gpu", "must be a device such as"),
        ("cpu,cuda:0", "must be all GPUs or all CPUs"),
        ("meta", "must be cpu or cuda:N"),
        ("", "must be a device such as"),
    ],
)
def test_malformed_devices_are_refused(names, message):
    with pytest.raises(ConfigError, match=message):
        place(names)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceUnavailableError, match=r"asks for a GPU.*sees none; name cpu"):
        place("cuda:0")
    assert place("auto").devices == (torch.device("cpu"),)


def test_gpus_are_numbered_and_named_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert place("cuda:1,cuda:0").compute_dtype == torch.bfloat16
    assert place("auto").devices == (torch.device("cuda", 0),)
    with pytest.raises(DeviceUnavailableError, match=r"asks for cuda:2, and there are 2 GPUs"):
        place("cuda:2")
    with pytest.raises(ConfigError, match="must name each GPU once"):
        place("cuda:0,cuda")


def test_a_list_is_shared_out_to_the_processes_of_a_host():
    assert len(place("auto", share=(1, 2)).devices) == 1
    assert len(place("cpu,cpu,cpu,cpu", share=(1, 2)).devices) == 2
    assert place("cpu,cpu", share=(0, 2)).threads == place("cpu,cpu").threads
    with pytest.raises(ConfigError, match=r"must be a multiple of 2 devices.* host's 2 processes"):
        place("cpu,cpu,cpu", share=(0, 2))


def test_processes_of_a_host_take_its_gpus_in_order(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert place("auto", share=(3, 4)).devices == (torch.device("cuda", 3),)
    listed = "cuda:2,cuda:0,cuda:3,cuda:1"
    assert place(listed, share=(1, 2)).devices == (torch.device("cuda", 3), torch.device("cuda", 1))
    with pytest.raises(DeviceUnavailableError, match=r"asks for cuda:4, and there are 4 GPUs"):
        place("auto", share=(0, 5))


@pytest.fixture
def cores(monkeypatch):
    """Twelve cores, of which this process may use ten."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)))
    monkeypatch.setattr(os, "cpu_count", lambda: 12)


@pytest.mark.parametrize(
    ("names", "share", "threads"),
    [
        ("cpu", (0, 1), 10),
        ("cpu,cpu", (0, 1), 5),
        ("cpu,cpu,cpu", (0, 1), 3),
        ("cpu,cpu,cpu", (2, 3), 3),
        ("cpu,cpu,cpu,cpu,cpu,cpu", (1, 3), 1),
        ("auto", (2, 3), 3),
        (",".join(["cpu"] * 11), (0, 1), 1),
    ],
)
def test_the_cores_of_a_host_are_shared_by_all_its_workers(cores, names, share, threads):
    assert place(names, share=share).threads == threads
    assert place(names, share=share, threads=7).threads == 7


def test_where_no_system_says_which_cores_a_process_may_use(cores, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert place("cpu,cpu").threads == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert place("cpu").threads == 1


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)


def test_three_processes_share_a_list_in_its_order(gpus):
    listed = "cuda:5, cuda:0,cuda:4,cuda:1,cuda:3,cuda:2"
    shares = [place(listed, share=(number, 3)) for number in range(3)]
    assert [[device.index for device in share.devices] for share in shares] == [
        [5, 0], [4, 1], [3, 2]
    ]  # fmt: skip
    assert {(share.kind, share.compute_dtype) for share in shares} == {("cuda", torch.bfloat16)}
    autos = [place("auto", share=(number, 3)).devices for number in range(3)]
    assert autos == [(torch.device("cuda", number),) for number in range(3)]


@pytest.mark.parametrize(("names", "count"), [("cuda:0", 2), ("cuda:0,cuda:1,cuda:2,cuda:3", 3)])
def test_a_list_that_cannot_be_shared_evenly_names_itself(gpus, names, count):
    with pytest.raises(ConfigError) as caught:
        place(names, share=(0, count), field="evaluate.devices")
    assert str(caught.value) == (
        f"evaluate.devices = {names!r}: must be a multiple of {count} devices, so that each of "
        f"this host's {count} processes gets as many"
    )


def test_the_last_gpu_is_taken_and_the_one_behind_it_named(gpus):
    assert place("cuda:5").devices == (torch.device("cuda", 5),)
    with pytest.raises(DeviceUnavailableError) as caught:
        place("cuda:0,cuda:6,cuda:9", field="evaluate.devices")
    assert str(caught.value) == (
        "evaluate.devices = 'cuda:0,cuda:6,cuda:9' asks for cuda:6, and there are 6 GPUs "
        "(cuda:0 to cuda:5)"
    )


@pytest.mark.parametrize(
    ("names", "value", "rule"),
    [
        ("cpu,gpu", "gpu", "must be a device such as cpu or cuda:0"),
        ("cpu,,cpu", "", "must be a device such as cpu or cuda:0"),
        ("cpu,meta", "meta", "must be cpu or cuda:N"),
        ("cpu,cuda:1", "cpu,cuda:1", "must be all GPUs or all CPUs"),
        ("cuda:1,cuda:2,cuda:1", "cuda:1,cuda:2,cuda:1", "must name each GPU once"),
    ],
)
def test_a_refusal_names_the_field_and_what_stands_there(gpus, names, value, rule):
    for field in ("run.devices", "evaluate.devices"):
        with pytest.raises(ConfigError) as caught:
            place(names, field=field)
        assert str(caught.value) == f"{field} = {value!r}: {rule}"
    with pytest.raises(ConfigError, match=r"^run\.devices = "):
        place(names)


def test_dtypes_that_a_run_asks_for(gpus):
    for names, auto in (("cpu", torch.float32), ("cuda:0", torch.bfloat16)):
        assert place(names).compute_dtype == place(names, dtype="auto").compute_dtype == auto
        assert place(names, dtype="float32").compute_dtype == torch.float32
        assert place(names, dtype="bfloat16").compute_dtype == torch.bfloat16
    assert place("cpu").kind == "cpu"


def test_a_gpu_where_pytorch_sees_none_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # A driver may count devices that cannot be used.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceUnavailableError) as caught:
        place("cuda:0,cuda:1")
    assert str(caught.value) == (
        f"run.devices = 'cuda:0,cuda:1' asks for a GPU, and PyTorch {torch.__version__} sees none; "
        "name cpu, or install a CUDA build of PyTorch and a driver"
    )


def test_a_worker_sets_its_threads_and_its_gpu(monkeypatch):
    threads, current = [], []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    enter_thread(torch.device("cpu"), 3)
    enter_thread(torch.device("cuda", 2), 1)
    assert threads == [3, 1]
    assert current == [torch.device("cuda", 2)]
