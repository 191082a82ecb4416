"""What the verbs print: every column, count, unit and name, for people and as JSON."""

import json
import re
import time

import pytest
from click.testing import CliRunner

import cache
from maskgen.build import build
from maskgen.cli import main
from maskgen.entry import load_entry
from maskgen.picture import entry_kinds, text_picture
from maskgen.spec import read_specs

ENTRIES = [
    {"name": "causal", "family": "causal", "Q_LEN": [64, 40], "KV_LEN": [64, 72]},
    {"name": "packed", "family": "document", "Q_LEN": 20, "doc_ids": [0] * 9 + [-1] * 6 + [1] * 5},
    {
        "name": "draft",
        "family": "dflash",
        "kind": "layouts",
        "context": 64,
        "anchors": 8,
        "draft_block_size": 4,
        "draws": 2,
        "answer_starts": [0, 32],
        "answer_ends": [40, 64],
    },
    {"name": "data", "family": "full", "kind": "parametric", "Q_LEN": 32, "KV_LEN": 48},
]
NAMES = ["causal/q40-kv72", "causal/q64-kv64", "data/q32-kv48", "draft/ctx64", "packed/q20-kv20"]
TITLES = ["name", "kind", "Q_LEN", "KV_LEN", "BLOCK_SIZE", "full", "partial", "empty", "sparsity"]


def toml(value):
    return json.dumps(value)


