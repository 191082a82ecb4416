"""The command line: every verb, its exit code, and messages instead of tracebacks."""

import errno
import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest
from click.testing import CliRunner

import cache
from maskgen.cli import main
from maskgen.listing import human_bytes, text_table

CONFIG = """
[run]
seed = 1

[masks]
cache = "{cache}"
BLOCK_SIZE = 16

[[masks.entry]]
name = "causal"
family = "causal"
Q_LEN = 64

[[masks.entry]]
name = "dflash"
family = "dflash"
kind = "layouts"
context = [32, 64]
anchors = 8
draft_block_size = 4
draws = 2
"""
NAMES = ["causal/q64-kv64", "dflash/ctx32", "dflash/ctx64"]


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(CONFIG.format(cache=tmp_path / "masks.zarr"))
    return str(file)


@pytest.fixture
def built(config):
    assert run("build", config).exit_code == 0
    return config


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def as_json(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def damage(tmp_path):
    (chunk,) = [
        path
        for path in (tmp_path / "masks.zarr").rglob("*")
        if path.is_file() and path.name != "zarr.json" and "spans" in path.parts
    ]
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)


def test_help_loads_neither_torch_nor_zarr():
    code = (
        "import runpy, sys\n"
        "sys.argv = ['maskgen', '--help']\n"
        "try:\n    runpy.run_module('maskgen', run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "print(sorted({'torch', 'zarr', 'numpy', 'matplotlib'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "3 verification found a difference" in " ".join(done.stdout.split())


def test_every_verb_has_help():
    for verb in main.commands:
        result = run(verb, "--help")
        assert result.exit_code == 0
        assert "Usage:" in result.output
    wanted = "build diff gc list pack plan pull push report show unpack use verify versions"
    assert sorted(main.commands) == wanted.split()


def test_advice_repeats_no_token(config, tmp_path):
    url = "http://127.0.0.1:9/m.zarr?token=hidden"
    for verb in ("list", "verify", "build"):
        refused = run(verb, "--config", config, "--set", f"masks.cache={url}")
        assert refused.exit_code == 1
        assert "hidden" not in refused.output
        assert "token=***" in refused.output
    refused = run("pull", url, url)
    assert refused.exit_code == 2
    assert "hidden" not in refused.output


@pytest.mark.parametrize(("length", "explained"), [(128, True), (1024, False)])
def test_a_table_without_sparsity_says_why(tmp_path, length, explained):
    file = tmp_path / "run.toml"
    mask = f'name = "m"\nfamily = "causal"\nQ_LEN = {length}\n'
    file.write_text(f'[masks]\ncache = "{tmp_path}/masks.zarr"\n\n[[masks.entry]]\n{mask}')
    for verb in ("build", "list"):
        shown = run(verb, "--config", file)
        assert shown.exit_code == 0, shown.output
        assert ("sparsity 0.0%: at lengths of so few blocks" in shown.stdout) == explained


def test_versions_tells_of_damage(config, tmp_path):
    assert run("build", config).exit_code == 0
    store = cache.open_store(tmp_path / "masks.zarr")
    sound = run("versions", "--config", config)
    assert (sound.exit_code, sound.stderr) == (0, "")
    (tmp_path / "masks.zarr" / store.current / "zarr.json").write_bytes(b"{}")
    for arguments in ((), ("--json",)):
        found = run("versions", "--config", config, *arguments)
        assert found.exit_code == 3
        assert "is damaged: it must be the canonical document" in found.stderr
        assert "current, damaged" in found.stdout or "--json" in arguments
        assert json.loads(found.stdout)[0]["damage"] if arguments else True


def test_build_prints_a_row_a_mask_and_says_what_it_copied(config, tmp_path):
    result = run("build", config)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == [
        *("name", "kind", "Q_LEN", "KV_LEN", "BLOCK_SIZE", "full", "partial", "empty"),
        *("sparsity", "bytes", "build", "ms"),
    ]
    assert lines[1].split()[:9] == [
        *("causal/q64-kv64", "static", "64", "64", "16x16", "6", "4", "6", "37.5%"),
    ]
    assert "certificate: 3 new entries" in result.stdout
    assert "not part of build ms" in result.stdout
    assert f"is current in {tmp_path / 'masks.zarr'}" in lines[-1]
    assert result.stderr.splitlines() == ["build: 3/3 dflash/ctx64", "certify: 3/3 dflash/ctx64"]
    again = run("build", config)
    assert again.stdout.count("copied") == 3
    assert "certificate" not in again.stdout
    assert again.stdout.splitlines()[-1] == lines[-1]


def test_build_as_json(config):
    report = as_json("build", config)
    assert [entry["name"] for entry in report["entries"]] == NAMES
    assert [c["findings"] for c in report["certificates"]] == [[]] * 3
    assert report["entries"][0]["BLOCK_SIZE"] == [16, 16]
    assert len(report["version"]) == 64


def test_build_into_another_cache_without_certificates(config, tmp_path):
    other = tmp_path / "other.zarr"
    result = run("build", config, "--cache", other, "--no-certify")
    assert result.exit_code == 0
    assert "certificate" not in result.stdout
    assert other.is_dir()
    assert not (tmp_path / "masks.zarr").exists()
    assert not (tmp_path / "sidecars").exists()


def test_a_version_that_fails_its_checks_does_not_become_current(config, tmp_path, monkeypatch):
    monkeypatch.setattr("maskgen.certificate.span_findings", lambda spans: ["spans: made up"])
    result = run("build", config)
    assert result.exit_code == 3
    assert "causal/q64-kv64: WRONG, spans: made up" in result.stdout
    assert "is not made current" in result.stdout
    assert cache.open_store(tmp_path / "masks.zarr", writable=True).current is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('family = "causal"', 'family = "casual"', "did you mean 'causal'"),
        ("Q_LEN = 64", "Q_LEN = 64\nofset = 1", "did you mean 'offset'"),
        ("[masks]", "[masks", "must be TOML"),
    ],
)
def test_a_wrong_config_exits_2_with_the_rule(config, tmp_path, old, new, message):
    file = tmp_path / "run.toml"
    file.write_text(file.read_text().replace(old, new, 1))
    result = run("build", config)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert not (tmp_path / "masks.zarr").exists()


def test_a_config_that_is_not_there_exits_2(tmp_path):
    result = run("build", tmp_path / "none.toml")
    assert (result.exit_code, "cannot be read" in result.stderr) == (2, True)


def test_an_unknown_option_exits_2():
    assert run("list", "--colour").exit_code == 2


def test_a_cache_that_is_not_there_exits_1(tmp_path):
    result = run("list", "--cache", tmp_path / "none.zarr")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: there is no cache at")
    assert f"python -m maskgen build --config FILE --cache {tmp_path}/none.zarr" in result.stderr


def test_list(built, tmp_path):
    result = run("list", "--config", built)
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["name", *NAMES, "version"]
    listing = as_json("list", "--cache", tmp_path / "masks.zarr")
    assert [entry["name"] for entry in listing["entries"]] == NAMES
    assert as_json("list", "--config", built, "--version", listing["version"][:8]) == listing


def test_an_entry_of_an_unknown_family_does_not_hide_the_others(built, tmp_path):
    store = cache.open_store(str(tmp_path / "masks.zarr"), writable=True)
    known = store.version().entries[NAMES[0]]
    newer = cache.EntryData(name="newer/one", spec={"family": "of_tomorrow"})
    store.publish([cache.EntryData(name=known.name, spec=known.spec, attrs=known.attrs), newer])
    result = run("list", "--cache", tmp_path / "masks.zarr")
    assert result.exit_code == 0, result.output
    assert "newer/one" in result.stderr
    assert known.name in result.stdout
    (unreadable,) = [
        entry
        for entry in as_json("list", "--cache", tmp_path / "masks.zarr")["entries"]
        if "unreadable" in entry
    ]
    assert unreadable["name"] == "newer/one"


def test_the_default_cache_is_under_build(built, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "build/masks.zarr" in run("list").stderr
    (tmp_path / "build").mkdir()
    (tmp_path / "masks.zarr").rename(tmp_path / "build" / "masks.zarr")
    assert run("list").exit_code == 0


def test_show_draws_the_blocks(built, tmp_path):
    result = run("show", "causal/q64-kv64", "--config", built)
    assert result.exit_code == 0, result.output
    assert "static causal, revision 1" in result.stdout
    assert "full 6" in result.stdout
    assert result.stdout.splitlines()[-5:-1] == ["+...", "#+..", "##+.", "###+"]
    picture = tmp_path / "mask.png"
    result = run("show", "dflash/ctx64", "--config", built, "--layout", 3, "--png", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    known = as_json("show", "dflash/ctx64", "--config", built)
    assert known["spec"]["params"]["draws"] == 2
    assert known["attrs"]["N"] == 8


def test_show_without_text(built):
    result = run("show", "causal/q64-kv64", "--config", built, "--no-text")
    assert "#" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["causal/q64-kv65"], 1, "has no entry"),
        (["dflash/ctx64", "--layout", "999"], 2, "layout = 999: must be 0 to "),
        (["causal/q64-kv64", "--version", "ffff"], 1, "version"),
    ],
)
def test_show_of_what_is_not_there(built, arguments, exit_code, message):
    result = run("show", *arguments, "--config", built)
    assert result.exit_code == exit_code
    assert message in result.stderr


def test_report(built, tmp_path):
    page = tmp_path / "masks.html"
    result = run("report", page, "--config", built, "--heads", 4, "--head-dim", 64)
    assert result.exit_code == 0, result.output
    assert "<td>dflash/ctx64</td>" in page.read_text()


def test_verify_of_a_sound_cache(built):
    result = run("verify", "--config", built)
    assert result.exit_code == 0
    assert result.stdout.endswith("3 entries, digests: no difference\n")
    result = run("verify", "--deep", "--config", built)
    assert result.exit_code == 0, result.output
    assert "digests, formulas and rebuilt entries: no difference" in result.stdout
    assert as_json("verify", "--deep", "--config", built)["findings"] == []


def test_verify_and_list_name_each_digest_and_note_strangers(built, tmp_path):
    digests = as_json("verify", "--config", built)["entries"]
    listed = as_json("list", "--config", built)["entries"]
    assert digests == {row["name"]: row["sha256"] for row in listed}
    assert {len(digest) for digest in digests.values()} == {64}
    store = tmp_path / "masks.zarr"
    (store / "notes.txt").write_text("hello")
    result = run("verify", "--config", built)
    assert result.exit_code == 0
    assert f"Note: {store / 'notes.txt'} is no part of the cache" in result.stderr
    assert as_json("verify", "--config", built)["strangers"] == [str(store / "notes.txt")]


def test_verify_of_a_damaged_cache_exits_3_and_names_the_file(built, tmp_path):
    damage(tmp_path)
    result = run("verify", "--config", built)
    assert result.exit_code == 3
    assert str(tmp_path / "masks.zarr") in result.stdout
    assert run("show", NAMES[0], "--config", built).exit_code == 3
    assert run("report", tmp_path / "page.html", "--config", built).exit_code == 3
    found = json.loads(run("verify", "--deep", "--config", built, "--json").stdout)["findings"]
    assert {finding["entry"] for finding in found if "problem" in finding} == set(NAMES)


def test_deep_verification_finds_what_digests_cannot(built, tmp_path):
    # Sound digests, but the array is not what the spec says: another causal offset.
    store = cache.open_store(tmp_path / "masks.zarr", writable=True)
    entries = [store.load(name).to_data() for name in NAMES]
    wrong = entries[0].spans["ends"].copy()
    wrong[..., 5] += 1
    entries[0].spans["ends"] = wrong
    store.publish(entries)
    assert run("verify", "--config", built).exit_code == 0
    result = run("verify", "--deep", "--config", built)
    assert result.exit_code == 3
    assert "entry 'causal/q64-kv64': array ends is another one" in result.stdout
    assert "1 of the cells compared differ from the formula" in result.stdout


@pytest.mark.parametrize(
    ("change", "message", "outcome"),
    [
        ({"revision": 9}, "built with revision 9 of causal, installed is revision 1", 0),
        ({"family": "later"}, "family 'later' is not installed", 0),
        ({"family": "os:abort"}, "only imported with --run-functions", 0),
        ({"params": {"offset": "far"}}, "offset = 'far'", 3),
        ({"KV_LEN": 2**30}, "KV_LEN of 'causal/q64-kv64' = 1073741824: must be at most 2**26", 3),
    ],
)
def test_deep_verification_says_what_it_cannot_compare(built, tmp_path, change, message, outcome):
    store = cache.open_store(tmp_path / "masks.zarr", writable=True)
    data = store.load(NAMES[0]).to_data()
    data.spec.update(change)
    store.publish([data])
    result = run("verify", "--deep", "--cache", tmp_path / "masks.zarr")
    assert result.exit_code == outcome
    assert message in result.stdout
    counted = "1 difference" if outcome else "no difference, 1 not compared"
    assert result.stdout.endswith(f"{counted}\n")
    report = json.loads(
        run("verify", "--deep", "--json", "--cache", tmp_path / "masks.zarr").stdout
    )
    assert [len(report[key]) for key in ("findings", "not_compared")] == [
        bool(outcome),
        not outcome,
    ]


@pytest.mark.parametrize(
    ("entry", "exit_code", "messages"),
    [
        ("Q_LEN = 64\nwindow = 0", 2, ["masks.entry 'w': window = 0: must be at least 1"]),
        ("Q_LEN = 1048576\nwindow = 9", 2, ["blocks = 4294967296", "(in entry 'w/q1048576-"]),
    ],
)
def test_what_cannot_be_built_names_its_entry(config, tmp_path, entry, exit_code, messages):
    with (tmp_path / "run.toml").open("a") as file:
        file.write(f'\n[[masks.entry]]\nname = "w"\nfamily = "sliding_window"\n{entry}\n')
    result = run("build", config)
    assert result.exit_code == exit_code
    assert all(message in result.stderr for message in messages)


def test_deep_verification_runs_functions_when_it_may(tmp_path, monkeypatch):
    (tmp_path / "cli_masks.py").write_text("def lower(b, h, q, kv):\n    return q >= kv\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    config = tmp_path / "run.toml"
    config.write_text(
        f'[masks]\ncache = "{tmp_path}/masks.zarr"\n'
        '[[masks.entry]]\nname = "mine"\nmask_mod = "cli_masks:lower"\nQ_LEN = 40\n'
    )
    assert run("build", config).exit_code == 0
    unlooked = run("verify", "--deep", "--config", config)
    assert unlooked.exit_code == 0
    assert "no difference, 1 not compared" in unlooked.stdout
    assert run("verify", "--deep", "--run-functions", "--config", config).exit_code == 0
    sys.modules.pop("cli_masks")


def test_versions_use_diff_and_gc(built, tmp_path):
    first = as_json("versions", "--config", built)[0]["id"]
    file = tmp_path / "run.toml"
    file.write_text(
        file.read_text().replace("Q_LEN = 64", "Q_LEN = [64, 80]").replace("= 2", "= 3")
    )
    second = as_json("build", built)["version"]
    listed = as_json("versions", "--config", built)
    assert {info["id"]: info["is_current"] for info in listed} == {first: False, second: True}
    changes = as_json("diff", first[:8], second[:8], "--config", built)
    assert changes == {
        "added": ["causal/q80-kv80"],
        "removed": [],
        "changed": ["dflash/ctx32", "dflash/ctx64"],
    }
    shown = run("diff", first, second, "--config", built).stdout.splitlines()
    assert shown == ["added causal/q80-kv80", "changed dflash/ctx32", "changed dflash/ctx64"]
    assert run("diff", first, first, "--config", built).stdout == "no difference\n"
    result = run("use", first[:8], "--config", built)
    assert (result.exit_code, first[:16] in result.stdout) == (0, True)
    lines = run("versions", "--config", built).stdout.splitlines()
    assert [line.endswith("current") for line in lines if line.startswith(first[:16])] == [True]
    result = run("gc", "--keep", 1, "--config", built)
    assert (result.exit_code, "0 versions removed" in result.stdout) == (0, True)
    assert as_json("gc", "--config", built)["removed"] == []


def test_shipping_between_caches(built, tmp_path):
    first = as_json("versions", "--config", built)[0]["id"]
    packed = tmp_path / "masks.zip"
    assert "packed version" in run("pack", packed, "--config", built).stdout
    assert as_json("list", "--cache", packed)["version"] == first
    for verb, source, target in (
        ("unpack", packed, tmp_path / "a.zarr"),
        ("pull", f"file://{tmp_path}/masks.zarr", tmp_path / "b.zarr"),
    ):
        result = run(verb, source, "--cache", target)
        assert result.exit_code == 0, result.output
        assert as_json("list", "--cache", target)["version"] == first
    result = run("push", f"file://{tmp_path}/c.zarr", "--config", built, "--version", first[:8])
    assert result.exit_code == 0, result.output
    assert run("verify", "--deep", "--cache", tmp_path / "c.zarr").exit_code == 0


@pytest.mark.parametrize("delete", [True, False])
def test_build_after_damage_does_what_the_message_says(built, tmp_path, delete):
    damage(tmp_path)
    refused = run("verify", "--config", built)
    assert refused.exit_code == 3
    assert "Delete this version and pull, unpack or build it again" in refused.stdout
    if delete:
        for folder in (tmp_path / "masks.zarr").iterdir():
            if folder.is_dir():
                shutil.rmtree(folder)
    result = run("build", built)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.startswith("Warning: ")
    said = "holds no version" if delete else "the version that was built now replaces it"
    assert said in result.stderr
    assert "Warning" not in result.stdout
    assert run("verify", "--deep", "--config", built).exit_code == 0
    assert "Warning" not in run("build", built).stderr


@pytest.fixture
def packed(built, tmp_path):
    """A packed cache that holds every mask of the config."""
    file = tmp_path / "masks.zip"
    assert run("pack", file, "--config", built).exit_code == 0
    return file


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_build_on_a_packed_cache_that_holds_all_prints_its_table(built, packed, prefix):
    before = packed.read_bytes()
    result = run("build", built, "--cache", f"{prefix}{packed}")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("copied") == 3
    version = as_json("list", "--cache", packed)["version"]
    assert f"version {version[:16]} is current in {packed}" in result.stdout
    assert "is read-only and holds every mask of" in result.stderr
    assert as_json("build", built, "--cache", packed)["version"] == version
    assert packed.read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("Q_LEN = 64", "Q_LEN = 96", "causal/q96-kv96"),
        ("draws = 2", "draws = 3", "dflash/ctx32, dflash/ctx64"),
        ('name = "causal"', 'name = "lower"', "lower/q64-kv64"),
    ],
)
def test_a_packed_cache_is_not_written(built, packed, tmp_path, old, new, missing):
    file = tmp_path / "run.toml"
    file.write_text(file.read_text().replace(old, new, 1))
    result = run("build", built, "--cache", packed)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {packed} cannot be written")
    assert f"; it lacks {missing}, as the config has it" in result.stderr


