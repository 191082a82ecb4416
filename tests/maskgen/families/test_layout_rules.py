"""Layouts are held to what their family declares: names, counts, dtypes, defaults, own rules."""

import pytest
import torch

from maskgen.errors import MaskSpecError
from maskgen.families import Layouts, Param


def made(drawn=None, **more):
    """Layouts of one parameter `keys`, drawn as given or as their numbers."""

    def draw(Q_LEN, KV_LEN, key, *, draws, **_):
        if drawn is not None:
            return drawn
        return {"keys": torch.arange(draws, dtype=torch.int32) + len(key) + Q_LEN * 10 + KV_LEN}

    params = (
        Param("draws", "int", "how many", default=3, minimum=1),
        Param("marks", "ints", "where", default=None, minimum=0),
    )
    return Layouts(
        draws=("keys",),
        params=more.pop("params", params),
        draw_fn=draw,
        count_fn=more.pop("count_fn", lambda *, draws, **_: draws),
        **more,
    )


def refusal(call, *arguments):
    with pytest.raises(MaskSpecError) as caught:
        call(*arguments)
    return str(caught.value)


def test_what_an_entry_says_is_checked_and_filled_in():
    layouts = made()
    assert layouts.param_names == ("draws", "marks")
    assert layouts.check(4, 8, {}) == {"draws": 3}
    assert layouts.check(4, 8, {"draws": 5, "marks": 2, "other": 1}) == {"draws": 5, "marks": [2]}
    assert layouts.check(4, 8, {"marks": [2, 0]}) == {"draws": 3, "marks": [2, 0]}
    assert refusal(layouts.check, 4, 8, {"draws": 0}) == "draws = 0: must be at least 1"
    assert refusal(layouts.check, 4, 8, {"marks": [1, -1]}) == "marks = -1: must be at least 0"


def test_what_is_required_is_named():
    layouts = made(params=(Param("draws", "int", "how many"),))
    assert refusal(layouts.check, 4, 8, {}) == "draws = None: is required by layouts: how many"


def test_a_rule_of_the_familys_own_is_applied_and_may_fill_in():
    def check(Q_LEN, KV_LEN, params):
        if params["draws"] > KV_LEN - Q_LEN:
            raise MaskSpecError("draws", params["draws"], "too many")
        params["marks"] = [Q_LEN, KV_LEN]

    layouts = made(check_fn=check)
    assert layouts.check(4, 8, {"draws": 4}) == {"draws": 4, "marks": [4, 8]}
    assert refusal(layouts.check, 4, 8, {"draws": 5}) == "draws = 5: too many"
    assert refusal(layouts.draw, 4, 8, b"k", {"draws": 5}) == "draws = 5: too many"


def test_layouts_are_drawn_from_sizes_key_and_parameters():
    layouts = made()
    assert layouts.draw(4, 8, b"key", {})["keys"].tolist() == [51, 52, 53]
    assert layouts.draw(4, 8, b"key", {"draws": 1, "of_family": 2})["keys"].tolist() == [51]
    assert layouts.count({"draws": 7}) == 7
    assert layouts.count({"draws": 7, "of_family": 2}) == 7


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        ({}, "what a layout draws = []: must be keys"),
        (
            {"keys": torch.zeros(3).int(), "more": torch.zeros(3).int()},
            "what a layout draws = ['keys', 'more']: must be keys",
        ),
        (
            {"keys": torch.zeros(2).int()},
            "keys = [[2], 'torch.int32', 'cpu']: must be drawn as int32 [3, ...] on the CPU",
        ),
        (
            {"keys": torch.zeros(3, 2).long()},
            "keys = [[3, 2], 'torch.int64', 'cpu']: must be drawn as int32 [3, ...] on the CPU",
        ),
        (
            {"keys": torch.zeros(3, device="meta").int()},
            "keys = [[3], 'torch.int32', 'meta']: must be drawn as int32 [3, ...] on the CPU",
        ),
    ],
)
def test_what_is_drawn_is_what_is_declared(drawn, message):
    assert refusal(made(drawn).draw, 4, 8, b"key", {}) == message


def test_what_is_drawn_is_contiguous():
    found = made({"keys": torch.zeros(4, 3).int().T}).draw(4, 8, b"key", {})["keys"]
    assert found.is_contiguous()
    assert found.shape == (3, 4)