def write_config(file, entries, store):
    lines = ["[masks]", f"cache = {toml(str(store))}", "BLOCK_SIZE = [16, 32]"]
    for entry in entries:
        lines += ["[[masks.entry]]", *(f"{key} = {toml(value)}" for key, value in entry.items())]
    file.write_text("\n".join(lines) + "\n")


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def as_json(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with run.toml and its built masks.zarr, and what the build printed."""
    folder = tmp_path_factory.mktemp("printed")
    write_config(folder / "run.toml", ENTRIES, folder / "masks.zarr")
    began = time.perf_counter()
    result = run("build", folder / "run.toml")
    elapsed_ms = (time.perf_counter() - began) * 1e3
    assert result.exit_code == 0, result.output
    return folder, result, elapsed_ms


def cells_of(line):
    return re.split(r"  +", line.strip())


def wanted_rows(store):
    """A row an entry, from its dense mask alone."""
    rows = {}
    for name, info in store.version().entries.items():
        size = info.nbytes
        shown = f"{size} B" if size < 1024 else f"{size / 1024:.1f} KiB"
        entry = load_entry(store, name)
        spec = entry.spec
        head = [name, spec.kind, str(spec.Q_LEN), str(spec.KV_LEN), "16x32"]
        if spec.kind == "parametric":
            rows[name] = [*head, "-", "-", "-", "-", shown]
            continue
        kinds = entry.tables.block_kinds()
        counts = [int((kinds == kind).sum()) for kind in (2, 1, 0)]
        share = f"{100 * counts[2] / kinds.numel():.1f}%"
        rows[name] = [*head, *map(str, counts), share, shown]
    return rows


def test_a_build_prints_a_row_a_mask_in_the_order_of_the_run_file(place):
    folder, result, elapsed_ms = place
    store = cache.open_store(folder / "masks.zarr")
    lines = result.stdout.splitlines()
    assert cells_of(lines[0]) == [*TITLES, "bytes", "build ms"]
    order = ["causal/q64-kv64", "causal/q40-kv72", "packed/q20-kv20", "draft/ctx64", NAMES[2]]
    found = [cells_of(line) for line in lines[1:6]]
    rows = wanted_rows(store)
    assert [row[:-1] for row in found] == [rows[name] for name in order]
    built = [float(row[-1]) for row in found]
    assert 0.5 < sum(built) < elapsed_ms
    assert "sparsity 0.0%" not in result.stdout
    cells = 64 * 64 + 40 * 72 + 20 * 20 + 8 * 32 * 96 + 4 * 32 * 48
    certificate = next(line for line in lines if line.startswith("certificate: "))
    told = re.fullmatch(
        r"certificate: 5 new entries, (\d+) cells compared with their formulas in (\d+) ms "
        r"\(not part of build ms\)",
        certificate,
    )
    assert int(told[1]) == cells
    assert 1 <= int(told[2]) < elapsed_ms
    assert (
        "  packed/q20-kv20: 6 rows see no key, first (b, h, q): "
        "(0, 0, 9), (0, 0, 10), (0, 0, 11), (0, 0, 12)"
    ) in lines
    assert sum("see no key" in line for line in lines) == 1
    assert lines[-1] == f"version {store.current[:16]} is current in {folder / 'masks.zarr'}"
    # On a slow machine there are lines before the last.
    told = result.stderr.splitlines()
    assert "build: 5/5 data/q32-kv48" in told
    assert told[-1] == "certify: 5/5 packed/q20-kv20"


def test_a_build_as_json_says_the_same(place):
    folder, _, _ = place
    store = cache.open_store(folder / "masks.zarr")
    again = as_json("build", folder / "run.toml")
    assert sorted(again) == ["certificates", "entries", "version"]
    assert (again["version"], again["certificates"]) == (store.current, [])
    assert all(entry["reused"] and entry["build_ms"] > 0 for entry in again["entries"])
    for entry in again["entries"]:
        row = wanted_rows(store)[entry["name"]]
        found = [entry[key] for key in ("kind", "Q_LEN", "KV_LEN", "full", "partial", "empty")]
        assert ["-" if value is None else str(value) for value in found] == [
            *row[1:4],
            *row[5:8],
        ]
        assert entry["BLOCK_SIZE"] == [16, 32]
        assert entry["bytes"] == store.version().entries[entry["name"]].nbytes
    fresh = as_json("build", folder / "run.toml", "--cache", folder / "other" / "m.zarr")
    assert [made["name"] for made in fresh["certificates"]] == NAMES
    assert fresh["certificates"][4]["rows_without_key"] == 6
    assert not any(entry["reused"] for entry in fresh["entries"])
    assert fresh["version"] == again["version"]


def test_a_list_prints_a_row_an_entry(place):
    folder, _, _ = place
    store = cache.open_store(folder / "masks.zarr")
    result = run("list", "--cache", folder / "masks.zarr")
    lines = result.stdout.splitlines()
    assert cells_of(lines[0]) == [*TITLES, "bytes"]
    rows = wanted_rows(store)
    assert [cells_of(line) for line in lines[1:-1]] == [rows[name] for name in NAMES]
    assert lines[-1] == f"version {store.current[:16]}"
    listed = as_json("list", "--cache", folder / "masks.zarr")
    assert listed["version"] == store.current
    for entry, info in zip(listed["entries"], store.version().entries.values(), strict=True):
        assert (entry["name"], entry["sha256"], entry["bytes"]) == (
            info.name,
            info.sha256,
            info.nbytes,
        )
        assert (entry["reused"], entry["build_ms"]) == (False, 0.0)


def test_show_prints_the_spec_the_counts_and_the_layout_asked_for(place):
    folder, _, _ = place
    store = cache.open_store(folder / "masks.zarr")
    entry = load_entry(store, "draft/ctx64")
    pictures = [text_picture(entry_kinds(entry, batch=layout)) for layout in range(8)]
    assert len(set(pictures)) > 2
    for layout, picture in enumerate(pictures):
        shown = run("show", "draft/ctx64", "--config", folder / "run.toml", "--layout", layout)
        assert shown.stdout.endswith(f"{picture}\n")
    lines = run("show", "draft/ctx64", "--config", folder / "run.toml").stdout.splitlines()
    assert lines[0] == "draft/ctx64: layouts dflash, revision 1"
    assert lines[1] == "Q_LEN 32, KV_LEN 96, BLOCK_SIZE (16, 32)"
    told = sorted(f"{key} {value}" for key, value in entry.spec.params.items())
    assert "answer_ends [40, 64]" in told
    assert len(told) == 7
    assert lines[2].startswith("parameters: ")
    assert all(part in lines[2] for part in told)
    attrs = dict(entry.attrs)
    assert lines[3] == "counts: " + ", ".join(f"{key} {value}" for key, value in attrs.items())
    assert set(attrs) >= {"B", "H", "K", "N", "full", "partial", "empty", "cells", "empty_rows"}
    assert "\n".join(lines[4:]) == pictures[0]
    picture = folder / "x.png"
    shown = run("show", "draft/ctx64", "--config", folder / "run.toml", "--png", picture)
    assert shown.stdout.splitlines()[-1] == f"wrote {picture}"
    shown = as_json("show", "draft/ctx64", "--config", folder / "run.toml", "--png", picture)
    assert shown == {
        "name": "draft/ctx64",
        "version": store.current,
        "sha256": store.version().entries["draft/ctx64"].sha256,
        "spec": entry.spec.to_json(),
        "attrs": attrs,
    }


def test_show_of_a_head(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "printed_heads.py").write_text(
        "def m(b, h, q, kv):\n    return kv < 32 * (1 + h)\n"
    )
    spec = {"name": "m", "mask_mod": "printed_heads:m", "H": 2, "Q_LEN": 16, "KV_LEN": 64}
    write_config(tmp_path / "run.toml", [spec], tmp_path / "m.zarr")
    assert run("build", tmp_path / "run.toml").exit_code == 0
    for head, drawn in ((0, "#."), (1, "##")):
        shown = run("show", "m/q16-kv64", "--config", tmp_path / "run.toml", "--head", head)
        assert shown.stdout.splitlines()[-2] == drawn
    shown = run("show", "m/q16-kv64", "--config", tmp_path / "run.toml")
    assert shown.stdout.splitlines()[-2] == "#."
    refused = run("show", "m/q16-kv64", "--config", tmp_path / "run.toml", "--head", 2)
    assert (refused.exit_code, refused.stderr) == (
        2,
        "Error: head = 2: must be 0 to 1 in 'm/q16-kv64'\n",
    )


def test_a_report_is_of_32_heads_of_128_unless_asked(place):
    folder, _, _ = place
    page = folder / "page.html"
    result = run("report", page, "--cache", folder / "masks.zarr")
    assert (result.exit_code, result.stdout) == (0, f"wrote {page}\n")
    assert "layer's forward with 32 heads of 128," in page.read_text()
    assert result.stderr.endswith("report: 5/5 packed/q20-kv20\n")
    run("report", page, "--cache", folder / "masks.zarr", "--heads", 3, "--head-dim", 64)
    assert "layer's forward with 3 heads of 64," in page.read_text()


def damaged_twice(store):
    """Two entries of which an array is not what the spec says, under sound digests."""
    entries = [store.load(name).to_data() for name in store.version().entries]
    for data in entries:
        if data.name in NAMES[:2]:
            wrong = data.spans["ends"].copy()
            wrong[..., 5] += 1
            data.spans["ends"] = wrong
    return entries


def test_verify_counts_its_differences(place, tmp_path):
    folder, _, _ = place
    store = cache.open_store(folder / "masks.zarr")
    version = store.current
    plain = run("verify", "--cache", folder / "masks.zarr")
    assert plain.stdout == f"version {version[:16]}, 5 entries, digests: no difference\n"
    sound = as_json("verify", "--cache", folder / "masks.zarr")
    digests = {name: info.sha256 for name, info in store.version().entries.items()}
    assert sound == {
        "version": version,
        "entries": digests,
        "findings": [],
        "not_compared": [],
        "strangers": [],
    }
    bad = cache.open_store(tmp_path / "bad.zarr", writable=True)
    bad.publish(damaged_twice(store))
    found = run("verify", "--deep", "--cache", tmp_path / "bad.zarr")
    lines = found.stdout.splitlines()
    assert found.exit_code == 3
    assert [line for line in lines if "another one when built again" in line] == [
        f"entry '{name}': array ends is another one when built again" for name in NAMES[:2]
    ]
    count = len(lines) - 1
    assert count >= 4
    assert lines[-1] == (
        f"version {bad.current[:16]}, 5 entries, digests, formulas and rebuilt entries: "
        f"{count} differences"
    )
    assert found.stderr.endswith("verify: 5/5 packed/q20-kv20\n")
    told = json.loads(run("verify", "--deep", "--json", "--cache", tmp_path / "bad.zarr").stdout)
    assert [f"entry {each['entry']!r}: {each['problem']}" for each in told["findings"]] == lines[
        :-1
    ]


def test_an_older_version_is_looked_at_by_its_id(tmp_path):
    file, where = tmp_path / "run.toml", tmp_path / "m.zarr"
    specs = [{"name": "c", "family": "causal", "Q_LEN": length} for length in (32, 48)]
    ids = []
    for spec in specs:
        write_config(file, [spec], where)
        ids.append(as_json("build", file)["version"])
    for version, name in zip(ids, ("c/q32-kv32", "c/q48-kv48"), strict=True):
        asked = ["--version", version[:10]]
        # An id that is asked for counts more than what the run file would choose.
        for place in (["--cache", where], ["--config", file]):
            for verb in (["list"], ["verify"], ["verify", "--deep"]):
                found = as_json(*verb, *place, *asked)
                assert found["version"] == version
                assert name in str(found["entries"])
            shown = as_json("show", name, *place, *asked)
            assert (shown["name"], shown["version"]) == (name, version)
            assert run("report", tmp_path / "p.html", *place, *asked).exit_code == 0
            assert f"<td>{name}</td>" in (tmp_path / "p.html").read_text()
        assert run("pack", tmp_path / "p.zip", "--cache", where, *asked).exit_code == 0
        assert as_json("list", "--cache", tmp_path / "p.zip")["version"] == version
        (tmp_path / "p.zip").unlink()
        pulled = tmp_path / f"{version[:4]}.zarr"
        assert run("pull", f"file://{where}", "--cache", pulled, *asked).exit_code == 0
        assert as_json("list", "--cache", pulled)["version"] == version
        pushed = tmp_path / f"{version[:4]}-there.zarr"
        assert run("push", f"file://{pushed}", "--cache", where, *asked).exit_code == 0
        assert as_json("list", "--cache", pushed)["version"] == version


def test_a_read_only_cache_with_the_masks_in_an_older_version(tmp_path, monkeypatch):
    file, where = tmp_path / "run.toml", tmp_path / "m.zarr"
    store = cache.open_store(where, writable=True)
    old_spec = {"name": "c", "family": "causal", "Q_LEN": 32, "BLOCK_SIZE": [16, 32]}
    old = build(read_specs({"masks": {"entry": [old_spec]}}), store).version
    new = build(read_specs({"masks": {"entry": [{**old_spec, "Q_LEN": 48}]}}), store).version
    write_config(file, [old_spec], where)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("cache.atomic.tempfile.mkdtemp", refuse)
    result = run("build", file)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"version {old[:16]} is not made current in {where}"
    assert result.stderr.splitlines()[-1] == f"{where} is read-only and holds every mask of {file}"
    assert cells_of(result.stdout.splitlines()[1])[-1] == "copied"
    assert cache.open_store(where).current == new


def test_a_certificate_of_a_wrong_mask_says_so_below_its_count(tmp_path, monkeypatch):
    file, where = tmp_path / "run.toml", tmp_path / "m.zarr"
    write_config(file, ENTRIES[:1], where)
    monkeypatch.setattr(
        "maskgen.certificate.span_findings",
        lambda spans: ["one", "two"] if spans.Q_LEN == 40 else [],
    )
    result = run("build", file)
    assert result.exit_code == 3
    lines = result.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("certificate: 2 new entries"))
    assert lines[at + 1 :] == [
        "  causal/q40-kv72: WRONG, one",
        "  causal/q40-kv72: WRONG, two",
        f"version {lines[-1].split()[1]} is not made current in {where}",
    ]
    told = json.loads(run("build", file, "--json", "--cache", tmp_path / "n" / "n.zarr").stdout)
    assert [made["findings"] for made in told["certificates"]] == [["one", "two"], []]


def test_deep_verification_keeps_what_the_digests_found(tmp_path):
    file, where = tmp_path / "run.toml", tmp_path / "m.zarr"
    write_config(file, ENTRIES[:2], where)
    assert run("build", file).exit_code == 0
    (chunk,) = where.glob("*/spans/c/0")
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)
    plain, deep = (
        json.loads(run("verify", *options, "--json", "--config", file).stdout)["findings"]
        for options in ([], ["--deep"])
    )
    assert plain
    assert deep[: len(plain)] == plain
    assert {finding["entry"] for finding in deep[len(plain) :]} == {
        "causal/q40-kv72",
        "causal/q64-kv64",
        "packed/q20-kv20",
    }
    lines = run("verify", "--deep", "--config", file).stdout.splitlines()
    assert len(lines) == len(deep) + 1
    assert lines[-1].endswith(f": {len(deep)} differences")
