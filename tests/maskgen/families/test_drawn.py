"""Each family against a matrix drawn by hand: # is allowed, rows are queries."""

import pytest

from maskgen.families import families

DRAWN = [
    ("full", {}, "### ###"),
    ("full", {"lengths": [2]}, "##. ##."),
    ("causal", {}, "#... ##.. ###. ####"),
    ("causal", {}, "#..... ##.... ###... ####.."),
    ("causal", {}, "#.. ##. ### ### ###"),
    ("causal", {"offset": 2}, "###... ####.. #####. ######"),
    ("causal", {"offset": -2}, ".... .... #... ##.."),
    ("sliding_window", {"window": 2}, "#.... ##... .##.. ..##. ...##"),
    ("sliding_window", {"window": 2, "inclusive": True}, "#.... ##... ###.. .###. ..###"),
    ("sliding_window", {"window": 2, "offset": 1}, "##.. .##. ..## ...#"),
    (
        "sink_window",
        {"sinks": 1, "window": 2},
        """
        #.....
        ##....
        ###...
        #.##..
        #..##.
        #...##
        """,
    ),
    (
        "chunked",
        {"chunk": 3},
        """
        #......
        ##.....
        ###....
        ...#...
        ...##..
        ...###.
        """,
    ),
    ("prefix_lm", {"prefix": 2}, "##.. ##.. ###. ####"),
    ("prefix_lm", {"prefix_lens": [3]}, "###. ###. ###. ####"),
    (
        "document",
        {"doc_ids": [7, 7, 2, 2, 2, -1]},
        """
        #.....
        ##....
        ..#...
        ..##..
        ..###.
        ......
        """,
    ),
    (
        "document",
        {"doc_offsets": [0, 2, 5, 5], "inner": "full"},
        """
        ##....
        ##....
        ..###.
        ..###.
        ..###.
        ......
        """,
    ),
    (
        "document",
        {"doc_offsets": [0, 1, 5], "inner": "prefix_lm", "doc_prefix_lens": [0, 2]},
        """
        #....
        .##..
        .##..
        .###.
        .####
        """,
    ),
    (
        "document",
        {"doc_ids": [0, 0, 0, 1, 1, 1], "inner": "sink_window", "sinks": 1, "window": 1},
        """
        #.....
        ##....
        #.#...
        ...#..
        ...##.
        ...#.#
        """,
    ),
    (
        "shared_prefix",
        {"doc_offsets": [0, 2, 4, 6], "prefix_docs": [0, 0, 0]},
        """
        #.....
        ##....
        ###...
        ####..
        ##..#.
        ##..##
        """,
    ),
    (
        "global_prefix_window",
        {"global_tokens": 1, "radius": 1},
        """
        #####
        ###..
        ####.
        #.###
        #..##
        """,
    ),
    (
        "block_diffusion",
        {"diffusion_block_size": 2},
        """
        ##......
        ##......
        ..####..
        ..####..
        ....##..
        ....##..
        ....####
        ....####
        """,
    ),
    (
        "block_diffusion",
        {"diffusion_block_size": 1, "variant": "packed", "doc_offsets": [0, 2, 3]},
        """
        #.....
        .##...
        ..#...
        ..##..
        ....#.
        .....#
        """,
    ),
    (
        "block_diffusion",
        {"diffusion_block_size": 2, "variant": "block_causal"},
        "##... ##... ####. ####. #####",
    ),
    (
        "dflash",
        {"draft_block_size": 2, "anchors": [1, 3]},
        """
        #...##..
        #...##..
        ###...##
        ###...##
        """,
    ),
    # A padded block sees only itself, so no row is empty.
    (
        "dflash",
        {"draft_block_size": 2, "anchors": [1, 0], "n_valid": [1]},
        """
        #...##..
        #...##..
        ......##
        ......##
        """,
    ),
    # SpecForge's own test vector: S 12, W 4, B 4, anchor 6.
    (
        "dflash",
        {"draft_block_size": 4, "anchors": [6], "layer": "sliding", "window": 4},
        """
        ...###......#...
        ....##......##..
        .....#......###.
        ............####
        """,
    ),
    (
        "dflash",
        {
            "draft_block_size": 4,
            "anchors": [6],
            "layer": "sliding",
            "window": 4,
            "convention": "speculators",
        },
        """
        ..####......#...
        ..####......##..
        ..####......###.
        ..####......####
        """,
    ),
    (
        "dflash",
        {
            "draft_block_size": 4,
            "anchors": [6],
            "layer": "sliding",
            "window": 4,
            "convention": "modelopt",
        },
        """
        ...###......####
        ....##......####
        .....#......####
        ............####
        """,
    ),
    (
        "dflash",
        {
            "draft_block_size": 4,
            "anchors": [4],
            "layer": "sliding",
            "window": 2,
            "convention": "sglang",
        },
        """
        ...#..#...
        ......##..
        .......##.
        ........##
        """,
    ),
    # JetSpec: the full layer with a causal block.
    (
        "dflash",
        {"draft_block_size": 3, "anchors": [2], "in_block": "causal"},
        """
        ##..#..
        ##..##.
        ##..###
        """,
    ),
    (
        "dflash",
        {"draft_block_size": 1, "anchors": [2, 5], "doc_ids": [0, 0, 0, 1, 1, 1]},
        """
        ##....#.
        ...##..#
        """,
    ),
    ("eagle3_ttt", {}, "#..#.. ##..#. ......"),
    ("eagle3_ttt", {"variant": "speculators"}, "#..#.. ##..#. ###..#"),
    (
        "eagle3_ttt",
        {"variant": "speculators", "doc_ids": [0, 1, -1], "window": 1},
        "#..#.. .#..#. .....#",
    ),
    ("eagle3_ttt", {"variant": "modelopt"}, "....#... #....#.. ##....#. ###....#"),
    ("eagle3_ttt", {"variant": "modelopt"}, "......#.. ...#...#. #...#...#"),
    # Elements (anchor, depth): (0,0) (1,0) (2,0) (0,1) (2,1) (2,2).
    (
        "p_eagle",
        {"num_depths": 3, "anchors": [0, 1, 2, 0, 2, 2], "depths": [0, 0, 0, 1, 1, 2]},
        """
        #.....
        ##....
        ###...
        #..#..
        ###.#.
        ###.##
        """,
    ),
    (
        "tree",
        {"parents": [-1, 0, 0, 2]},
        """
        ###...
        ####..
        ###.#.
        ###.##
        """,
    ),
    ("natten", {"canvas": [5], "kernel": [3]}, "###.. ###.. .###. ..### ..###"),
    (
        "natten",
        {"canvas": [3, 3], "kernel": [3, 1]},
        """
        #..#..#..
        .#..#..#.
        ..#..#..#
        #..#..#..
        .#..#..#.
        ..#..#..#
        #..#..#..
        .#..#..#.
        ..#..#..#
        """,
    ),
    (
        "natten",
        {"canvas": [2, 4], "kernel": [1, 3]},
        """
        ###.....
        ###.....
        .###....
        .###....
        ....###.
        ....###.
        .....###
        .....###
        """,
    ),
]


@pytest.mark.parametrize(("name", "params", "drawing"), DRAWN)
def test_mask_as_drawn(name, params, drawing):
    wanted = drawing.split()
    mask = families[name].intervals(len(wanted), len(wanted[0]), **params)
    assert mask.shape == (1, 1, len(wanted), len(wanted[0]))
    drawn = ["".join(".#"[cell] for cell in row) for row in mask.dense()[0, 0].tolist()]
    assert drawn == wanted


def test_every_family_is_drawn():
    assert {name for name, _, _ in DRAWN} == set(families)
