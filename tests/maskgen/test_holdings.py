"""Several run files, one cache: a mask is found by what it is, in whichever version holds it."""

import json
import shutil

import pytest
from click.testing import CliRunner

import cache
from cache.errors import DamagedEntryError, NotListableError, VersionNotFoundError
from maskgen.build import build
from maskgen.cli import main
from maskgen.holdings import Copies, find_version
from maskgen.spec import read_specs
from maskgen.version_certificates import certificate_file

A = {"name": "a", "family": "causal", "Q_LEN": [48, 80]}
B = {"name": "b", "family": "sliding_window", "window": 9, "Q_LEN": [48]}
C = {"name": "c", "family": "full", "Q_LEN": [32]}


def specs_of(*entries):
    return read_specs({"masks": {"BLOCK_SIZE": 16, "entry": list(entries)}})


def digests(*entries):
    return [spec.digest for spec in specs_of(*entries)]


@pytest.fixture
def store(tmp_path):
    return cache.open_store(tmp_path / "m.zarr", writable=True)


def found(store, *entries):
    held = find_version(store, digests(*entries))
    return None if held is None else held[0].id


def test_what_one_run_file_built_is_there_after_another_built(store):
    first = build(specs_of(A), store).version
    second = build(specs_of(B), store).version
    assert store.current == second != first
    assert found(store, A) == first
    assert found(store, B) == second
    assert found(store, C) is None
    # They were never one version, so a run that needs both has none yet; the build copies both.
    assert found(store, A, B) is None
    both = build(specs_of(A, B), store)
    assert all(row.reused for row in both.rows)
    assert found(store, A, B) == both.version
    store.use(first)
    assert found(store, A) == first


def test_the_current_version_comes_first_and_then_the_newest(store):
    old = build(specs_of(A, C), store).version
    new = build(specs_of(A, B), store).version
    build(specs_of(C), store)
    assert found(store, A) == new
    store.use(old)
    assert found(store, A) == old


def test_a_mask_is_found_under_another_name(store):
    build(specs_of(A), store)
    build(specs_of(B), store)
    (renamed,) = specs_of({**A, "name": "other", "Q_LEN": [48]})
    version, infos = find_version(store, [renamed.digest])
    assert infos[renamed.digest].name == "a/q48-kv48"
    report = build([renamed], store)
    assert [row.reused for row in report.rows] == [True]
    assert list(store.version().entries) == ["other/q48-kv48"]
    assert version.id != report.version


def test_a_version_that_failed_its_checks_is_neither_found_nor_copied(store, tmp_path):
    bad = build(specs_of(A), store, make_current=False).version
    file = certificate_file(store, bad)
    file.parent.mkdir(parents=True)
    record = {"spec": digests(A)[0], "sha256": "0" * 64, "findings": ["cell 1 differs"]}
    file.write_text(json.dumps({"format": 2, "version": bad, "entries": [record]}))
    build(specs_of(B), store)
    assert found(store, A) is None
    assert Copies(store, lambda version, error: None).find(digests(A)[0]) is None
    assert not any(row.reused for row in build(specs_of(A, B), store).rows[:2])


def test_a_damaged_older_version_is_passed_over_and_a_damaged_current_one_is_told(store, tmp_path):
    first = build(specs_of(A), store).version
    second = build(specs_of(A, B), store).version
    third = build(specs_of(C), store).version
    (tmp_path / "m.zarr" / second / "zarr.json").write_text("{}")
    assert found(cache.open_store(tmp_path / "m.zarr"), A) == first
    said = []
    report = build(specs_of(A, B), cache.open_store(tmp_path / "m.zarr", True), notice=said.append)
    assert [row.reused for row in report.rows] == [True, True, False]
    assert any("nothing is copied from it" in line for line in said)
    store = cache.open_store(tmp_path / "m.zarr", True)
    store.use(third)
    (tmp_path / "m.zarr" / third / "zarr.json").write_text("{}")
    with pytest.raises(DamagedEntryError):
        find_version(cache.open_store(tmp_path / "m.zarr"), digests(A))
    shutil.rmtree(tmp_path / "m.zarr" / third)
    with pytest.raises(VersionNotFoundError):
        find_version(cache.open_store(tmp_path / "m.zarr"), digests(A))


