"""The report: its figures by hand, and a page that stands alone."""

import base64
import dataclasses
import os
import re
import sys
from pathlib import Path

import matplotlib
import pytest
from PIL import ImageFont

import cache
from maskgen.build import build, build_entry
from maskgen.entry import load_entry
from maskgen.picture import COLOURS, entry_kinds, png_bytes
from maskgen.report import TileCost, bucket_padding, html_report, save_report, tile_cost
from maskgen.spec import read_specs

DFLASH = {
    "name": "dflash",
    "family": "dflash",
    "kind": "layouts",
    "context": [32, 64],
    "anchors": 8,
    "draft_block_size": 4,
    "draws": 2,
}
ENTRIES = [
    {"name": "causal", "family": "causal", "Q_LEN": 64},
    DFLASH,
    {k: v for k, v in DFLASH.items() if k != "draws"} | {"name": "data", "kind": "parametric"},
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    opened = cache.open_store(tmp_path_factory.mktemp("report") / "m.zarr", writable=True)
    build(read_specs({"masks": {"BLOCK_SIZE": 16, "entry": ENTRIES}}), opened)
    return opened


def test_the_cost_of_causal_tiles_by_hand(store):
    # 4 x 4 blocks of 16 x 16: 6 full and 4 partial ones are visited.
    cost = tile_cost(load_entry(store, "causal/q64-kv64"))
    assert cost == TileCost(visible_cells=64 * 65 / 2, visited_cells=10 * 256)
    assert cost.waste == pytest.approx(1 - 2080 / 2560)
    assert cost.forward_flops(heads=2, head_dim=8) == 4 * 2 * 8 * 2560


def test_the_cost_of_layouts_is_that_of_one(store):
    entry = load_entry(store, "dflash/ctx64")
    cost = tile_cost(entry)
    layouts = entry.num_layouts
    assert cost.visible_cells == pytest.approx(float(entry.spans.dense().sum()) / layouts)
    assert cost.visited_cells == pytest.approx(
        float((entry.tables.block_kinds() > 0).sum()) * 256 / layouts
    )


def test_a_parametric_entry_has_no_cost_of_its_own(store):
    assert tile_cost(load_entry(store, "data/ctx64")) is None


def test_a_mask_that_visits_nothing_wastes_nothing():
    assert TileCost(visible_cells=0, visited_cells=0).waste == 0


def test_padding_of_evenly_spread_lengths():
    assert bucket_padding([200, 100]) == [(100, 1, 0.495), (200, 101, 0.2475)]


def test_the_page_stands_alone_and_tells_of_every_entry(store):
    seen = []
    page = html_report(store, heads=4, head_dim=64, progress=lambda *args: seen.append(args[1:]))
    assert seen == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    for name in store.version().entries:
        assert f"<td>{name}</td>" in page
        assert f"<figcaption>{name}</figcaption>" in page
    assert page.count('src="data:image/png;base64,') == 5
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "<script" not in page
    assert store.current[:16] in page
    # GFLOP of causal: 4 * 4 heads * 64 * 2560 cells.
    row = re.search(r"<tr><td>causal/q64-kv64</td>.*?</tr>", page)[0]
    assert re.findall(r"<td>(.*?)</td>", row) == [
        *("causal/q64-kv64", "static", "64", "64", "16x16", "6", "4", "6", "37.5%"),
        *("40.0%", "18.8%", "0.00"),
        row.split("<td>")[-1].split("<")[0],
    ]
    assert "<td>dflash</td><td>64</td><td>33 to 64</td><td>24.2%</td>" in page


def test_a_page_of_a_version_by_its_prefix(store):
    assert html_report(store, store.current[:8], heads=1, head_dim=1)


def test_a_page_is_written_or_the_file_is_named(tmp_path):
    save_report(tmp_path / "page.html", "<p>")
    assert (tmp_path / "page.html").read_text() == "<p>"
    with pytest.raises(OSError, match=r"none/page\.html"):
        save_report(tmp_path / "none" / "page.html", "<p>")


def test_a_page_about_a_cache_whose_path_is_no_utf_8(tmp_path):
    save_report(tmp_path / "page.html", os.fsdecode(b"<p>caf\xe9.zarr"))
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "<p>caf?.zarr"


def test_the_page_does_not_scroll_sideways_and_its_legend_stands_alone(store):
    page = html_report(store, heads=1, head_dim=1)
    # Cells do not wrap, so a table scrolls within its own box where it is too wide.
    assert re.search(r"td \{ white-space: nowrap \}", page)
    assert re.search(r"\.wide \{ overflow-x: auto", page)
    assert page.count("<table>") == page.count('<div class="wide"><table>') == 2
    (legend,) = re.findall(r'<p class="legend">(.*?)</p>', page)
    assert re.sub(r"<[^>]*>", " ", legend).split() == ["full", "partial", "empty"]
    # The widest row that masks have, in a wide font of 13 px, fits a window of 1300.
    cells = [
        *("window-causal/q131072-kv131072", "parametric", "131072", "1048576", "128x128"),
        *("33550336", "1234567", "33558528", "100.0%", "100.0%", "100.0%", "123456.78"),
        "1023.9 MiB",
    ]
    fonts = Path(matplotlib.get_data_path(), "fonts", "ttf")
    plain, bold = (
        ImageFont.truetype(str(fonts / name), 13)
        for name in ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf")
    )
    titles = re.findall(r"<th>(.*?)</th>", page)[: len(cells)]
    wide = sum(
        max(plain.getlength(cell), *map(bold.getlength, title.split())) + 2 * 0.6 * 13
        for cell, title in zip(cells, titles, strict=True)
    )
    width = int(re.search(r"body \{[^}]*max-width: (\d+)px", page)[1])
    assert wide < width < 1300 - 2 * 15 - 20


@pytest.fixture(scope="module")
def page(store):
    """The page for a layer whose FLOPs show two places."""
    return html_report(store, heads=1000, head_dim=128)


def cells_of(page, name):
    row = re.search(rf"<tr><td>{name}</td>.*?</tr>", page)[0]
    return re.findall(r"<td>(.*?)</td>", row)


def test_every_column_of_the_page_is_that_of_its_title(store, page):
    titles = re.findall(r"<th>(.*?)</th>", page)[:13]
    assert titles == [
        *("name", "kind", "Q_LEN", "KV_LEN", "BLOCK_SIZE", "full", "partial", "empty", "sparsity"),
        *("partial share", "masked in tiles", "GFLOP", "bytes"),
    ]
    size = store.version().entries["causal/q64-kv64"].nbytes
    shown = f"{size} B" if size < 1024 else f"{size / 1024:.1f} KiB"
    # 4 * 1000 heads * 128 * 2560 cells = 1.31e9; 2080 of 2560 cells are visible.
    wanted = ["causal/q64-kv64", "static", "64", "64", "16x16", "6", "4", "6", "37.5%"]
    assert cells_of(page, "causal/q64-kv64") == [*wanted, "40.0%", "18.8%", "1.31", shown]
    data = cells_of(page, "data/ctx64")
    assert data[:5] == ["data/ctx64", "parametric", "32", "96", "16x16"]
    assert data[5:] == ["-"] * 7 + ["0 B"]
    entry = load_entry(store, "dflash/ctx64")
    kinds = entry.tables.block_kinds()
    full, partial, empty = (int((kinds == kind).sum()) for kind in (2, 1, 0))
    visited = (full + partial) * 256
    assert cells_of(page, "dflash/ctx64")[5:12] == [
        *(str(full), str(partial), str(empty)),
        f"{100 * empty / kinds.numel():.1f}%",
        f"{100 * partial / (full + partial):.1f}%",
        f"{100 * (1 - int(entry.spans.dense().sum()) / visited):.1f}%",
        f"{4 * 1000 * 128 * visited / entry.num_layouts / 1e9:.2f}",
    ]


def test_the_page_says_what_it_is_about(store, page):
    title = f"Masks of version {store.current[:16]}"
    assert page.startswith("<!doctype html>\n")
    assert page.endswith("</body></html>\n")
    assert f"<title>{title}</title>" in page
    assert f"<h1>{title}</h1><p>{store.location}, 5 entries." in page
    assert "one layer's forward with 1000 heads of 128, for one mask of the batch." in page
    assert re.findall(
        r"<tr><td>(\w+)</td><td>(\d+)</td><td>(.*?)</td><td>(.*?)</td></tr>", page
    ) == [
        ("data", "32", "1 to 32", "48.4%"),
        ("data", "64", "33 to 64", "24.2%"),
        ("dflash", "32", "1 to 32", "48.4%"),
        ("dflash", "64", "33 to 64", "24.2%"),
    ]


def test_names_of_a_page_are_text(tmp_path):
    """A cache's names may come from anyone, and so may the path."""
    folder = tmp_path / "a<b"
    store = cache.open_store(folder / "m.zarr", writable=True)
    build(read_specs({"masks": {"BLOCK_SIZE": 16, "entry": ENTRIES[:1]}}), store)
    page = html_report(store, heads=1, head_dim=1)
    assert "a&lt;b" in page
    assert "a<b" not in page
    # Without a context there is no padding to tell of.
    assert "Padding of the buckets" not in page


def test_each_picture_is_that_of_its_entry(store, page):
    figures = re.findall(
        r'<figure><img alt="blocks of (.*?)" src="data:image/png;base64,(.*?)">'
        r"<figcaption>(.*?)</figcaption></figure>",
        page,
    )
    assert [name for name, _, _ in figures] == list(store.version().entries)
    for name, data, caption in figures:
        entry = load_entry(store, name)
        assert caption == name
        assert base64.b64decode(data) == png_bytes(entry_kinds(entry), 256)


def test_the_legend_has_the_colours_of_the_pictures(page):
    legend = re.findall(r'<i style="background: rgb\((\d+), (\d+), (\d+)\)"></i>(\w+)</span>', page)
    told = {name: tuple(map(int, colour)) for *colour, name in legend}
    assert told == {"full": COLOURS[2], "partial": COLOURS[1], "empty": COLOURS[0]}


def test_an_older_version_has_a_page_of_its_own(tmp_path):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    old = build(read_specs({"masks": {"BLOCK_SIZE": 16, "entry": ENTRIES[:1]}}), store).version
    build(read_specs({"masks": {"BLOCK_SIZE": 16, "entry": ENTRIES[2:]}}), store)
    page = html_report(store, old[:10], heads=1, head_dim=1)
    assert f"Masks of version {old[:16]}" in page
    assert "causal/q64-kv64" in page
    assert "data/ctx64" not in page


def test_padding_by_the_length_before():
    assert bucket_padding([300, 100, 200]) == [
        (100, 1, 99 / 200),
        (200, 101, 99 / 400),
        (300, 201, 99 / 600),
    ]
    assert bucket_padding([7]) == [(7, 1, 3 / 7)]


def test_the_cost_of_heads_is_that_of_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "report_heads.py").write_text(
        "def m(b, h, q, kv):\n    return (kv < 16 * (1 + h)) & (q >= 8 * b)\n"
    )
    table = {"name": "m", "mask_mod": "report_heads:m", "B": 2, "H": 3, "Q_LEN": 16, "KV_LEN": 64}
    specs = read_specs({"masks": {"BLOCK_SIZE": 16, "entry": [table]}})
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    build(specs, store)
    # Heads visit 1, 2 and 3 blocks; batch row 1 sees half of each.
    assert tile_cost(load_entry(store, specs[0].name)) == TileCost(
        visible_cells=(16 + 8) / 2 * 32, visited_cells=2 * 256
    )


def test_a_name_of_a_context_bucket_alone_makes_none(tmp_path):
    (spec,) = read_specs({"masks": {"BLOCK_SIZE": 16, "entry": ENTRIES[:1]}})
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    store.publish([build_entry(dataclasses.replace(spec, name="c/ctx64"))])
    page = html_report(store, heads=1, head_dim=1)
    assert "<td>c/ctx64</td>" in page
    assert "Padding of the buckets" not in page