def test_a_folder_of_another_name_is_not_written(config, tmp_path):
    result = run("build", config, "--cache", tmp_path / "masks")
    assert result.exit_code == 1
    assert "cannot be written: name a folder that ends in .zarr; no cache is" in result.stderr


def test_functions_are_not_evaluated_on_a_packed_cache_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "masks_of_cli.py").write_text("def mask(b, h, q, kv):\n    return q >= kv\n")
    config, packed = tmp_path / "run.toml", tmp_path / "masks.zip"
    entry = 'name = "mine"\nmask_mod = "masks_of_cli:mask"\nQ_LEN = 32\n'
    config.write_text(
        f'[masks]\ncache = "{tmp_path}/m.zarr"\nBLOCK_SIZE = 16\n[[masks.entry]]\n{entry}'
    )
    assert run("build", config).exit_code == 0
    assert run("pack", packed, "--config", config).exit_code == 0
    (tmp_path / "masks_of_cli.py").unlink()
    result = run("build", config, "--cache", packed)
    assert result.exit_code == 0, result.stderr
    assert "functions were not evaluated again: mine/q32-kv32" in result.stderr


def test_a_packed_cache_of_damaged_masks_is_refused(built, packed):
    """The zip's own checksum is not what is relied on."""
    content = packed.read_bytes()
    with zipfile.ZipFile(packed) as archive:
        (chunk,) = (i for i in archive.infolist() if i.filename.endswith("spans/c/0"))
        data = archive.read(chunk)
    flipped = data[:40] + bytes([data[40] ^ 1]) + data[41:]
    packed.write_bytes(content.replace(data, flipped))
    result = run("build", built, "--cache", packed)
    assert result.exit_code == 3
    assert "is damaged" in result.stderr


