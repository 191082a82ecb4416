"""What of two runs differs, in words: which settings, masks and data, and how many more."""

import pytest

from runtime.training.differences import describe_differences

PATTERN = "{name} {was} -> {now}"


def told(was, now, masks="", pattern=PATTERN):
    return describe_differences(was, now, pattern, masks)


def test_equal_runs_have_no_difference():
    both = {"train": {"steps": 40, "betas": [0.9, 0.95]}, "masks": {"16": "a"}, "data": {"x": 1}}
    assert told(both, {**both}) == ""


def test_a_setting_is_named_with_both_values_and_equal_ones_are_not():
    was = {"train": {"steps": 40, "lr": 0.1}, "drafter": {"init": "target"}}
    now = {"train": {"steps": 41, "lr": 0.1}, "drafter": {"init": "random"}}
    assert told(was, now) == 'train.steps 40 -> 41, drafter.init "target" -> "random"'
    said = told(was, now, pattern="{name}: {now} here, {was} there")
    assert said.startswith("train.steps: 41 here, 40 there, ")


def test_what_only_one_run_has_is_a_difference_from_nothing():
    assert told({"train": {"a": 1}}, {"train": {"b": 2}}) == "train.a 1 -> null, train.b null -> 2"


@pytest.mark.parametrize(("was", "now"), [({"x": {"y": 1}}, {"x": 2}), ({"x": 2}, {"x": {"y": 1}})])
def test_a_table_beside_a_value_is_one_difference(was, now):
    old, new = ('{"y": 1}', "2") if was["x"] != 2 else ("2", '{"y": 1}')
    assert told(was, now) == f"x {old} -> {new}"


def test_masks_are_told_by_context_in_the_order_of_numbers_and_data_in_two_words():
    was = {"data": {"a": 1, "b": 2}, "masks": {"128": "a", "64": "b", "1024": "c", "32": "d"}}
    now = {"data": {"a": 2, "b": 3}, "masks": {"128": "x", "64": "y", "1024": "z", "32": "d"}}
    assert told(was, now) == "the masks of context 64, 128, 1024, the prepared data"
    assert told(was, now, " (version)") == (
        "the masks of context 64, 128, 1024 (version), the prepared data"
    )
    assert told({"data": {"a": 1}}, {"data": {"a": 2}}, " (version)") == "the prepared data"


def test_masks_beside_a_buckets_own_are_told_by_its_context_too():
    was = {"masks": {"128": "a", "sliding/128": "b", "sliding/64": "c"}}
    now = {"masks": {"128": "x", "64": "y"}}
    assert told(was, now) == "the masks of context 64, 128"


def test_settings_come_before_masks_and_data():
    was = {"data": {"a": 1}, "masks": {"16": "a"}, "train": {"steps": 1}}
    now = {"data": {"a": 2}, "masks": {"16": "b"}, "train": {"steps": 2}}
    said = "train.steps 1 -> 2, the masks of context 16, the prepared data"
    assert told(was, now) == said


@pytest.mark.parametrize("count", [3, 4, 5, 9])
def test_four_differences_are_named_and_the_others_counted(count):
    was = {"train": {f"k{i}": 0 for i in range(count)}}
    now = {"train": {f"k{i}": 1 for i in range(count)}}
    named = [f"train.k{i} 0 -> 1" for i in range(min(count, 4))]
    more = [] if count <= 4 else [f"{count - 4} more"]
    assert told(was, now) == ", ".join(named + more)


@pytest.mark.parametrize("length", [57, 58, 59])
def test_a_long_value_is_cut_at_sixty_characters(length):
    """Two of them are its quotes."""
    said = told({"x": "a" * length}, {"x": 1})
    whole = f'"{"a" * length}"'
    assert said == f"x {whole if length < 59 else whole[:60] + '...'} -> 1"
