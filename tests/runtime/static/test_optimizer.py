import math

import pytest
import torch
from torch import nn

from runtime.static.optimizer import AdamWSettings, Cycle, FlatAdamW

CPU = torch.device("cpu")


def settings(**changes):
    values = {
        "lr": 1e-2,
        "min_lr_ratio": 0.1,
        "warmup_steps": 2,
        "total_steps": 10,
        "betas": (0.9, 0.95),
        "weight_decay": 0.1,
        "clip": 1.0,
    }
    return AdamWSettings(**(values | changes))


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.RMSNorm(7), nn.Linear(7, 3))


def cosine(step, s):
    warmup = (step + 1) / s.warmup_steps
    progress = min(max((step - s.warmup_steps) / (s.total_steps - s.warmup_steps), 0), 1)
    decayed = s.min_lr_ratio + (1 - s.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    return s.lr * min(warmup, decayed)


def write(flat, grads):
    for stage in flat.stages:
        for parameter, view in zip(stage.parameters, stage.grad_views, strict=True):
            view.copy_(grads[[p is parameter for p in flat.parameters].index(True)])


def take(flat, module, x, denominator, step):
    write(flat, torch.autograd.grad(module(x).pow(2).sum(), flat.parameters))
    return flat.step(torch.tensor(float(denominator)), torch.tensor(float(step)))


def test_equals_torch_adamw_with_its_clip_and_schedule():
    s = settings()
    module, twin = model(), model()
    flat = FlatAdamW(module, s, device=CPU, dtype=torch.float32, num_sums=3)
    decayed = [p for p in twin.parameters() if p.dim() >= 2]
    plain = [p for p in twin.parameters() if p.dim() < 2]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        betas=s.betas,
    )
    for step in range(10):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        take(flat, module, x, 5, step)
        adamw.zero_grad()
        (twin(x).pow(2).sum() / 5).backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), s.clip)
        for group in adamw.param_groups:
            group["lr"] = cosine(step, s)
        adamw.step()
        assert float(flat.lr) == pytest.approx(cosine(step, s), rel=1e-5)
        assert float(flat.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    for (name, ours), theirs in zip(module.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


@pytest.mark.parametrize(("x", "denominator"), [(float("nan"), 5), (float("inf"), 5), (1.0, 0)])
def test_a_step_that_is_not_finite_or_has_no_weight_changes_nothing(x, denominator):
    module = model()
    flat = FlatAdamW(module, settings(), device=CPU, dtype=torch.float32, num_sums=0)
    take(flat, module, torch.randn(6, 4), 5, 0)
    before = {name: tensor.clone() for name, tensor in flat.state().items()}
    skipped = take(flat, module, torch.full((6, 4), x), denominator, 1)
    assert skipped.item() == 1.0
    for name, tensor in flat.state().items():
        assert torch.equal(tensor, before[name]), name
    assert take(flat, module, torch.randn(6, 4), 5, 2).item() == 0.0


def test_huge_gradients_are_clipped_not_lost():
    module = nn.Linear(100, 1, bias=False)
    flat = FlatAdamW(
        module, settings(weight_decay=0.0), device=CPU, dtype=torch.float32, num_sums=0
    )
    write(flat, [torch.full((1, 100), 1e15)])
    assert flat.step(torch.tensor(1.0), torch.tensor(1.0)).item() == 0.0
    assert float(flat.grad_norm) == pytest.approx(1e16, rel=1e-5)
    # Adam's first step moves each weight by the learning rate, whatever the scale.
    assert torch.isfinite(module.weight).all()


def test_small_updates_reach_bf16_weights_through_the_fp32_master():
    module = nn.Linear(768, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(1.0)
    s = settings(lr=6e-4, min_lr_ratio=1.0, warmup_steps=0, weight_decay=0.0, clip=0.0)
    flat = FlatAdamW(module, s, device=CPU, dtype=torch.bfloat16, num_sums=0)
    for step in range(100):
        write(flat, [torch.ones(1, 768, dtype=torch.bfloat16)])
        flat.step(torch.tensor(1.0), torch.tensor(float(step)))
    assert module.weight.dtype == torch.bfloat16
    torch.testing.assert_close(flat.master, torch.full((768,), 0.94), atol=1e-3, rtol=0)
    torch.testing.assert_close(module.weight[0].float(), flat.master, atol=4e-3, rtol=0)


def test_state_goes_round_and_the_next_step_is_the_same():
    module, other = model(), model(seed=1)
    flat = FlatAdamW(module, settings(), device=CPU, dtype=torch.float32, num_sums=0)
    for step in range(3):
        take(flat, module, torch.randn(6, 4), 5, step)
    resumed = FlatAdamW(other, settings(), device=CPU, dtype=torch.float32, num_sums=0)
    resumed.load_state({name: tensor.clone() for name, tensor in flat.state().items()})
    x = torch.randn(6, 4)
    take(flat, module, x, 5, 3)
    take(resumed, other, x, 5, 3)
    assert torch.equal(flat.master, resumed.master)
    assert set(flat.state()) == {"step"} | {
        f"{key}.{name}"
        for key in ("master", "exp_avg", "exp_avg_sq")
        for name, _ in module.named_parameters()
    }


def test_bf16_weights_are_those_of_the_masters_from_the_start_and_after_a_load():
    module = model().to(torch.float64)
    exact = {name: p.detach().clone() for name, p in module.named_parameters()}
    flat = FlatAdamW(module, settings(), device=CPU, dtype=torch.bfloat16, num_sums=0)
    for name, parameter in module.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, exact[name].float().bfloat16()), name
        assert torch.equal(flat.state()[f"master.{name}"], exact[name].float()), name
    other = model(seed=1)
    resumed = FlatAdamW(other, settings(), device=CPU, dtype=torch.bfloat16, num_sums=0)
    resumed.load_state({name: tensor.clone() for name, tensor in flat.state().items()})
    for ours, theirs in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_matrices_come_first_in_the_order_of_the_stages_then_vectors_then_sums():
    module = model()
    stages = [["2.weight", "2.bias"], ["1.weight"], ["0.bias", "0.weight"]]
    flat = FlatAdamW(module, settings(), device=CPU, dtype=torch.float32, num_sums=3, stages=stages)
    order = ["2.weight", "0.weight", "2.bias", "1.weight", "0.bias"]
    sizes = [21, 28, 3, 7, 7]
    # Each begins at a multiple of 8.
    starts = [0, 24, 56, 64, 72]
    assert [(at.name, at.start, at.stop) for at in flat.places] == [
        (name, start, start + size) for name, start, size in zip(order, starts, sizes, strict=True)
    ]
    assert (len(flat.grads), len(flat.sums), len(flat.tail)) == (80, 3, 27)
    flat.reduced.copy_(torch.arange(83.0))
    assert flat.tail.tolist() == list(range(56, 83))
    assert flat.sums.tolist() == [80, 81, 82]
    assert [stage.matrices.tolist() for stage in flat.stages] == [
        list(range(21)),
        [],
        list(range(24, 52)),
    ]
    named = dict(module.named_parameters())
    for stage, names in zip(flat.stages, stages, strict=True):
        assert {id(p) for p in stage.parameters} == {id(named[name]) for name in names}
        for parameter, view in zip(stage.parameters, stage.grad_views, strict=True):
            (name,) = (name for name in names if named[name] is parameter)
            start = starts[order.index(name)]
            assert view.shape == parameter.shape
            assert view.flatten().tolist() == list(range(start, start + parameter.numel()))


def test_parameters_that_no_stage_names_are_refused_by_name():
    with pytest.raises(
        AssertionError, match=r"must name every parameter.*\['1.weight', '2.bias'\]"
    ):
        FlatAdamW(
            model(),
            settings(),
            device=CPU,
            dtype=torch.float32,
            num_sums=0,
            stages=[["0.weight", "0.bias", "2.weight"]],
        )


@pytest.mark.parametrize(
    ("changes", "step", "wanted"),
    [
        # No warm-up: the first step has the whole rate.
        ({"warmup_steps": 0}, 0, 1e-2),
        ({"warmup_steps": 4}, 0, 0.25e-2),
        ({"warmup_steps": 4}, 3, 1e-2),
        # Half way down from the warm-up's end, at the end, and beyond.
        ({}, 6, 1e-2 * (0.1 + 0.9 * 0.5)),
        ({}, 10, 1e-3),
        ({}, 50, 1e-3),
        # As many steps of warm-up as there are steps at all.
        ({"warmup_steps": 10}, 9, 1e-2),
        ({"warmup_steps": 10}, 10, 1e-2),
    ],
)
def test_the_rate_of_a_step(changes, step, wanted):
    module = nn.Linear(2, 2)
    flat = FlatAdamW(module, settings(**changes), device=CPU, dtype=torch.float32, num_sums=0)
    write(flat, [torch.ones(2, 2), torch.ones(2)])
    flat.step(torch.tensor(1.0), torch.tensor(float(step)))
    assert float(flat.lr) == pytest.approx(wanted, rel=1e-6)
    assert flat.steps.item() == 1


def test_the_norm_of_a_step_without_weight_is_that_of_its_sum():
    module = nn.Linear(2, 1, bias=False)
    flat = FlatAdamW(module, settings(), device=CPU, dtype=torch.float32, num_sums=0)
    for denominator, norm in ((0.0, 5.0), (0.5, 10.0), (10.0, 0.5)):
        # The update itself scales what stands there.
        write(flat, [torch.tensor([[3.0, 4.0]])])
        flat.step(torch.tensor(denominator), torch.tensor(0.0))
        assert float(flat.grad_norm) == pytest.approx(norm)
    assert flat.steps.item() == 2


def test_the_flat_state_is_all_that_a_state_views():
    module = model()
    flat = FlatAdamW(module, settings(), device=CPU, dtype=torch.bfloat16, num_sums=2)
    take(flat, module, torch.randn(6, 4).bfloat16(), 5, 0)
    for tensor in flat.flat_state():
        tensor.fill_(7)
    assert {float(tensor.unique()) for tensor in flat.state().values()} == {7.0}
    kept = sum(tensor.numel() for tensor in flat.state().values())
    # One count of steps for each of the two groups, of which a state has one; and of the masters
    # and both moments the gaps after 28, 21, 7, 7 and 3 elements.
    gaps = 4 + 3 + 1 + 1 + 5
    assert sum(tensor.numel() for tensor in flat.flat_state()) == kept + 1 + 3 * gaps


def test_later_cycles_follow_one_another_and_change_nothing_before_them():
    later = (
        Cycle(start=10, warmup_steps=3, total_steps=7),
        Cycle(start=17, warmup_steps=0, total_steps=4),
    )
    one = FlatAdamW(model(), settings(), device=CPU, dtype=torch.float32, num_sums=1)
    three = FlatAdamW(model(), settings(later=later), device=CPU, dtype=torch.float32, num_sums=1)
    rates = {one: [], three: []}
    for flat, found in rates.items():
        for step in range(24):
            flat.step(torch.tensor(0.0), torch.tensor(float(step)))
            found.append(float(flat.lr))
    assert rates[three][:10] == rates[one][:10]
    own = settings(warmup_steps=3, total_steps=7)
    assert rates[three][10:17] == pytest.approx([cosine(step, own) for step in range(7)])
    assert rates[three][10] < rates[three][11] < rates[three][12] == pytest.approx(1e-2)
    # By hand: without a warm-up from the peak at once, then to the least, where it stays.
    last = [1e-2 * (0.55 + 0.45 * math.cos(math.pi * step / 4)) for step in range(5)]
    assert rates[three][17:] == pytest.approx(last + 2 * [1e-3])
