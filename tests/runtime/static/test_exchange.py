"""Gradients are reduced while the backward pass goes on, in either dtype."""

import copy
import weakref

import pytest
import torch
from torch import nn

from runtime.dflash.network.drafter import Drafter, DrafterConfig, backward_stages
from runtime.ranks.collectives import leave_groups, make_groups, on_every_rank
from runtime.ranks.devices import place
from runtime.static.exchange import GradientExchange
from runtime.static.optimizer import AdamWSettings, FlatAdamW

SETTINGS = AdamWSettings(
    lr=1e-3,
    min_lr_ratio=0.0,
    warmup_steps=0,
    total_steps=10,
    betas=(0.9, 0.95),
    weight_decay=0.0,
    clip=0.0,
)
CONFIG = DrafterConfig(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    vocab_size=32,
    draft_block_size=4,
    num_target_layers=4,
    target_layer_ids=(0, 1),
    mask_token_id=31,
    max_position_embeddings=64,
)


class Recorded:
    """A group of two that reduces nothing and says when it is asked to."""

    size = 2

    def __init__(self, events):
        self.events = events

    def start_all_reduces(self, tensors):
        self.events.append(sum(tensor.numel() for tensor in tensors))
        return self

    def wait(self):
        self.events.append("waited")


def optimizer_of(module, **options):
    return FlatAdamW(
        module,
        SETTINGS,
        device=torch.device("cpu"),
        dtype=torch.float32,
        num_sums=1,
        **options,
    )


@pytest.mark.parametrize("reduce_dtype", ["float32", "compute"])
def test_a_layers_gradients_travel_before_the_layer_below_is_begun(reduce_dtype):
    drafter, events = Drafter(CONFIG), []
    optimizer = optimizer_of(drafter, stages=backward_stages(drafter))
    exchange = GradientExchange(optimizer, Recorded(events), reduce_dtype=reduce_dtype)
    exchange.reducing = True
    for index, layer in enumerate(drafter.layers):
        layer.register_full_backward_pre_hook(lambda *_, index=index: events.append(f"d{index}"))
    x = torch.randn(1, 8, 16, requires_grad=True)
    F = drafter.fuse(torch.randn(1, 6, 32))
    hidden = drafter(
        x,
        F,
        torch.arange(6),
        torch.arange(8),
        lambda q, k, v: nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
    )
    exchange.backward(hidden.square().sum())
    exchange.finish()
    layer = sum(p.numel() for p in drafter.layers[0].parameters() if p.dim() == 2)
    fusion = drafter.fc.weight.numel()
    tail = optimizer.tail.numel()
    expected = ["d2", layer, "d1", layer, "d0", layer, fusion, tail]
    assert events[: len(expected)] == expected
    assert set(events[len(expected) :]) == {"waited"}


@pytest.mark.parametrize("reduce_dtype", ["float32", "compute"])
def test_a_step_leaves_nothing_for_the_next_one_to_do(reduce_dtype):
    events, sent = [], []

    class Watched(Recorded):
        def start_all_reduces(self, tensors):
            sent.extend(weakref.ref(tensor) for tensor in tensors)
            return super().start_all_reduces(tensors)

    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    optimizer = optimizer_of(module)
    exchange = GradientExchange(optimizer, Watched(events), reduce_dtype=reduce_dtype)
    exchange.reducing = True
    steps = []
    for _ in range(3):
        exchange.backward(module(torch.ones(2, 4)).square().sum())
        exchange.finish()
        steps.append(events.copy())
        events.clear()
    assert steps[0] == steps[1] == steps[2]
    assert steps[0].count("waited") == len(steps[0]) // 2 == 2
    # Copies that were sent are gone; the flat tensors are the optimizer's and stay.
    flat = optimizer.reduced.untyped_storage().data_ptr()
    left = [ref() for ref in sent if ref() is not None]
    assert all(tensor.untyped_storage().data_ptr() == flat for tensor in left)


