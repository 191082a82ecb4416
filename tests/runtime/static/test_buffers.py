import threading
from typing import ClassVar

import pytest
import torch

from runtime.static.buffers import Field, StaticInputs, input_slots

CPU = torch.device("cpu")
# A slot that does not come back would leave a test waiting.
pytestmark = pytest.mark.timeout(60)
SMALL = {"ids": Field((2, 3), torch.int64), "scale": Field((), torch.float32)}
LARGE = {"ids": Field((2, 5), torch.int64), "far": Field((2, 4), torch.float32, from_host=False)}


def test_static_inputs_have_the_fields_shapes_and_start_at_zero():
    tensors = StaticInputs(SMALL, CPU).tensors
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "ids": ((2, 3), torch.int64),
        "scale": ((), torch.float32),
    }
    assert not any(tensor.any() for tensor in tensors.values())


def test_a_slot_serves_buckets_of_any_size_and_comes_back():
    free = input_slots([SMALL, LARGE], CPU, num_slots=1)
    inputs = {name: StaticInputs(fields, CPU) for name, fields in (("s", SMALL), ("l", LARGE))}
    addresses = [tensor.data_ptr() for i in inputs.values() for tensor in i.tensors.values()]
    for step in (1, 2):
        for name, fields in (("s", SMALL), ("l", LARGE)):
            slot = free.get()
            host = slot.open(fields)
            assert [key for key, field in fields.items() if field.from_host] == list(host)
            host["ids"].fill_(step)
            slot.send()
            inputs[name].take(slot)
            assert inputs[name].tensors["ids"].tolist() == [[step] * fields["ids"].shape[1]] * 2
    assert addresses == [t.data_ptr() for i in inputs.values() for t in i.tensors.values()]


