"""Pictures: what a cell shows, and that no picture outgrows its limit."""

import struct
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

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


def test_a_picture_is_of_the_layout_and_the_head_that_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "picture_heads.py").write_text(
        "def m(b, h, q, kv):\n    return (kv >= 16 * b) & (kv < 16 * (2 + h))\n"
    )
    table = {"name": "m", "mask_mod": "picture_heads:m", "B": 2, "H": 3, "Q_LEN": 16, "KV_LEN": 64}
    specs = read_specs({"masks": {"BLOCK_SIZE": 16, "entry": [table]}})
    opened = cache.open_store(tmp_path / "m.zarr", writable=True)
    build(specs, opened)
    entry = load_entry(opened, specs[0].name)
    for b in range(2):
        for h in range(3):
            wanted = [[2 if b <= column < 2 + h else 0 for column in range(4)]]
            assert entry_kinds(entry, batch=b, head=h).tolist() == wanted
    assert entry_kinds(entry).dtype == np.uint8
    assert entry_kinds(entry).tolist() == [[2, 2, 0, 0]]
    for asked, message in (
        ({"batch": 2}, "layout = 2: must be 0 to 1 in 'm/q16-kv64'"),
        ({"batch": -1}, "layout = -1: must be 0 to 1 in 'm/q16-kv64'"),
        ({"head": 3}, "head = 3: must be 0 to 2 in 'm/q16-kv64'"),
    ):
        with pytest.raises(MaskSpecError) as caught:
            entry_kinds(entry, **asked)
        assert str(caught.value) == message


def test_a_parametric_picture_has_what_all_and_what_some_batches_see(tmp_path):
    tables = [
        {"name": "f", "family": "full", "kind": "parametric", "Q_LEN": 32, "KV_LEN": 48},
        {
            "name": "d",
            "family": "dflash",
            "kind": "parametric",
            "context": 32,
            "anchors": 2,
            "draft_block_size": 16,
        },
    ]
    specs = read_specs({"masks": {"BLOCK_SIZE": 16, "entry": tables}})
    opened = cache.open_store(tmp_path / "m.zarr", writable=True)
    build(specs, opened)
    full, draft = (load_entry(opened, spec.name) for spec in specs)
    # Key 0 is seen by every batch, the rest by some; no block is full in all of them.
    assert entry_kinds(full).tolist() == [[1, 1, 1], [1, 1, 1]]
    # A draft block of 16 sees itself in every batch, and never the other.
    assert entry_kinds(draft).tolist() == [[1, 1, 2, 0], [1, 1, 0, 2]]


def test_a_map_of_just_the_largest_size_is_drawn_block_by_block():
    kinds = np.zeros((48, 96), dtype=np.uint8)
    kinds[47, 95] = 2
    *lines, legend = text_picture(kinds).splitlines()
    assert (len(lines), len(lines[0]), lines[47][95], lines[0][0]) == (48, 96, "#", ".")
    assert legend.endswith("one block")
    for shape in ((49, 96), (48, 97)):
        *lines, legend = text_picture(np.zeros(shape, dtype=np.uint8)).splitlines()
        assert legend == "# full, + partial, . empty; a character is several blocks"
        # One factor for both sides.
        assert (len(lines), len(lines[0])) == (-(-shape[0] // 2), -(-shape[1] // 2))


def test_a_bare_png_has_the_colours_of_its_blocks(tmp_path):
    kinds = np.array([[0, 1, 2], [2, 2, 1]], dtype=np.uint8)
    (tmp_path / "x.png").write_bytes(png_bytes(kinds, 7))
    image = (imread(tmp_path / "x.png")[..., :3] * 255).round().astype(int)
    # Twice as large is the most that fits into 7.
    assert image.shape == (4, 6, 3)
    for row in range(4):
        for column in range(6):
            assert tuple(image[row, column]) == COLOURS[kinds[row // 2, column // 2]]


def test_a_saved_picture_has_its_title_axes_and_legend(store, tmp_path, monkeypatch):
    saved, write = [], Figure.savefig

    def keep(figure, *arguments, **options):
        saved.append(figure)
        write(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    entry = load_entry(store, "data/ctx64")
    kinds = np.array([[0, 1, 1, 2, 2, 2]] * 2, dtype=np.uint8)
    save_picture(tmp_path / "x.png", entry, kinds)
    (figure,) = saved
    (axes,) = figure.axes
    assert axes.get_title() == "data/ctx64 (parametric), BLOCK_SIZE (16, 16)"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("KV, tokens", "Q, tokens")
    # Rows go down.
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 96), (32, 0))
    (image,) = axes.get_images()
    assert image.get_array().tolist() == [[list(COLOURS[kind]) for kind in row] for row in kinds]
    (legend,) = figure.legends
    told = [text.get_text() for text in legend.get_texts()]
    assert told == ["full: 6", "partial: 4", "empty: 2"]
    colours = [
        tuple(round(255 * part) for part in p.get_facecolor()[:3]) for p in legend.get_patches()
    ]
    assert colours == [COLOURS[2], COLOURS[1], COLOURS[0]]