@pytest.mark.parametrize("reduce_dtype", ["float32", "compute"])
def test_two_ranks_hold_the_sum_of_their_gradients(reduce_dtype):
    placement = place("cpu,cpu")
    groups = make_groups(placement)
    whole = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3, bias=False))
    modules = [copy.deepcopy(whole) for _ in groups]

    def gradients(group):
        module = modules[group.rank]
        exchange = GradientExchange(optimizer_of(module), group, reduce_dtype=reduce_dtype)
        exchange.reducing = True
        exchange.backward(module(torch.full((2, 4), group.rank + 1.0)).square().sum())
        exchange.optimizer.sums.fill_(group.rank + 1.0)
        exchange.finish()
        return exchange.optimizer.reduced

    found = on_every_rank(gradients, groups)
    assert leave_groups(groups, 10.0)
    for value in (1.0, 2.0):
        whole(torch.full((2, 4), value)).square().sum().backward()
    # 20 and 15 elements, then three times 5, each at a multiple of 8, then the sum.
    starts = {"0.weight": 0, "2.weight": 24, "0.bias": 40, "1.weight": 48, "1.bias": 56}
    expected = torch.zeros(65)
    for name, parameter in whole.named_parameters():
        expected[starts[name] : starts[name] + parameter.numel()] = parameter.grad.flatten()
    expected[64] = 3.0
    for reduced in found:
        torch.testing.assert_close(reduced, expected)


@pytest.mark.parametrize("stages", [[["a"], ["b"]], [["b"], ["a"]], [["a", "b"]]])
@pytest.mark.parametrize("reduce_dtype", ["float32", "compute"])
def test_a_gradient_that_two_parameters_share_is_summed_once(reduce_dtype, stages):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(2, 3))

    groups = make_groups(place("cpu,cpu"))

    def gradients(group):
        module = Sum()
        optimizer = optimizer_of(module, stages=stages)
        exchange = GradientExchange(optimizer, group, reduce_dtype=reduce_dtype)
        exchange.reducing = True
        exchange.backward(((module.a + module.b) * (group.rank + 1.0)).sum())
        exchange.finish()
        return optimizer.grads

    found = on_every_rank(gradients, groups)
    assert leave_groups(groups, 10.0)
    once = 2 * [*6 * [3.0], 0.0, 0.0]
    assert [grads.tolist() for grads in found] == [once, once]


class Branches(nn.Module):
    """Two branches of a matrix and a vector each, of which a step may leave out some."""

    def __init__(self):
        super().__init__()
        for name in ("a", "b"):
            self.register_parameter(name, nn.Parameter(torch.ones(2, 3)))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.ones(3)))

    def forward(self, *names):
        return sum(getattr(self, name).sum() for name in names)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("reduce_dtype", ["float32", "compute"])
@pytest.mark.parametrize("stages", [[["a", "a_bias"], ["b", "b_bias"]], None])
@pytest.mark.parametrize("used", [("b", "b_bias"), ("a",), ("a_bias", "b"), ("b_bias",)])
def test_what_a_step_leaves_out_has_no_gradient_of_the_step_before(
    used, stages, reduce_dtype, ranks
):
    groups = make_groups(place(",".join(["cpu"] * ranks)))

    def gradients(group):
        module = Branches()
        exchange = GradientExchange(
            optimizer_of(module, stages=stages), group, reduce_dtype=reduce_dtype
        )
        exchange.reducing = ranks > 1
        for names in (("a", "a_bias", "b", "b_bias"), used):
            exchange.backward(module(*names) * (group.rank + 1.0))
            exchange.finish()
        return {place.name: view for place, view in views(exchange.optimizer)}

    found = on_every_rank(gradients, groups)
    assert leave_groups(groups, 10.0)
    total = sum(range(1, ranks + 1))
    for grads in found:
        for name, grad in grads.items():
            assert grad.unique().tolist() == [total if name in used else 0], name


def views(optimizer):
    for at in optimizer.places:
        yield at, optimizer.grads[at.start : at.stop]


