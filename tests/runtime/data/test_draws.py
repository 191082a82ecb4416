"""Draws are the raw words of Philox: fixed for ever, and other for each key and place."""

import numpy as np
import pytest

from runtime.data.draws import permutation, raw_words

MASK = 2**64 - 1
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def philox_4x64(counter, key):
    """Ten rounds, as Salmon et al. 2011 have them."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        first, second = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = (second >> 64) ^ b ^ k, second & MASK, (first >> 64) ^ d ^ m, first & MASK
        k, m = (k + WEYL[0]) & MASK, (m + WEYL[1]) & MASK
    return [a, b, c, d]


def by_hand(count, key, counter):
    """The first word of the counter counts blocks; NumPy draws from block 1 on."""
    blocks = [philox_4x64((block, *counter), key) for block in range(1, count // 4 + 2)]
    return [word for block in blocks for word in block][:count]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 11])
@pytest.mark.parametrize(
    ("key", "counter"),
    [((0, 0), (0, 0, 0)), ((7, 3), (2, 128, 0)), ((2**63 + 1, 5), (2**40, 2**33, 9))],
)
def test_words_are_those_of_philox(count, key, counter):
    found = raw_words(count, key=key, counter=counter)
    assert found.dtype == np.uint64
    assert found.tolist() == by_hand(count, key, counter)


def test_every_number_of_key_and_counter_leads_to_other_words():
    places = [[1, 2, 3, 4, 5]]
    for index in range(5):
        places.append([*places[0]])
        places[-1][index] += 1
    drawn = {tuple(raw_words(8, key=(a, b), counter=(c, d, e))) for a, b, c, d, e in places}
    assert len(drawn) == 6
    # Streams that begin beside each other share no word.
    assert len({word for words in drawn for word in words}) == 48


@pytest.mark.parametrize("count", [0, 1, 2, 9, 100])
def test_a_permutation_is_the_order_of_its_words(count):
    found = permutation(count, key=(3, 4), counter=(5, 6, 7))
    words = by_hand(count, (3, 4), (5, 6, 7))
    assert found.dtype == np.int64
    assert found.tolist() == sorted(range(count), key=words.__getitem__)
