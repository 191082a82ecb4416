"""Which documents share a row, against a slow best fit written plainly and the fewest rows."""

from functools import cache

import numpy as np
import pytest

from runtime.packed.packing import ROOMY, pack


def drawn(seed, count, longest):
    return np.random.default_rng(seed).integers(1, longest + 1, count).tolist()


def bucket_of(length, buckets):
    return next((b for b in buckets if b >= ROOMY * length), buckets[-1])


def plain_best_fit(lengths, size, max_documents):
    """Rows of one length: each document, longest first, looks at every row."""
    rows = []
    for document in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = [size - sum(lengths[d] for d in row) for row in rows]
        fits = [
            (room[i], i)
            for i, row in enumerate(rows)
            if room[i] >= lengths[document] and room[i] > 0 and len(row) < max_documents
        ]
        if fits:
            rows[min(fits)[1]].append(document)
        else:
            rows.append([document])
    return rows


def fewest_rows(lengths, size, max_documents):
    """By trying every row of every document in turn."""
    lengths = sorted(lengths, reverse=True)

    @cache
    def fewest(at, rows):
        if at == len(lengths):
            return len(rows)
        found = fewest(at + 1, tuple(sorted((*rows, (size - lengths[at], 1)))))
        for index, (room, count) in enumerate(rows):
            if room >= lengths[at] and count < max_documents:
                row = (room - lengths[at], count + 1)
                rest = (*rows[:index], row, *rows[index + 1 :])
                found = min(found, fewest(at + 1, tuple(sorted(rest))))
        return found

    return fewest(0, ())


@pytest.mark.parametrize("buckets", [(64,), (32, 64), (16, 64, 256)])
@pytest.mark.parametrize("max_documents", [1, 3, 100])
def test_every_document_stands_in_one_row_that_has_room_for_it(buckets, max_documents):
    lengths = drawn(1, 200, buckets[-1])
    rows = pack(lengths, buckets, max_documents)
    assert sorted(d for row in rows.documents for d in row) == list(range(200))
    for row, used, bucket in zip(rows.documents, rows.lengths, rows.buckets, strict=True):
        assert used == sum(lengths[d] for d in row) <= bucket
        assert 1 <= len(row) <= max_documents
        assert {bucket_of(lengths[d], buckets) for d in row} == {bucket}


@pytest.mark.parametrize("max_documents", [2, 4, 100])
@pytest.mark.parametrize("seed", range(8))
def test_rows_are_those_of_a_plain_best_fit(seed, max_documents):
    lengths = drawn(seed, 60, (64, 20)[seed % 2])
    rows = pack(lengths, [64], max_documents)
    assert list(map(list, rows.documents)) == plain_best_fit(lengths, 64, max_documents)


@pytest.mark.parametrize("seed", range(12))
def test_hardly_more_rows_than_the_fewest(seed):
    lengths = drawn(seed, 9, 12)
    found, fewest = len(pack(lengths, [16], 100).documents), fewest_rows(lengths, 16, 100)
    assert fewest <= found <= 11 / 9 * fewest + 6 / 9


@pytest.mark.parametrize(
    ("lengths", "max_documents", "expected"),
    [
        ([9, 7, 8, 8, 16], 8, 3),  # all full
        ([9, 8, 8], 8, 2),  # one token too many for one row
        ([4, 4, 4, 4], 3, 2),  # one document too many
        ([10, 6, 5, 5, 6], 8, 2),  # full only as 10 + 6 and 6 + 5 + 5
    ],
)
def test_tight_rows(lengths, max_documents, expected):
    assert fewest_rows(lengths, 16, max_documents) == expected
    assert len(pack(lengths, [16], max_documents).documents) == expected


def test_the_same_lengths_are_packed_alike():
    lengths = [7] * 30 + drawn(3, 50, 64)
    first, second = (pack(lengths, [32, 64], 5) for _ in range(2))
    assert first.documents == second.documents
    assert first.buckets.tolist() == second.buckets.tolist()


def test_the_longest_the_empty_and_none():
    rows = pack([64, 0, 64, 1], [16, 64], 4)
    assert sorted(zip(rows.buckets.tolist(), rows.documents, strict=True)) == [
        (16, (3, 1)),
        (64, (0,)),
        (64, (2,)),
    ]
    assert rows.lengths.tolist() == [1, 64, 64]
    assert pack([], [16, 64], 4).documents == ()
