"""A bucket's masks in the step; what a run says of a cache without them, and whether that works."""

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import cache
from maskgen.build import build
from maskgen.entry import load_entry
from maskgen.errors import MaskSpecError
from maskgen.families import families
from maskgen.runfile import masks_section
from maskgen.spec import read_specs
from runtime.errors import BucketMissingError, DatasetError
from runtime.static.masks import BucketMasks
from tests.runtime.tiny_run import build_masks, inputs_of, make_config, make_data

DFLASH = families["dflash"]
FULL = {"draft_block_size": 4}
BASES = [FULL, {**FULL, "layer": "sliding", "window": 7}]
BESIDE = {"layer": {"window": 7}}
"""What a parameter needs beside it."""
OTHERS = {"int": [2, 3, 12], "bool": [True, False]}


def dense_in_the_step(tmp_path, values, anchors, n_valid):
    """The mask of a parametric entry as a step computes it, and as the family's formula says."""
    entry = {"name": "m", "family": "dflash", "kind": "parametric", "context": 40, **values}
    entry["anchors"] = 24 // values["draft_block_size"]
    specs = read_specs({"masks": {"BLOCK_SIZE": 16, "entry": [entry]}})
    store = cache.open_store(tmp_path / "masks.zarr", writable=True)
    build(specs, store)
    masks = BucketMasks(
        load_entry(store, specs[0].name),
        3,
        torch.device("cpu"),
        {"anchors": (entry["anchors"],), "n_valid": ()},
    )
    anchors = anchors[:, : entry["anchors"]].sort().values
    n_valid = n_valid.clamp(max=entry["anchors"])
    masks.update({"anchors": anchors, "n_valid": n_valid})
    formula = DFLASH.mask_mod(24, 64, anchors=anchors, n_valid=n_valid, **values)
    return masks.dense(), create_mask(formula, 3, 1, 24, 64, device="cpu")


@pytest.mark.parametrize("param", DFLASH.params, ids=lambda param: param.name)
def test_every_parameter_of_an_entry_reaches_the_spans_of_the_step(tmp_path, param):
    generator = torch.Generator().manual_seed(len(param.name))
    anchors = torch.randint(40, (3, 24), generator=generator, dtype=torch.int32)
    n_valid = torch.tensor([24, 3, 0], dtype=torch.int32)
    matters = False
    for base, value in itertools.product(BASES, param.choices or OTHERS[param.type]):
        values = {**base, **BESIDE.get(param.name, {}), param.name: value}
        try:
            DFLASH.check(24, 64, values)
        except MaskSpecError:
            continue
        found, wanted = dense_in_the_step(tmp_path, values, anchors, n_valid)
        assert torch.equal(found, wanted), values
        plain, _ = dense_in_the_step(tmp_path, base, anchors, n_valid)
        matters |= not torch.equal(found, plain)
    assert matters


MASKS = """
[masks]
cache = "{cache}"
BLOCK_SIZE = 16
[[masks.entry]]
name = "{name}"
family = "dflash"
kind = "layouts"
context = [16, 32]
anchors = {anchors}
draft_block_size = 4
draws = {draws}
"""


def asking(tmp_path, location, *, anchors=6, draws=3, name="dflash"):
    text = MASKS.format(cache=location, anchors=anchors, draws=draws, name=name)
    (tmp_path / "my.toml").write_text(text)
    return make_config(tmp_path, masks=masks_section(tmp_path / "my.toml"))


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A cache in the current folder, and data."""
    monkeypatch.chdir(tmp_path)
    make_data(tmp_path / "data", [14, 16, 30, 12])
    config = asking(tmp_path, tmp_path / "masks.zarr")
    build_masks(config)
    return cache.open_store(config.cache)


def refusal(config):
    with pytest.raises(BucketMissingError) as caught:
        inputs_of(config, "my.toml")
    return str(caught.value)


def test_only_what_differs_of_a_mask_is_named(built, tmp_path):
    said = refusal(asking(tmp_path, built.location, anchors=4, draws=2))
    differs = said.split("another one than my.toml asks for: ")[1]
    assert differs == (
        "KV_LEN: asked 32, found 40; Q_LEN: asked 16, found 24; draws: asked 2, found 3; "
        f"run: python -m maskgen build --config FILE --cache {built.location}"
    )


def test_run_files_that_share_a_cache_do_not_evict_each_other(built, tmp_path):
    mine = inputs_of(asking(tmp_path, built.location), "my.toml")
    other = asking(tmp_path, built.location, draws=2, name="dflash")
    build_masks(other)
    assert inputs_of(other, "other.toml").entries[16].spec.params["draws"] == 2
    again = inputs_of(asking(tmp_path, built.location), "my.toml")
    assert again.mask_version == mine.mask_version != cache.open_store(built.location).current
    assert {entry.version for entry in again.entries.values()} == {again.mask_version}
    assert again.fingerprint == mine.fingerprint


def test_a_version_that_gc_removed_is_built_again(built, tmp_path):
    config = asking(tmp_path, built.location)
    build_masks(asking(tmp_path, built.location, draws=2))
    cache.open_store(built.location, writable=True).gc(keep=1, min_age_s=-1)
    said = refusal(config)
    assert "draws: asked 3, found 2; run: python -m maskgen build" in said
    build_masks(config)
    assert inputs_of(config, "my.toml").entries[16].spec.params["draws"] == 3


def test_data_of_longer_contexts_than_the_runs_are_refused(tmp_path):
    config = make_config(tmp_path)
    build_masks(config)
    make_data(tmp_path / "data", (10, 32))
    assert list(inputs_of(config, "my.toml").entries) == [16, 32]
    make_data(tmp_path / "data", (10, 33))
    with pytest.raises(
        DatasetError, match="prepared for contexts up to 33, the run's largest is 32"
    ):
        inputs_of(config, "my.toml")
