import numpy as np
import pytest

from maskgen.families.answer_windows import (
    answer_windows,
    default_answer_ends,
    default_answer_starts,
)
from maskgen.families.dflash_layouts import dflash_layouts
from runtime.dflash.step.anchors import LayoutChooser, anchor_candidates, draw_anchors


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


def layouts_of(windows, draws, loss_mask, epochs=20):
    chooser = LayoutChooser(windows, draws)
    return [chooser.choose(loss_mask, seed=1, epoch=e, sample=0) for e in range(epochs)]


def test_the_window_that_covers_the_answer_most_tightly_is_chosen():
    windows = [(0, 7), (0, 15), (4, 15), (6, 9), (8, 15), (8, 11)]
    # Candidates 5 to 13. (6, 9) would waste no anchor, but never train 5 nor 9 to 13.
    assert set(layouts_of(windows, 2, mask(16, 5, 15))) == {4, 5}
    assert set(layouts_of(windows, 2, mask(16, 8, 12))) == {10, 11}
    # Where none covers all, most of the candidates: 2 to 9.
    assert set(layouts_of([(0, 4), (3, 9), (8, 11)], 1, mask(16, 2, 11))) == {1}


def test_each_epoch_takes_the_next_draw_of_the_window():
    taken = layouts_of([(0, 3), (0, 15)], 5, mask(16, 2, 16), epochs=11)
    assert sorted(taken[:5]) == [5, 6, 7, 8, 9]
    assert taken[5:10] == taken[:5]
    assert taken[10] == taken[0]


@pytest.mark.parametrize("changed", [{"seed": 2}, {"epoch": 1}, {"sample": 1}])
def test_draws_follow_seed_epoch_and_sample(changed):
    layouts = LayoutChooser([(0, 299)], 999)
    key = {"seed": 1, "epoch": 0, "sample": 0}
    loss_mask = mask(300, 4, 300)
    assert layouts.choose(loss_mask, **key) != layouts.choose(loss_mask, **{**key, **changed})
    first, _ = draw_anchors(loss_mask, 8, **key)
    other, _ = draw_anchors(loss_mask, 8, **{**key, **changed})
    assert (first != other).any()


def test_what_is_no_candidate_counts_for_no_window():
    # The last candidate is 6: 7 is supervised, and nothing follows it.
    assert set(layouts_of([(2, 4), (6, 9), (5, 7)], 1, mask(8, 3, 8))) == {2}
    # Answers with a gap: 4 to 7, and 12 to 15, are not supervised.
    gaps = mask(16, 1, 4) | mask(16, 8, 12)
    assert set(layouts_of([(0, 12), (3, 12), (1, 11), (8, 11)], 1, gaps)) == {2}


def test_a_sample_without_a_candidate_has_a_layout_too():
    assert layouts_of([(0, 9), (4, 9)], 1, mask(8, 7, 8), epochs=1) == [1]


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_layouts_are_chosen_as_by_counting(draws):
    generator = np.random.default_rng(draws)
    chosen = set()
    for sample in range(60):
        edges = np.sort(generator.choice(40, (4, 2)), axis=1)
        windows = [(int(a), int(b) + 1) for a, b in edges]
        loss_mask = (generator.random(generator.integers(2, 40)) < 0.5).astype(np.uint8)
        tokens = loss_mask.tolist()
        ranked = []
        for group, (start, end) in enumerate(windows):
            inside = [tokens[i : i + 2] == [1, 1] for i in range(start, end)]
            ranked.append((-sum(inside), end - start, group))
        (word,) = words(1, 9, 1, 0, sample)
        found = LayoutChooser(windows, draws).choose(loss_mask, seed=9, epoch=4, sample=sample)
        assert found == min(ranked)[2] * draws + (int(word) + 4) % draws
        chosen.add(found)
    assert len(chosen) > 2 * draws


def test_default_windows_anchor_every_part_of_an_answer_alike():
    """As anchors drawn from the data do: the first and the last tokens as often as the middle."""
    S, N, draws = 128, 16, 8
    windows = answer_windows(default_answer_starts(S), default_answer_ends(S))
    anchors, n_valid = dflash_layouts(S, N, 4, draws, windows, b"digest")
    chooser = LayoutChooser(windows, draws)
    thirds, kept, total = np.zeros(3), 0, 0
    for sample in range(200):
        start, end = 21 + sample % 23, 90 + sample % 37
        for epoch in range(draws):
            layout = chooser.choose(mask(end, start, end), seed=1, epoch=epoch, sample=sample)
            taken = anchors[layout, : n_valid[layout]].numpy()
            inside = taken[(taken >= start) & (taken < end - 1)]
            thirds += np.histogram(inside, bins=3, range=(start, end - 1))[0]
            kept, total = kept + len(inside), total + N
    assert kept / total > 0.85
    assert thirds.max() / thirds.min() < 1.1


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
