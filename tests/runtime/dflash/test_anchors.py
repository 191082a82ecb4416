import numpy as np
import pytest

from runtime.dflash.anchors import LayoutChooser, anchor_candidates, draw_anchors


def mask(length, start, stop):
    values = np.zeros(length, dtype=np.uint8)
    values[start:stop] = 1
    return values


def test_candidates_are_supervised_and_followed_by_a_supervised_token():
    loss_mask = np.array([0, 1, 1, 0, 1, 1, 1], dtype=np.uint8)
    assert anchor_candidates(loss_mask).tolist() == [1, 4, 5]


@pytest.mark.parametrize(
    ("loss_mask", "expected"), [(mask(8, 8, 8), 0), (mask(8, 7, 8), 0), (mask(8, 5, 8), 2)]
)
def test_a_sample_with_few_supervised_tokens_gives_few_anchors(loss_mask, expected):
    anchors, n_valid = draw_anchors(loss_mask, 4, seed=1, epoch=0, sample=0)
    assert n_valid == expected
    assert anchors.shape == (4,)
    assert (anchors[n_valid:] == 0).all()


def test_data_anchors_are_distinct_ascending_and_drawn_anew_each_epoch():
    loss_mask = mask(200, 50, 150)
    first, n_valid = draw_anchors(loss_mask, 32, seed=1, epoch=0, sample=7)
    assert n_valid == 32
    assert (np.diff(first) > 0).all()
    assert first.min() >= 50
    assert first.max() < 149
    again, _ = draw_anchors(loss_mask, 32, seed=1, epoch=0, sample=7)
    later, _ = draw_anchors(loss_mask, 32, seed=1, epoch=1, sample=7)
    assert (first == again).all()
    assert (first != later).any()


def test_data_anchors_cover_every_candidate_evenly():
    loss_mask = mask(40, 8, 40)
    counts = np.zeros(40, dtype=int)
    for sample in range(400):
        anchors, _ = draw_anchors(loss_mask, 8, seed=3, epoch=0, sample=sample)
        counts[anchors] += 1
    drawn = counts[8:39]
    # 400 draws of 8 from 31: 103 each, standard deviation about 9.
    assert drawn.sum() == 3200
    assert drawn.min() > 60
    assert drawn.max() < 150


def test_the_layout_group_that_suits_the_answer_is_chosen():
    anchors = np.array([[0, 1, 2], [1, 2, 3], [10, 12, 14], [11, 12, 15]], dtype=np.int32)
    chooser = LayoutChooser(anchors, np.full(4, 3, dtype=np.int32), draws=2)
    early = {chooser.choose(mask(16, 0, 5), seed=1, epoch=e, sample=0) for e in range(20)}
    late = {chooser.choose(mask(16, 9, 16), seed=1, epoch=e, sample=0) for e in range(20)}
    assert early == {0, 1}
    assert late == {2, 3}


@pytest.mark.parametrize("changed", [{"seed": 2}, {"epoch": 1}, {"sample": 1}])
def test_draws_follow_seed_epoch_and_sample(changed):
    layouts = LayoutChooser(np.tile(np.int32([4, 5, 6]), (999, 1)), np.full(999, 3, np.int32), 999)
    key = {"seed": 1, "epoch": 0, "sample": 0}
    loss_mask = mask(300, 4, 300)
    assert layouts.choose(loss_mask, **key) != layouts.choose(loss_mask, **{**key, **changed})
    first, _ = draw_anchors(loss_mask, 8, **key)
    other, _ = draw_anchors(loss_mask, 8, **{**key, **changed})
    assert (first != other).any()


def test_an_anchor_just_past_the_last_candidate_counts_for_no_layout():
    # The last candidate is 6: 7 is supervised, and nothing follows it.
    anchors = np.array([[2, 7], [5, 6]], dtype=np.int32)
    chooser = LayoutChooser(anchors, np.array([2, 2], dtype=np.int32), draws=1)
    assert chooser.choose(mask(8, 2, 8), seed=1, epoch=0, sample=0) == 1
    # A candidate one past the largest anchor of all layouts is in none of them.
    lower = LayoutChooser(anchors - 2, np.array([2, 2], dtype=np.int32), draws=1)
    assert lower.choose(mask(8, 3, 8), seed=1, epoch=0, sample=0) == 1


def test_anchors_past_a_short_sample_do_not_count_for_a_layout():
    anchors = np.array([[2, 3, 30], [5, 30, 31]], dtype=np.int32)
    chooser = LayoutChooser(anchors, np.array([3, 3], dtype=np.int32), draws=1)
    assert chooser.choose(mask(8, 1, 8), seed=1, epoch=0, sample=0) == 0