def test_a_read_only_cache_without_its_version_is_refused(built, tmp_path, monkeypatch):
    (version,) = (path for path in (tmp_path / "masks.zarr").iterdir() if path.is_dir())
    shutil.rmtree(version)

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("cache.atomic.tempfile.mkdtemp", refuse)
    result = run("build", built)
    assert result.exit_code == 1
    assert "Read-only file system" in result.stderr
    assert f"holds no version {version.name}" in result.stderr


def test_build_on_a_cache_without_write_permission(built, tmp_path, monkeypatch):
    """As root may write anywhere, the system's refusal is made here."""

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("cache.atomic.tempfile.mkdtemp", refuse)
    result = run("build", built)
    assert result.exit_code == 0, result.stderr
    assert "is read-only and holds every mask of" in result.stderr
    file = tmp_path / "run.toml"
    file.write_text(file.read_text().replace("Q_LEN = 64", "Q_LEN = 96"))
    result = run("build", built)
    assert result.exit_code == 1
    assert "Read-only file system" in result.stderr
    assert "it lacks causal/q96-kv96" in result.stderr


def test_a_full_disk_is_no_read_only_location(built, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("cache.atomic.tempfile.mkdtemp", refuse)
    result = run("build", built)
    assert result.exit_code == 1
    assert "No space left" in result.stderr


def test_plan_of_a_text_file(tmp_path):
    data = tmp_path / "lengths.txt"
    data.write_text("100 50\n\n120,50\n1000\n1000\n1000\n")
    result = run("plan", data, "--max-buckets", 2)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "context  samples  tokens  with padding  padding",
        "128          100   11000         12800    14.1%",
        "1024           3    3000          3072     2.3%",
        "all          103   14000         15872    11.8%",
        "context = [128, 1024]",
    ]
    chosen = as_json("plan", data, "--max-buckets", 1, "--multiple", 100)
    assert chosen["context"] == [1000]
    assert chosen["padding"] == pytest.approx(1 - 14000 / 103000)


