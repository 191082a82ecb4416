"""What a run says of a cache without its masks, and whether the advice works."""

import shlex

import pytest
from click.testing import CliRunner

import cache
from maskgen.cli import main as maskgen
from maskgen.runfile import masks_section
from runtime.errors import BucketMissingError
from runtime.session import open_session
from tests.runtime.tiny_run import build_masks, make_config, make_data

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
        open_session(config, "my.toml")
    return str(caught.value)


def test_only_what_differs_of_a_mask_is_named(built, tmp_path):
    said = refusal(asking(tmp_path, built.location, anchors=4, draws=2))
    differs = said.split("another one than my.toml asks for: ")[1]
    assert differs == (
        "KV_LEN: asked 32, found 40; Q_LEN: asked 16, found 24; draws: asked 2, found 3; "
        "run: make masks CONFIG=my.toml"
    )


@pytest.mark.parametrize(
    "place", ["{folder}/masks.zip", "{folder}/a b.zip", "memory://said/m.zarr"]
)
@pytest.mark.parametrize("name", ["dflash", "other"])
def test_the_advice_for_a_zip_or_a_url_works(built, tmp_path, place, name):
    location = place.format(folder=tmp_path)
    asked = asking(tmp_path, location, draws=2, name=name)
    asked = make_config(tmp_path, masks=asked.masks, train={"masks": name})
    (cache.pack if location.endswith(".zip") else cache.push)(built, location)
    said = refusal(asked)
    assert "set masks.cache to a folder that ends in .zarr" in said
    for line in said.split("or run: ")[1].split(" && "):
        python, option, package, *words = shlex.split(line)
        assert (python, option, package) == ("python", "-m", "maskgen")
        done = CliRunner().invoke(maskgen, words)
        assert done.exit_code == 0, done.output
    assert open_session(asked, "my.toml").entries[16].spec.params["draws"] == 2
