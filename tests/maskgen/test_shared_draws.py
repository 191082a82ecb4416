"""Entries of layouts that are another entry's: the same draws, another mask."""

import pytest
import torch

import cache
from maskgen.build import build, layout_params
from maskgen.entry import load_entry
from maskgen.errors import MaskSpecError
from maskgen.mask_spec import MaskSpec
from maskgen.spec import read_specs
from maskgen.verify import verify_deep

FULL = {
    "name": "dflash",
    "family": "dflash",
    "kind": "layouts",
    "context": [32, 48],
    "anchors": 6,
    "draft_block_size": 4,
    "draws": 2,
}
SLIDING = {**FULL, "name": "slides", "drawn_as": "dflash", "layer": "sliding", "window": 9}
ALONE = {key: value for key, value in SLIDING.items() if key != "drawn_as"}


def read(*entries):
    return read_specs({"masks": {"BLOCK_SIZE": 16, "entry": list(entries)}})


@pytest.mark.parametrize("order", [(FULL, SLIDING), (SLIDING, FULL)])
def test_draws_are_the_other_entrys(order):
    specs = {spec.name: spec for spec in read(*order)}
    for context in (32, 48):
        full, sliding = specs[f"dflash/ctx{context}"], specs[f"slides/ctx{context}"]
        assert sliding.drawn_as == full.digest
        assert list(layout_params(full)) == ["anchors", "n_valid"]
        for name, drawn in layout_params(full).items():
            assert torch.equal(layout_params(sliding)[name], drawn)


def test_an_entry_alone_draws_as_before():
    (alone, _), (full, _) = read(ALONE), read(FULL)
    assert alone.drawn_as is None
    assert "drawn_as" not in alone.to_json()
    assert full == read(FULL, SLIDING)[0]
    assert full.draw_key == bytes.fromhex(full.digest)
    assert not torch.equal(layout_params(alone)["anchors"], layout_params(full)["anchors"])


def test_it_is_built_kept_and_verified_on_its_own(tmp_path):
    """The spec says all that the draw needs, without the other entry."""
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    specs = read(FULL, SLIDING)
    build(specs[2:], store)
    entry = load_entry(store, "slides/ctx32")
    assert entry.spec == specs[2] == MaskSpec.from_json("slides/ctx32", specs[2].to_json())
    for name, drawn in layout_params(specs[0]).items():
        assert torch.equal(entry.params[name], drawn)
    assert verify_deep(store) == []
    assert all(row.reused for row in build(specs, store).rows[2:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"drawn_as": "other"},
            "masks.entry 'slides': drawn_as = 'other': must name an entry of kind 'layouts' that",
        ),
        ({"drawn_as": 3}, "drawn_as = 3: must name an entry of kind 'layouts' that has"),
        ({"drawn_as": "data"}, "drawn_as = 'data': must name an entry of kind 'layouts' that"),
        ({"drawn_as": "slides"}, "drawn_as = 'slides': must name an entry .* draws its own"),
        ({"context": 64}, "must name an entry of kind 'layouts' that has 'slides/ctx64'"),
        ({"draws": 3}, "draws must be the other's, 2, and is 3"),
        ({"answer_starts": 1}, r"answer_starts must be the other's, \[0, 2, 4, .*\], and is"),
        ({"anchors": 5}, "Q_LEN must be the other's, 24, and is 20"),
        ({"anchors": 3, "draft_block_size": 8}, "draft_block_size must be the other's, 4, and is"),
    ],
)
def test_what_would_not_draw_alike_is_refused(change, message):
    data = {key: value for key, value in FULL.items() if key != "draws"}
    data |= {"name": "data", "kind": "parametric"}
    with pytest.raises(MaskSpecError, match=message):
        read(FULL, data, {**SLIDING, **change})


def test_other_kinds_draw_nothing():
    data = {key: value for key, value in SLIDING.items() if key != "draws"}
    with pytest.raises(MaskSpecError, match="drawn_as"):
        read(FULL, {**data, "kind": "parametric"})


@pytest.mark.parametrize("value", ["", "ab", "0" * 63 + "g", 7])
def test_a_record_names_a_digest(value):
    spec = read(FULL, SLIDING)[2]
    with pytest.raises(MaskSpecError, match="another maskgen wrote it"):
        MaskSpec.from_json("x", {**spec.to_json(), "drawn_as": value})
