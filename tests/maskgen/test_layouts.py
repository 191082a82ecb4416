"""Anchor layouts: distinct sorted positions, the same on every machine, uniformly drawn."""

import pytest
import torch

from maskgen.errors import MaskSpecError
from maskgen.families import families
from maskgen.families.answer_windows import (
    answer_windows,
    default_answer_ends,
    default_answer_starts,
)
from maskgen.families.dflash_layouts import dflash_layouts

KEY = b"a spec's digest"
PINNED = [
    [2, 3, 6, 13, 25, 28],
    [0, 9, 16, 17, 20, 21],
    [19, 20, 21, 24, 29, 30],
    [20, 23, 24, 27, 28, 29],
]


def test_positions_are_distinct_sorted_and_within_their_group():
    S, N, draws = 64, 8, 5
    windows = [(0, 63), (40, 55), (60, 63)]
    anchors, n_valid = dflash_layouts(S, N, 4, draws, windows, KEY)
    assert anchors.dtype == n_valid.dtype == torch.int32
    assert anchors.shape == (15, N)
    assert n_valid.tolist() == [8] * 10 + [3] * 5
    for layout, (row, n) in enumerate(zip(anchors.tolist(), n_valid.tolist(), strict=True)):
        start, end = windows[layout // draws]
        assert row[:n] == sorted(set(row[:n]))
        assert start <= row[0]
        assert row[n - 1] < end
        assert row[n:] == [0] * (N - n)


def test_a_full_group_takes_every_position_but_the_last():
    anchors, n_valid = dflash_layouts(6, 9, 4, 2, [(1, 5)], KEY)
    assert anchors.tolist() == [[1, 2, 3, 4, 0, 0, 0, 0, 0]] * 2
    assert n_valid.tolist() == [4, 4]


def test_draw_is_pinned():
    # Caches hold these numbers: other ones need another revision of the family.
    anchors, _ = dflash_layouts(32, 6, 4, 2, [(0, 31), (16, 31)], KEY)
    assert anchors.tolist() == PINNED


def test_each_layout_has_a_stream_of_its_own():
    few, _ = dflash_layouts(200, 20, 4, 2, [(0, 199)], KEY)
    many, _ = dflash_layouts(200, 20, 4, 6, [(0, 199)], KEY)
    assert torch.equal(few, many[:2])
    assert len({tuple(row) for row in many.tolist()}) == 6
    other, _ = dflash_layouts(200, 20, 4, 2, [(0, 199)], b"another digest")
    assert not torch.equal(few, other)


def test_every_position_is_drawn_equally_often():
    S, N, L = 33, 8, 2000
    anchors, _ = dflash_layouts(S, N, 4, L, [(0, S - 1)], KEY)
    counts = torch.bincount(anchors.flatten().long(), minlength=S)
    # Each of the 32 candidates is taken with probability 1/4: 500 of 2000, sigma 19.4.
    assert counts[S - 1] == 0
    assert int((counts[: S - 1] - 500).abs().max()) < 5 * 19.4


def test_default_windows():
    assert default_answer_starts(100) == [0, 6, 12, 18, 25, 31, 37, 43, 50, 62, 75, 87]
    assert default_answer_ends(100) == [56, 62, 68, 75, 81, 87, 93, 100]
    windows = answer_windows([0, 50], [62, 100])
    # The last token of an answer is no anchor: nothing after it could be predicted.
    assert windows == [(0, 61), (0, 99), (50, 61), (50, 99)]
    assert answer_windows([3, 60], [4, 62]) == [(3, 61), (60, 61)]


def test_layouts_are_valid_parameters_of_the_family():
    S, N, slots = 48, 6, 4
    anchors, n_valid = dflash_layouts(S, N, slots, 4, [(0, 47), (44, 47)], KEY)
    mask = families["dflash"].intervals(
        N * slots, S + N * slots, draft_block_size=slots, anchors=anchors, n_valid=n_valid
    )
    assert mask.shape == (8, 1, 24, 72)


@pytest.mark.parametrize(
    ("arguments", "field", "rule"),
    [
        ((0, 4, 4, 2, [(0, 1)]), "context", "at least 1"),
        ((64, 0, 4, 2, [(0, 63)]), "anchors", "at least 1"),
        ((64, 4, 0, 2, [(0, 63)]), "draft_block_size", "at least 1"),
        ((64, 4, 4, 0, [(0, 63)]), "draws", "at least 1"),
        ((64, 4, 4, 2, []), "windows", "at least one window"),
        ((64, 4, 4, 2, [(0, 63), (0, 64)]), "windows", r"within \[0, 63\)"),
        ((64, 4, 4, 2, [(-1, 5)]), "windows", r"within \[0, 63\)"),
        ((64, 4, 4, 2, [(5, 5)]), "windows", r"within \[0, 63\)"),
        ((1, 4, 4, 2, [(0, 1)]), "context", "at least 2"),
    ],
)
def test_bad_request_is_refused(arguments, field, rule):
    with pytest.raises(MaskSpecError, match=rule) as caught:
        dflash_layouts(*arguments, KEY)
    assert caught.value.field == field