@pytest.mark.parametrize("reduce_dtype", ["float32", "compute"])
def test_nothing_travels_until_it_is_said_that_all_ranks_step_along(reduce_dtype):
    """As while warming up, when no other rank answers."""
    events, module = [], Branches()
    exchange = GradientExchange(optimizer_of(module), Recorded(events), reduce_dtype=reduce_dtype)
    exchange.backward(module("a", "b_bias"))
    exchange.finish()
    assert events == []
    found = {place.name: view.unique().tolist() for place, view in views(exchange.optimizer)}
    assert found == {"a": [1.0], "b": [0.0], "a_bias": [0.0], "b_bias": [1.0]}
    assert all(parameter.grad is None for parameter in exchange.optimizer.parameters)


def test_gradients_travel_in_the_dtype_that_was_chosen_and_float32_is_the_usual_one():
    def sent(**options):
        module, dtypes = Branches(), []

        class Watched(Recorded):
            def start_all_reduces(self, tensors):
                dtypes.append({tensor.dtype for tensor in tensors})
                return super().start_all_reduces(tensors)

        optimizer = FlatAdamW(
            module, SETTINGS, device=torch.device("cpu"), dtype=torch.bfloat16, num_sums=1
        )
        exchange = GradientExchange(optimizer, Watched([]), **options)
        exchange.reducing = True
        exchange.backward(module("a", "b", "a_bias", "b_bias").float())
        exchange.finish()
        assert [view.unique().tolist() for _, view in views(optimizer)] == 4 * [[1.0]]
        return dtypes

    fp32 = {torch.float32}
    assert sent() == sent(reduce_dtype="float32") == [fp32, fp32]
    # The vectors and the sums are few, and stay exact.
    assert sent(reduce_dtype="compute") == [{torch.bfloat16}, fp32]


def test_copies_that_travel_lie_in_one_piece_whatever_the_gradient_is_a_view_of():
    """A collective takes no tensor with holes or of another order."""
    sent, module = [], nn.Linear(3, 2, bias=False)

    class Watched(Recorded):
        def start_all_reduces(self, tensors):
            sent.extend(tensors)
            return super().start_all_reduces(tensors)

    exchange = GradientExchange(optimizer_of(module), Watched([]), reduce_dtype="compute")
    exchange.reducing = True
    exchange.backward((module.weight.T * torch.arange(6.0).view(3, 2)).sum())
    exchange.finish()
    assert all(tensor.is_contiguous() for tensor in sent)
    assert exchange.optimizer.grads.tolist() == [0, 2, 4, 1, 3, 5, 0, 0]


@pytest.mark.parametrize(("dtype", "travels"), [("float32", torch.float32), ("compute", None)])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_of_micro_batches_the_sum_travels_once_with_the_last(dtype, travels, compute):
    module, sent = Branches(), []

    class Watched(Recorded):
        def start_all_reduces(self, tensors):
            sent.append([tensor.dtype for tensor in tensors])
            return super().start_all_reduces(tensors)

    optimizer = FlatAdamW(module, SETTINGS, device=torch.device("cpu"), dtype=compute, num_sums=1)
    exchange = GradientExchange(optimizer, Watched([]), reduce_dtype=dtype)
    exchange.reducing = True
    # 1 + 2^-9 has no bfloat16, so a sum that was kept in it would show.
    for parts in (("a", "b"), ("a", "a_bias")):
        exchange.backward(module(*parts).float(), adds=True, ends=False)
        exchange.backward(module("a").float() * 2**-9, adds=True, ends=False)
    assert sent == []
    exchange.backward(module("b_bias").float(), adds=True)
    exchange.finish()
    found = {place.name: view.unique().tolist() for place, view in views(optimizer)}
    rounds = dtype == "compute" and compute == torch.bfloat16
    a = 2.0 if rounds else 2.0 + 2**-8
    assert found == {"a": [a], "b": [1.0], "a_bias": [1.0], "b_bias": [1.0]}
    assert sent == [[travels or compute], [torch.float32]]