def test_a_store_that_cannot_list_has_its_current_version(store, monkeypatch):
    build(specs_of(A), store)
    second = build(specs_of(B), store).version

    def refuse():
        raise NotListableError(store.location)

    monkeypatch.setattr(store.source, "version_ids", refuse)
    assert found(store, B) == second
    assert found(store, A) is None


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def two_files(tmp_path):
    for name, family in (("a", "causal"), ("b", "full")):
        (tmp_path / f"{name}.toml").write_text(
            f'[masks]\ncache = "{tmp_path}/m.zarr"\nBLOCK_SIZE = 16\n'
            f'[[masks.entry]]\nname = "{name}"\nfamily = "{family}"\nQ_LEN = 32\n'
        )
        assert run("build", "--config", tmp_path / f"{name}.toml").exit_code == 0
    return tmp_path


@pytest.mark.parametrize(("options", "name"), [(["--config", "a.toml"], "a"), ([], "b")])
def test_what_is_shipped_is_what_the_run_file_asks_for(two_files, monkeypatch, options, name):
    monkeypatch.chdir(two_files)
    place = ["--cache", "m.zarr", *options]
    assert run("pack", "m.zip", *place).exit_code == 0
    assert list(cache.open_store("m.zip").version().entries) == [f"{name}/q32-kv32"]
    url = f"memory://holdings-{name}/m.zarr"
    assert run("push", url, *place).exit_code == 0
    assert list(cache.open_store(url).version().entries) == [f"{name}/q32-kv32"]


def test_what_is_looked_at_is_what_the_run_file_asks_for(two_files, monkeypatch):
    monkeypatch.chdir(two_files)
    entry = {name: f"{name}/q32-kv32" for name in "ab"}
    for options, name in ((["--config", "a.toml"], "a"), (["--cache", "m.zarr"], "b")):
        for verb in ("list", "verify"):
            shown = json.loads(run(verb, "--json", *options).stdout)["entries"]
            assert entry[name] in str(shown)
            assert len(shown) == 1
        assert run("show", entry[name], *options).exit_code == 0
        assert run("report", "page.html", *options).exit_code == 0
        assert entry[name] in (two_files / "page.html").read_text()
    refused = run("verify", "--config", "a.toml", "--set", "masks.BLOCK_SIZE=32")
    assert refused.exit_code == 1
    assert "no version in" in refused.stderr


def test_what_is_pulled_is_what_the_run_file_asks_for(two_files, monkeypatch):
    monkeypatch.chdir(two_files)
    there = ["--config", "a.toml", "--cache", "there.zarr"]
    assert run("pull", f"file://{two_files}/m.zarr", *there).exit_code == 0
    assert list(cache.open_store("there.zarr").version().entries) == ["a/q32-kv32"]


def test_nothing_is_shipped_for_a_run_file_whose_masks_are_not_there(two_files, monkeypatch):
    monkeypatch.chdir(two_files)
    result = run("pack", "m.zip", "--config", "a.toml", "--set", "masks.BLOCK_SIZE=32")
    assert result.exit_code == 1
    assert "no version in" in result.stderr
    assert not (two_files / "m.zip").exists()


def test_pulled_versions_do_not_hide_each_other(two_files, monkeypatch):
    monkeypatch.chdir(two_files)
    for name in "ab":
        assert run("pack", f"{name}.zip", "--config", f"{name}.toml").exit_code == 0
        assert run("unpack", f"{name}.zip", "--cache", "there.zarr").exit_code == 0
    store = cache.open_store("there.zarr")
    for name in "ab":
        assert find_version(store, [s.digest for s in read_specs(f"{name}.toml")]) is not None
