"""What the verbs about versions print and leave, and which cache and version each one takes."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import cache
from maskgen.cli import main
from maskgen.listing import echo_json, human_bytes, optional, text_table


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def as_json(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def write_config(file, store, Q_LEN, family="causal"):
    file.write_text(
        f'[masks]\ncache = "{store}"\nBLOCK_SIZE = 16\n'
        f'[[masks.entry]]\nname = "c"\nfamily = "{family}"\nQ_LEN = {Q_LEN}\n'
    )


@pytest.fixture
def three(tmp_path):
    """A cache of three versions, the last one current, and their ids in order."""
    ids = []
    for length in (32, 48, 64):
        write_config(tmp_path / "run.toml", tmp_path / "m.zarr", [length, 96])
        ids.append(as_json("build", tmp_path / "run.toml")["version"])
    return tmp_path / "m.zarr", ids


def aged(store, hours=2):
    """Let all its versions be older than the hour in which gc keeps everything."""
    for path in store.rglob("*"):
        then = path.stat().st_mtime - hours * 3600
        os.utime(path, (then, then))


def bytes_on_disk(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_versions_are_listed_with_their_sizes_and_the_current_one(three):
    store, ids = three
    result = run("versions", "--cache", store)
    title, *lines = result.stdout.splitlines()
    assert title.split() == ["version", "entries", "on", "disk"]
    assert {line.split()[0] for line in lines} == {version[:16] for version in ids}
    for line in lines:
        version = next(v for v in ids if v.startswith(line.split()[0]))
        shown = ["current"] if version == ids[-1] else []
        size = human_bytes(bytes_on_disk(store / version))
        assert line.split()[1:] == ["2", *size.split(), *shown]
    infos = {info["id"]: info for info in as_json("versions", "--cache", store)}
    assert set(infos) == set(ids)
    for version, info in infos.items():
        assert info["bytes_on_disk"] == bytes_on_disk(store / version)
        assert (info["entries"], info["damage"]) == (2, "")
        assert info["is_current"] == (version == ids[-1])


def test_each_damaged_version_is_told(three):
    store, ids = three
    for version in ids[:2]:
        (store / version / "zarr.json").write_bytes(b"{}")
    result = run("versions", "--cache", store)
    assert result.exit_code == 3
    assert len(result.stderr.splitlines()) == 2
    assert all(str(store / version) in result.stderr for version in ids[:2])
    words = {line.split()[0]: line.split()[-1] for line in result.stdout.splitlines()[1:]}
    assert words == {ids[0][:16]: "damaged", ids[1][:16]: "damaged", ids[2][:16]: "current"}


def test_use_makes_another_version_current(three):
    store, ids = three
    result = run("use", ids[1][:9], "--cache", store)
    assert result.stdout == f"version {ids[1][:16]} is current in {store}\n"
    assert cache.open_store(store).current == ids[1]
    refused = run("use", "f" * 9, "--cache", store)
    assert refused.exit_code == 1
    assert cache.open_store(store).current == ids[1]


def test_a_difference_has_a_direction(three):
    store, ids = three
    assert as_json("diff", ids[0], ids[1][:8], "--cache", store) == {
        "added": ["c/q48-kv48"],
        "removed": ["c/q32-kv32"],
        "changed": [],
    }
    shown = run("diff", ids[1], ids[0], "--cache", store)
    assert shown.stdout == "added c/q32-kv32\nremoved c/q48-kv48\n"
    assert run("diff", ids[2], ids[2][:9], "--cache", store).stdout == "no difference\n"


def test_gc_keeps_two_versions_unless_asked(three):
    store, ids = three
    aged(store)
    size = bytes_on_disk(store / ids[0])
    result = run("gc", "--cache", store)
    *removed, count = result.stdout.splitlines()
    assert removed == [f"removed {ids[0]}", f"removed {store.parent / 'sidecars' / ids[0]}"]
    assert re.fullmatch(r"1 version removed, [\d.]+ (B|KiB) freed", count)
    freed = float(count.split()[3]) * (1024 if "KiB" in count else 1)
    assert freed >= size * 0.95
    assert not (store / ids[0]).exists()
    report = as_json("gc", "--keep", 1, "--cache", store)
    assert report["removed"] == [ids[1]]
    assert report["freed_bytes"] > 0
    assert [info["id"] for info in as_json("versions", "--cache", store)] == [ids[2]]
    assert run("gc", "--cache", store).stdout == "0 versions removed, 0 B freed\n"
    assert run("gc", "--keep", 0, "--cache", store).exit_code == 2


def test_gc_counts_what_it_removes(three):
    store, ids = three
    aged(store)
    lines = run("gc", "--keep", 1, "--cache", store).stdout.splitlines()
    assert sorted(lines[:2]) == sorted(f"removed {version}" for version in ids[:2])
    assert len(lines) == 5
    assert lines[-1].startswith("2 versions removed, ")


def shipped(line):
    """Version, target, files and those that were there, of a line about a shipment."""
    told = re.fullmatch(
        r"(\w+) version (\w{16}) to (\S+): (\d+) files, [\d.]+ (?:B|KiB); (\d+) were there\n", line
    )
    assert told, line
    return told[1], told[2], told[3], int(told[4]), int(told[5])


def test_each_shipment_says_what_it_did_and_where_to(three, tmp_path):
    store, ids = three
    packed, there, back = tmp_path / "m.zip", f"file://{tmp_path}/there.zarr", tmp_path / "b.zarr"
    verb, version, target, files, kept = shipped(run("pack", packed, "--cache", store).stdout)
    assert (verb, version, target, kept) == ("packed", ids[2][:16], str(packed), 0)
    assert files > 0
    unpacked = tmp_path / "u.zarr"
    result = shipped(run("unpack", packed, "--cache", unpacked).stdout)
    assert result == ("unpacked", ids[2][:16], str(unpacked), files, 0)
    pushed = shipped(run("push", there, "--cache", store).stdout)
    assert (pushed[0], pushed[1], pushed[2], pushed[4]) == ("pushed", ids[2][:16], there, 0)
    again = shipped(run("push", there, "--cache", store).stdout)
    assert (again[3] < pushed[3], again[4] > 0) == (True, True)
    pulled = shipped(run("pull", there, "--cache", back).stdout)
    assert (pulled[0], pulled[1], pulled[2], pulled[4]) == ("pulled", ids[2][:16], str(back), 0)
    again = shipped(run("pull", there, "--cache", back).stdout)
    assert (again[3] < pulled[3], again[4] > 0) == (True, True)
    for place in (unpacked, back, tmp_path / "there.zarr"):
        assert cache.open_store(place).current == ids[2]


def test_a_token_of_an_address_is_not_shown(three):
    store, _ = three
    result = run("push", "memory://token-of/m.zarr?token=hidden", "--cache", store)
    assert "hidden" not in result.output


def test_the_cache_that_is_named_counts_more_than_the_run_files(three, tmp_path):
    store, ids = three
    file, other = tmp_path / "run.toml", tmp_path / "o" / "o.zarr"
    write_config(file, tmp_path / "none.zarr", [64, 96])
    assert run("versions", "--config", file).exit_code == 1
    listed = run("list", "--config", file, "--cache", store)
    assert listed.stdout.splitlines()[-1] == f"version {ids[2][:16]}"
    listed = run("list", "--config", file, "--set", f"masks.cache={store}")
    assert listed.stdout.splitlines()[-1] == f"version {ids[2][:16]}"
    assert run("build", file, "--set", f'masks.cache="{other}"').exit_code == 0
    assert other.is_dir()


def test_settings_are_applied_in_their_order(tmp_path):
    file, where = tmp_path / "run.toml", tmp_path / "m.zarr"
    write_config(file, where, 32)
    sets = ["--set", "masks.BLOCK_SIZE=64", "--set", "masks.BLOCK_SIZE=[32, 16]"]
    (entry,) = as_json("build", file, *sets)["entries"]
    assert entry["BLOCK_SIZE"] == [32, 16]
    (entry,) = as_json("build", "--config", file)["entries"]
    assert entry["BLOCK_SIZE"] == [16, 16]


def test_a_build_needs_one_run_file(tmp_path):
    file = tmp_path / "run.toml"
    write_config(file, tmp_path / "m.zarr", 32)
    for arguments, message in (
        ((), "name a run file with --config"),
        ((file, "--config", "b.toml"), f"name one run file, not b.toml and {file}"),
    ):
        refused = run("build", *arguments)
        assert refused.exit_code == 2
        assert message in refused.stderr


def test_advice_repeats_the_run_file_however_it_was_named(tmp_path):
    file = tmp_path / "run.toml"
    write_config(file, tmp_path / "m.zarr", 32)
    assert run("build", file).exit_code == 0
    (version,) = (path for path in (tmp_path / "m.zarr").iterdir() if path.is_dir())
    chunk = next(version.rglob("c/0"))
    chunk.write_bytes(b"damaged")
    for arguments in (("verify", "--config", file), ("list", "--config", file)):
        result = run(*arguments, "--set", "masks.BLOCK_SIZE=32")
        assert result.exit_code == 1
        assert f"--config {file} --set masks.BLOCK_SIZE=32" in result.stderr, arguments


def test_a_mask_that_no_version_holds_names_the_run_file_and_the_cache(three, tmp_path):
    store, _ = three
    write_config(tmp_path / "run.toml", store, 80)
    for verb in (("list",), ("verify",), ("report", tmp_path / "p.html"), ("pack", "x.zip")):
        refused = run(*verb, "--config", tmp_path / "run.toml")
        assert refused.exit_code == 1
        told = f"no version in {store} holds all masks of {tmp_path / 'run.toml'}; "
        assert told in refused.stderr


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1024.0 KiB"),
        (1024**2, "1.0 MiB"),
        (5 * 1024**3, "5.0 GiB"),
        (1024**4, "1.0 TiB"),
        (1500 * 1024**4, "1500.0 TiB"),
    ],
)
def test_sizes_by_their_unit(count, text):
    assert human_bytes(count) == text


def test_columns_are_as_wide_as_they_need():
    rows = [["a", "1.5%", "x", "-"], ["long name", "10", "1 MiB", "7"]]
    assert text_table(["name", "share", "size", "a title"], rows).splitlines() == [
        "name       share  size   a title",
        "a           1.5%  x            -",
        "long name     10  1 MiB        7",
    ]
    with pytest.raises(ValueError, match="zip"):
        text_table(["name", "n"], [["a"]])


def test_values_that_may_be_missing(capsys):
    assert [optional(0), optional(None), optional(12.34, "{:.1f}%")] == ["0", "-", "12.3%"]
    assert optional(None, "{:.1f}%") == "-"
    echo_json({"b": 1, "a": [None, 2]})
    assert capsys.readouterr().out == '{\n  "a": [\n    null,\n    2\n  ],\n  "b": 1\n}\n'


def test_gc_notes_what_stays(three, monkeypatch):
    store, ids = three
    aged(store)
    rename = os.rename

    def refuse(source, target, **options):
        if Path(source) == store / ids[0]:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(source))
        rename(source, target, **options)

    monkeypatch.setattr(os, "rename", refuse)
    result = run("gc", "--keep", 1, "--cache", store)
    note = f"{store / ids[0]} stays: Directory not empty"
    assert (result.exit_code, result.stderr) == (0, f"{note}\n")
    assert f"removed {ids[1]}" in result.stdout
    assert note not in result.stdout
    assert json.loads(run("gc", "--keep", 1, "--cache", store, "--json").stdout)["left"] == [note]
