"""How many compiled forms there may be, and what torch counts and calls."""

import pytest
import torch
import torch._dynamo

from runtime.dflash.loss.head import head_loss
from runtime.dflash.network.drafter import Drafter, DraftLayer
from runtime.dflash.step.draft_loss import compiled_loss
from runtime.dflash.step.recipe import Recipe
from runtime.static.compilation import size_recompile_limits
from runtime.static.torch_internals import (
    compile_cache_counts,
    raise_recompile_limits,
    watching_compiles,
)
from tests.runtime.dflash.test_drafter import make_config

LIMITS = ("recompile_limit", "accumulated_recompile_limit")


@pytest.fixture
def limits():
    """Both limits, as a call leaves them that finds 8 and 256."""
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        yield lambda: [getattr(torch._dynamo.config, name) for name in LIMITS]


@pytest.mark.parametrize(("limit", "found"), [(8, [8, 256]), (9, [9, 256]), (300, [300, 300])])
def test_limits_are_raised_and_never_lowered(limits, limit, found):
    raise_recompile_limits(limit)
    assert limits() == found


def test_every_bucket_of_every_device_has_a_form_with_gradients_and_one_without(limits):
    size_recompile_limits(2, 2)
    assert limits() == [8, 256]
    size_recompile_limits(5, 3)
    assert limits() == [30, 256]
    size_recompile_limits(50, 8)
    assert limits() == [800, 800]


def test_a_callback_is_told_of_each_compile_until_its_block_ends():
    torch._dynamo.reset()
    told = []
    add = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    with watching_compiles(lambda *what: told.append(what)):
        add(torch.ones(3))
        add(torch.ones(3))
        add(torch.ones(4))
    assert [trigger for trigger, _ in told] == ["DYNAMO", "DYNAMO"]
    ids = [compile_id for _, compile_id in told]
    assert all(type(compile_id) is str for compile_id in ids)
    assert len(set(ids)) == 2
    with pytest.raises(ZeroDivisionError), watching_compiles(lambda *_: told.append("again")):
        raise ZeroDivisionError
    add(torch.ones(5))
    assert len(told) == 2


def test_counts_are_those_of_inductor_hits_first(monkeypatch):
    counters = torch._dynamo.utils.counters
    monkeypatch.setitem(counters, "inductor", {"fxgraph_cache_hit": 3, "fxgraph_cache_miss": 5})
    assert compile_cache_counts() == (3, 5)


def test_each_layer_and_the_loss_are_compiled_whole_and_for_one_shape(monkeypatch):
    """A graph that breaks, or a shape that may vary, would run far slower without a word."""
    layers, functions = [], []
    monkeypatch.setattr(
        DraftLayer, "compile", lambda *given, **options: layers.append((*given, options))
    )
    monkeypatch.setattr(
        torch, "compile", lambda *given, **options: functions.append((*given, options)) or "made"
    )
    drafter = Drafter(make_config(num_hidden_layers=3))
    loss_of = compiled_loss(drafter, Recipe(gamma=4.0))
    whole = {"fullgraph": True, "dynamic": False}
    assert layers == [(layer, whole) for layer in drafter.layers]
    assert functions == [(head_loss, whole)]
    assert loss_of.keywords == {"head_loss": "made"}
