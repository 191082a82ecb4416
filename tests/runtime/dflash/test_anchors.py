import numpy as np
import pytest

from runtime.dflash.anchors import LayoutChooser, anchor_candidates, draw_anchors


def words(count, seed, purpose, epoch, sample):
    """Raw words of NumPy's own Philox: what a release drew, all later ones must draw."""
    counter = np.array([0, epoch, sample, 0], dtype=np.uint64)
    return np.random.Philox(key=np.array([seed, purpose], np.uint64), counter=counter).random_raw(
        count
    )


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


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_a_layout_is_drawn_from_the_group_whose_anchors_are_supervised_most_often(draws):
    generator = np.random.default_rng(draws)
    anchors = np.sort(generator.integers(0, 40, (4 * draws, 5), dtype=np.int32), axis=1)
    n_valid = generator.integers(1, 6, 4 * draws, dtype=np.int32)
    chooser = LayoutChooser(anchors, n_valid, draws)
    chosen = set()
    for sample in range(60):
        loss_mask = (generator.random(generator.integers(2, 40)) < 0.5).astype(np.uint8)
        useful = [0] * 4
        for layout in range(4 * draws):
            for anchor in anchors[layout, : n_valid[layout]]:
                pair = loss_mask[anchor : anchor + 2].tolist()
                useful[layout // draws] += pair == [1, 1]
        group = useful.index(max(useful))
        (word,) = words(1, 9, 1, 4, sample)
        found = chooser.choose(loss_mask, seed=9, epoch=4, sample=sample)
        assert found == group * draws + int(word) % draws
        chosen.add(found)
    assert len(chosen) > 2 * draws


@pytest.mark.parametrize("count", [1, 5, 19, 20, 30])
def test_anchors_are_the_candidates_of_the_smallest_words(count):
    loss_mask = mask(64, 10, 31)
    candidates = list(range(10, 30))
    drawn = words(20, 3, 2, 5, 8).tolist()
    wanted = sorted(sorted(candidates, key=lambda at: drawn[at - 10])[:count])
    anchors, n_valid = draw_anchors(loss_mask, count, seed=3, epoch=5, sample=8)
    assert n_valid == min(count, 20)
    assert anchors.dtype == np.int32
    assert anchors.tolist() == wanted + [0] * (count - n_valid)


def test_a_sample_of_one_token_has_no_candidate():
    assert anchor_candidates(np.ones(1, dtype=np.uint8)).tolist() == []
    assert anchor_candidates(np.ones(2, dtype=np.uint8)).tolist() == [0]
