import pytest
import torch

from runtime.errors import ConfigError, DeviceUnavailableError
from runtime.ranks.devices import place


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