def test_what_another_device_wrote_arrives_with_the_rest():
    free = input_slots([LARGE], CPU)
    inputs = StaticInputs(LARGE, CPU)
    slot = free.get()
    slot.open(LARGE)["ids"].fill_(7)
    slot.send()
    far = torch.arange(8.0).view(2, 4)
    slot.write("far", far)
    far.zero_()
    inputs.take(slot)
    assert inputs.tensors["far"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert inputs.tensors["ids"].unique().tolist() == [7]


def test_a_filled_slot_does_not_change_the_step_before_it_is_taken():
    free = input_slots([SMALL], CPU)
    inputs = StaticInputs(SMALL, CPU)
    first, second = free.get(), free.get()
    first.open(SMALL)["ids"].fill_(1)
    inputs.take(first)
    second.open(SMALL)["ids"].fill_(2)
    assert inputs.tensors["ids"].unique().tolist() == [1]
    assert free.get() is first


def test_a_slot_that_was_taken_is_free_again():
    free = input_slots([SMALL], CPU, num_slots=1)
    inputs = StaticInputs(SMALL, CPU)
    for _ in range(3):
        slot = free.get()
        slot.open(SMALL)
        inputs.take(slot)


def test_without_a_free_slot_a_feeder_waits_for_one():
    free = input_slots([SMALL], CPU, num_slots=1)
    slot = free.get()
    taken = []
    waiter = threading.Thread(target=lambda: taken.append(free.get()))
    waiter.start()
    waiter.join(0.05)
    assert not taken
    slot.release()
    waiter.join(5)
    assert taken == [slot]


def test_a_slot_of_another_bucket_is_refused():
    free = input_slots([SMALL, {"ids": Field((2, 4), torch.int64)}], CPU)
    slot = free.get()
    slot.open({"ids": Field((2, 4), torch.int64)})
    with pytest.raises(RuntimeError, match=r"size of tensor a \(3\) must match"):
        StaticInputs({"ids": SMALL["ids"]}, CPU).take(slot)


def test_the_largest_field_of_a_name_is_that_of_most_elements_wherever_it_stands():
    """More rows may be fewer elements, and the first bucket may be the largest."""
    wide, tall = {"x": Field((2, 9), torch.int32)}, {"x": Field((5, 3), torch.int32)}
    for buckets in ([wide, tall], [tall, wide], [tall, wide, tall]):
        slot = input_slots(iter(buckets), CPU, num_slots=1).get()
        for fields in (wide, tall):
            shape = fields["x"].shape
            host = slot.open(fields)
            assert (host["x"].shape, host["x"].dtype) == (shape, torch.int32)
            assert slot.staged["x"].data_ptr() == host["x"].data_ptr()


def test_two_slots_unless_more_are_asked_for_and_none_shares_memory():
    for asked, found in (({}, 2), ({"num_slots": 3}, 3)):
        free = input_slots([SMALL], CPU, **asked)
        slots = [free.get() for _ in range(found)]
        assert free.depth == found
        assert len({slot.open(SMALL)["ids"].data_ptr() for slot in slots}) == found
        waiter = threading.Thread(target=free.get, daemon=True)
        waiter.start()
        waiter.join(0.05)
        assert waiter.is_alive()
        slots[0].release()
        waiter.join(5)
        assert not waiter.is_alive()


def test_a_slot_has_only_the_fields_of_the_bucket_that_it_is_open_for():
    slot = input_slots([SMALL, LARGE], CPU).get()
    assert (slot.host, slot.staged) == ({}, {})
    slot.open(LARGE)
    assert (set(slot.host), set(slot.staged)) == ({"ids"}, {"ids", "far"})
    assert slot.staged["far"].shape == (2, 4)
    slot.open(SMALL)
    assert set(slot.host) == set(slot.staged) == {"ids", "scale"}
    assert slot.staged["scale"].shape == ()


def test_fields_come_from_the_host_unless_they_say_otherwise():
    assert Field((1,), torch.int32).from_host


class Event:
    """What a slot asks of CUDA's events, where there is none; a test on a GPU sees the data."""

    log: ClassVar[list] = []

    def __init__(self):
        self.name = "event"

    def synchronize(self):
        self.log.append((self.name, "synchronize"))

    def wait(self):
        self.log.append((self.name, "wait"))

    def record(self, stream="current"):
        self.log.append((self.name, "record", stream))


def test_on_a_gpu_every_copy_waits_for_what_came_before_it(monkeypatch):
    zeros, pinned = torch.zeros, []

    def on_the_host(*shape, device, pin_memory=False, **options):
        pinned.append((str(device), pin_memory))
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", on_the_host)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    log = Event.log
    log.clear()
    device = torch.device("cuda", 1)
    slot = input_slots([LARGE], device, num_slots=1).get()
    assert pinned == [("cpu", True), ("cuda:1", False), ("cuda:1", False)]
    inputs = StaticInputs(LARGE, device)
    slot._sent.name, slot._taken.name = "sent", "taken"

    slot.open(LARGE)["ids"].fill_(7)
    assert log == [("sent", "synchronize")]
    # Memory of its own: the step before may still read the device's.
    assert not slot.staged["ids"].any()
    log.clear()
    slot.send()
    assert log == [("taken", "wait"), ("sent", "record", "current")]
    assert slot.staged["ids"].unique().tolist() == [7]
    log.clear()
    slot.write("far", torch.ones(2, 4))
    assert log == [("taken", "wait"), ("event", "record", "stream of cpu")]
    assert slot.staged["far"].unique().tolist() == [1]
    slot._written.name = "written"
    log.clear()
    inputs.take(slot)
    assert log == [("sent", "wait"), ("written", "wait"), ("taken", "record", "current")]
    assert inputs.tensors["ids"].unique().tolist() == [7]
    assert inputs.tensors["far"].unique().tolist() == [1]
    log.clear()
    slot.open(LARGE)
    assert log == [("sent", "synchronize"), ("written", "synchronize")]
    # The next writer may be on another device, to which an event does not change.
    before = slot._written
    slot.write("far", torch.ones(2, 4))
    assert slot._written is not before


@pytest.mark.gpu
def test_on_a_gpu_every_step_reads_its_own_data():
    device = torch.device("cuda", 0)
    fields = {"x": Field((1 << 22,), torch.float32), "y": Field((1 << 20,), torch.float32, False)}
    free = input_slots([fields], device)
    inputs = StaticInputs(fields, device)
    copies, steps = torch.cuda.Stream(device), torch.cuda.Stream(device)
    torch.cuda.synchronize()
    seen = torch.zeros(50, 2, device=device)
    for number in range(50):
        slot = free.get()
        slot.open(fields)["x"].fill_(number)
        with torch.cuda.stream(copies):
            slot.send()
            slot.write("y", torch.full((1 << 20,), float(-number), device=device))
        with torch.cuda.stream(steps):
            inputs.take(slot)
            torch.cuda._sleep(2_000_000)
            seen[number, 0] = inputs.tensors["x"].amax() + inputs.tensors["x"].amin()
            seen[number, 1] = inputs.tensors["y"].amax() + inputs.tensors["y"].amin()
    torch.cuda.synchronize()
    expected = torch.arange(50.0)[:, None] * torch.tensor([2.0, -2.0])
    assert torch.equal(seen.cpu(), expected)
