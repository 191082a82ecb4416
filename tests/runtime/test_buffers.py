import pytest
import torch

from runtime.buffers import Field, StaticInputs

CPU = torch.device("cpu")
FIELDS = {"ids": Field((2, 3), torch.int64), "scale": Field((), torch.float32)}


def test_tensors_and_slots_have_the_fields_shapes_and_start_at_zero():
    inputs = StaticInputs(FIELDS, CPU)
    slot = inputs.free.get_nowait()
    for tensors in (inputs.tensors, slot.tensors):
        assert list(tensors) == ["ids", "scale"]
        assert tensors["ids"].shape == (2, 3)
        assert tensors["ids"].dtype == torch.int64
        assert tensors["scale"].shape == ()
        assert not any(tensor.any() for tensor in tensors.values())


def test_a_copy_fills_the_same_tensors_and_hands_the_slot_back():
    inputs = StaticInputs(FIELDS, CPU, num_slots=1)
    addresses = {name: tensor.data_ptr() for name, tensor in inputs.tensors.items()}
    slot = inputs.free.get_nowait()
    for step in (1, 2):
        slot.wait()
        slot.tensors["ids"].fill_(step)
        slot.tensors["scale"].fill_(step / 2)
        inputs.copy_from(slot)
        assert inputs.tensors["ids"].tolist() == [[step] * 3] * 2
        assert inputs.tensors["scale"].item() == step / 2
        assert inputs.free.get_nowait() is slot
    assert addresses == {name: tensor.data_ptr() for name, tensor in inputs.tensors.items()}


def test_a_filled_slot_does_not_change_the_step_before_it_is_copied():
    inputs = StaticInputs(FIELDS, CPU)
    first, second = inputs.free.get_nowait(), inputs.free.get_nowait()
    first.tensors["ids"].fill_(1)
    inputs.copy_from(first)
    second.tensors["ids"].fill_(2)
    assert inputs.tensors["ids"].unique().tolist() == [1]
    assert inputs.free.get_nowait() is first


def test_there_are_as_many_slots_as_asked_for():
    inputs = StaticInputs(FIELDS, CPU, num_slots=3)
    slots = {id(inputs.free.get_nowait()) for _ in range(3)}
    assert len(slots) == 3
    assert inputs.free.empty()


def test_a_slot_of_another_shape_is_refused():
    inputs = StaticInputs(FIELDS, CPU)
    other = StaticInputs({"ids": Field((2, 4), torch.int64)}, CPU)
    with pytest.raises(RuntimeError, match=r"size of tensor a \(3\) must match"):
        inputs.copy_from(other.free.get_nowait())
