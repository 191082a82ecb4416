"""Parameters of odd sizes begin at 16 bytes, and the gaps behind them are 0 and stay so."""

import pytest
import torch
from torch import nn

from runtime.ranks.collectives import leave_groups, make_groups, on_every_rank
from runtime.ranks.devices import place
from runtime.static.exchange import GradientExchange
from runtime.static.optimizer import AdamWSettings, FlatAdamW
from runtime.training.saved_state import read_checkpoint, write_checkpoint

SHAPES = {
    "one": (1,),
    "wide": (3, 5),
    "three": (3,),
    "row": (1, 7),
    "five": (5,),
    "column": (5, 1),
}
# By hand: 15, 7 and 5 elements of matrices, then 1, 3 and 5 of vectors.
STARTS = {"wide": 0, "row": 16, "column": 24, "one": 32, "three": 40, "five": 48}
VECTORS, SUMS = 32, 56
GAPS = [15, 23, 29, 30, 31, *range(33, 40), *range(43, 48), 53, 54, 55]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


class Odd(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, scale):
        return sum((scale * p.float()).square().sum() for p in self.parameters())


def optimizer_of(module, dtype, **options):
    settings = AdamWSettings(
        lr=0.05,
        min_lr_ratio=0.1,
        warmup_steps=2,
        total_steps=8,
        betas=(0.9, 0.95),
        weight_decay=0.3,
        clip=0.5,
    )
    device = torch.device("cpu")
    return FlatAdamW(module, settings, device=device, dtype=dtype, num_sums=3, **options)


def train(exchange, module, steps, rank=0):
    """Steps, the third with a gradient that is not finite; how many were skipped."""
    skipped = 0.0
    for step in steps:
        scale = float("nan") if step == 2 else step + rank + 1.0
        exchange.backward(module(scale))
        exchange.optimizer.sums.fill_(1.0)
        exchange.finish()
        weight = exchange.optimizer.sums[1]
        skipped += exchange.optimizer.step(weight, torch.tensor(float(step))).item()
    return skipped


class Alone:
    size = 1


@DTYPES
@pytest.mark.parametrize("stages", [None, [["one", "column"], ["five", "row"], ["wide", "three"]]])
def test_every_view_begins_at_16_bytes_where_it_was_drawn(dtype, stages):
    module = Odd()
    flat = optimizer_of(module, dtype, stages=stages)
    if stages is None:
        assert {at.name: at.start for at in flat.places} == STARTS
    grads = [view for stage in flat.stages for view in stage.grad_views]
    slices = [stage.matrices for stage in flat.stages]
    state = {name: tensor for name, tensor in flat.state().items() if name != "step"}
    assert (len(grads), len(state)) == (6, 3 * 6)
    for tensor in (*module.parameters(), *grads, *slices, flat.tail, flat.sums, *state.values()):
        assert tensor.numel()
        assert tensor.data_ptr() % 16 == 0
    first = flat.weights.data_ptr()
    assert {p.dtype for p in module.parameters()} == {dtype}
    for at, parameter in zip(flat.places, flat.parameters, strict=True):
        master = state[f"master.{at.name}"]
        assert parameter.shape == master.shape == SHAPES[at.name]
        assert parameter.data_ptr() == first + at.start * parameter.element_size()
        assert torch.equal(master.to(dtype), parameter)


@DTYPES
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("reduce_dtype", ["float32", "compute"])
def test_gaps_stay_0_after_steps_with_decay_moments_and_a_skip(dtype, ranks, reduce_dtype):
    groups = make_groups(place(",".join(["cpu"] * ranks)))

    def run(group):
        module = Odd()
        flat = optimizer_of(module, dtype)
        exchange = GradientExchange(flat, group, reduce_dtype=reduce_dtype)
        exchange.reducing = ranks > 1
        assert train(exchange, module, range(6), group.rank) == 1.0
        return flat

    found = on_every_rank(run, groups)
    assert leave_groups(groups, 10.0)
    for flat in found:
        assert len(flat.master) == SUMS
        moments = [tensor for tensor in flat.flat_state()[1:] if tensor.dim()]
        lengths = [len(tensor) for tensor in moments]
        assert lengths == 2 * [VECTORS] + 2 * [SUMS - VECTORS]
        exp_avg, exp_avg_sq = (torch.cat(moments[i::2]) for i in (0, 1))
        for tensor in (flat.master, flat.weights, flat.grads, exp_avg, exp_avg_sq):
            assert tensor[GAPS].tolist() == len(GAPS) * [0.0]
            assert tensor.count_nonzero() == SUMS - len(GAPS) == 36
        assert torch.equal(flat.master, found[0].master)


@DTYPES
def test_the_norm_is_that_of_the_gradients_alone(dtype):
    module = Odd()
    flat = optimizer_of(module, dtype)
    exchange = GradientExchange(flat, Alone())
    exchange.backward(module(1.0))
    exact = sum((2 * p.detach().double()).square().sum() for p in module.parameters()).sqrt()
    flat.step(torch.tensor(4.0), torch.tensor(0.0))
    assert float(flat.grad_norm) == pytest.approx(float(exact) / 4, rel=1e-5)


@DTYPES
def test_a_state_goes_through_a_file_and_the_run_goes_on_to_the_bit(tmp_path, dtype):
    module, other = Odd(), Odd(seed=1)
    flat, resumed = optimizer_of(module, dtype), optimizer_of(other, dtype)
    exchange = GradientExchange(flat, Alone())
    train(exchange, module, range(4))
    folder = tmp_path / "step-00000004"
    write_checkpoint(folder, flat.state(), step=4, fingerprint="f" * 64, published={})
    saved = read_checkpoint(folder).load()
    # By name and without gaps, as before there were any.
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {"step": ()} | {
        f"{key}.{name}": shape
        for key in ("master", "exp_avg", "exp_avg_sq")
        for name, shape in SHAPES.items()
    }
    resumed.load_state(saved)
    for ours, theirs in zip(flat.flat_state(), resumed.flat_state(), strict=True):
        assert torch.equal(ours, theirs)
    train(exchange, module, range(4, 8))
    train(GradientExchange(resumed, Alone()), other, range(4, 8))
    for ours, theirs in zip(flat.flat_state(), resumed.flat_state(), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_flat_state_of_one_rank_is_all_that_another_needs():
    module, other = Odd(), Odd(seed=1)
    first, second = optimizer_of(module, torch.bfloat16), optimizer_of(other, torch.bfloat16)
    train(GradientExchange(first, Alone()), module, range(3))
    for ours, theirs in zip(second.flat_state(), first.flat_state(), strict=True):
        ours.copy_(theirs)
    second.refresh()
    state = first.state()
    for name, tensor in second.state().items():
        assert torch.equal(tensor, state[name]), name
    for ours, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", [(1,), (1, 5), (5, 3)])
def test_a_state_of_another_shape_is_refused_and_not_repeated(shape):
    flat = optimizer_of(Odd(), torch.float32)
    state = {name: tensor.clone() for name, tensor in flat.state().items()}
    state["exp_avg.wide"] = torch.ones(shape)
    with pytest.raises(AssertionError, match=r"exp_avg\.wide"):
        flat.load_state(state)
