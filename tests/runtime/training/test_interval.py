"""The bootstrap interval against all resamples that there are, and against what it must do."""

from itertools import product

import numpy as np
import pytest

from runtime.training.interval import ratio_interval

SUMS = np.array([[9.0, 6.0], [4.0, 4.0], [30.0, 12.0], [5.0, 2.0], [2.0, 1.0]])


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_it_is_near_that_of_every_resample(seed):
    ratios = []
    for drawn in product(range(len(SUMS)), repeat=len(SUMS)):
        over = sum(SUMS[i][0] for i in drawn)
        ratios.append(over / sum(SUMS[i][1] for i in drawn))
    assert len(ratios) == 5**5
    ratios.sort()
    low, high = ratio_interval(SUMS, seed)
    # Of 1000 draws the quantile is within 1 % of the draws, on either side, nearly always.
    assert ratios[int(0.015 * 5**5)] <= low <= ratios[int(0.035 * 5**5)]
    assert ratios[int(0.965 * 5**5)] <= high <= ratios[int(0.985 * 5**5)]


def test_it_is_the_same_each_time_and_of_its_seed():
    assert ratio_interval(SUMS, 7) == ratio_interval(SUMS, 7)
    many = np.random.default_rng(0).uniform(1, 9, (40, 2))
    assert ratio_interval(many, 7) != ratio_interval(many, 8)


def test_one_sample_or_equal_samples_have_no_width():
    assert ratio_interval(SUMS[:1], 1) == (1.5, 1.5)
    assert ratio_interval(np.array([[3.0, 2.0]] * 9), 1) == (1.5, 1.5)


def test_it_covers_the_mean_about_as_often_as_it_says():
    generator, covered = np.random.default_rng(5), 0
    for trial in range(100):
        weights = generator.integers(1, 30, 60).astype(float)
        sample_means = 1.5 + 0.3 * generator.standard_normal(60)
        low, high = ratio_interval(np.stack([weights * sample_means, weights], axis=1), trial)
        covered += low <= 1.5 <= high
    assert 88 <= covered <= 99