def test_plan_of_prepared_data(tmp_path):
    import numpy as np
    from safetensors.numpy import save_file

    offsets = np.array([0, 100, 300, 310], dtype=np.int64)
    save_file({"offsets": offsets}, tmp_path / "train.safetensors")
    chosen = as_json("plan", tmp_path, "--max-buckets", 2, "--multiple", 10)
    assert chosen["context"] == [100, 200]
    assert [bucket["samples"] for bucket in chosen["buckets"]] == [2, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("12\nlong\n", "DATA line 2 = 'long'"),
        ("12 3 4\n", "a length, or a length and a count"),
        ("\n", "at least one length"),
        ("0\n", "lengths = 0: must be integers, 1 to"),
        ("5 99999999999\n", "more than 10000000 samples"),
        (b"\xff\xfe", "must be UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_plan_of_a_bad_file_exits_2(tmp_path, content, message):
    data = tmp_path / "lengths.txt"
    if content is not None:
        data.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = run("plan", data)
    assert result.exit_code == 2
    assert message in result.stderr


def test_plan_counts_the_samples_of_all_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("maskgen.lengths.MAX_SAMPLES", 10)
    data = tmp_path / "lengths.txt"
    data.write_text("5 4\n6 4\n7\n8\n")
    assert run("plan", data).exit_code == 0
    data.write_text("5 4\n6 4\n7\n8\n9\n")
    result = run("plan", data)
    assert result.exit_code == 2
    assert "DATA line 5 = '9': more than 10 samples" in result.stderr


def test_plan_of_a_folder_that_is_not_prepared(tmp_path):
    result = run("plan", tmp_path)
    assert (result.exit_code, "file of runtime.prepare" in result.stderr) == (2, True)


def test_sizes_and_columns_for_people():
    assert [human_bytes(n) for n in (0, 1023, 1024, 8_400_000, 5 << 40)] == [
        *("0 B", "1023 B", "1.0 KiB", "8.0 MiB", "5.0 TiB"),
    ]
    assert text_table(["name", "n"], [["a", "10"], ["long", "-"]]) == (
        "name   n\na     10\nlong   -"
    )
    assert text_table(["name"], []) == "name"
