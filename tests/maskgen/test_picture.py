"""Pictures: what a cell shows, and that no picture outgrows its limit."""

import struct

import numpy as np
import pytest

import cache
from maskgen.build import build
from maskgen.entry import load_entry
from maskgen.errors import MaskSpecError
from maskgen.picture import (
    COLOURS,
    MAX_PIXELS,
    entry_kinds,
    pixels,
    png_bytes,
    reduce_kinds,
    save_picture,
    text_picture,
)
from maskgen.spec import read_specs

ENTRIES = [
    {"name": "causal", "family": "causal", "Q_LEN": 64},
    {
        "name": "data",
        "family": "dflash",
        "kind": "parametric",
        "context": 64,
        "anchors": 8,
        "draft_block_size": 4,
    },
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    opened = cache.open_store(tmp_path_factory.mktemp("picture") / "m.zarr", writable=True)
    build(read_specs({"masks": {"BLOCK_SIZE": 16, "entry": ENTRIES}}), opened)
    return opened


def png_size(data):
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_text_of_causal_blocks(store):
    kinds = entry_kinds(load_entry(store, "causal/q64-kv64"))
    assert text_picture(kinds).splitlines() == [
        "+...",
        "#+..",
        "##+.",
        "###+",
        "# full, + partial, . empty; a character is one block",
    ]


def test_a_parametric_entry_shows_what_depends_on_the_batch(store):
    # Context columns depend on the anchors; a draft block of 4 fills no 16 x 16 block.
    kinds = entry_kinds(load_entry(store, "data/ctx64"))
    assert text_picture(kinds).splitlines()[:2] == ["+++++.", "++++.+"]


def test_a_layout_or_head_that_is_not_there_is_refused(store):
    entry = load_entry(store, "causal/q64-kv64")
    with pytest.raises(MaskSpecError, match="layout = 1: must be 0 to 0"):
        entry_kinds(entry, batch=1)
    with pytest.raises(MaskSpecError, match="head = -1"):
        entry_kinds(entry, head=-1)


def test_a_shrunk_cell_is_full_or_empty_only_where_all_its_blocks_are():
    kinds = np.array(
        [
            [2, 2, 0, 0, 2],
            [2, 2, 0, 0, 2],
            [2, 2, 0, 1, 0],
            [2, 0, 0, 0, 0],
        ],
        dtype=np.uint8,
    )
    assert reduce_kinds(kinds, 2, 3).tolist() == [[2, 0, 2], [1, 1, 0]]
    assert reduce_kinds(kinds, 1, 99).tolist() == [[1, 1]]
    assert np.array_equal(reduce_kinds(kinds, 4, 5), kinds)


def test_long_masks_fit_the_terminal():
    lines = text_picture(np.full((300, 700), 2, dtype=np.uint8)).splitlines()
    assert len(lines) <= 49
    assert max(map(len, lines[:-1])) <= 96
    assert lines[-1].endswith("several blocks")


@pytest.mark.parametrize("shape", [(1, 1), (3, 5000), (5000, 3), (4097, 4097)])
def test_a_png_is_at_most_as_large_as_asked(shape):
    width, height = png_size(png_bytes(np.ones(shape, dtype=np.uint8), 256))
    assert max(width, height) <= 256
    image = pixels(np.ones(shape, dtype=np.uint8), MAX_PIXELS)
    assert max(image.shape) <= MAX_PIXELS


def test_pixels_have_the_colour_of_their_kind():
    image = pixels(np.array([[0, 1], [2, 2]], dtype=np.uint8), 4)
    assert image.shape == (4, 4, 3)
    assert tuple(image[0, 0]) == tuple(image[1, 1]) == COLOURS[0]
    assert tuple(image[0, 3]) == COLOURS[1]
    assert tuple(image[3, 0]) == COLOURS[2]


@pytest.mark.parametrize("shape", [(4, 4), (1, 3000), (3000, 1)])
def test_a_saved_picture_is_at_most_2048_pixels_a_side(store, tmp_path, shape):
    file = tmp_path / "mask.png"
    entry = load_entry(store, "causal/q64-kv64")
    save_picture(file, entry, np.ones(shape, dtype=np.uint8))
    assert max(png_size(file.read_bytes())) <= 2048


def test_a_file_that_cannot_be_written_is_named(store, tmp_path):
    entry = load_entry(store, "causal/q64-kv64")
    with pytest.raises(OSError, match=r"none/mask\.png"):
        save_picture(tmp_path / "none" / "mask.png", entry, entry_kinds(entry))
