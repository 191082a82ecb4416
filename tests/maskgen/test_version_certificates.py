"""Sidecars: certificates are kept beside a version, taken over, and made again when spoilt."""

import errno
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

import cache
from cache.errors import StoreWriteError
from maskgen.build import build
from maskgen.spec import read_specs
from maskgen.version_certificates import certificate_file, certify_version, is_refuted

CAUSAL = {"name": "causal", "family": "causal", "Q_LEN": 100}
WINDOW = {"name": "window", "family": "sliding_window", "window": 30, "Q_LEN": 64}
DFLASH = {
    "name": "dflash",
    "family": "dflash",
    "kind": "layouts",
    "context": 64,
    "anchors": 8,
    "draft_block_size": 4,
    "draws": 2,
}


def specs_of(*entries):
    return read_specs({"masks": {"BLOCK_SIZE": 16, "entry": list(entries)}})


def test_certificates_are_kept_beside_the_version_and_taken_over(tmp_path):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    first = build(specs_of(CAUSAL, DFLASH), store).version
    seen = []
    made = certify_version(store, first, progress=lambda *args: seen.append(args))
    assert [c.name for c in made] == ["causal/q100-kv100", "dflash/ctx64"]
    assert seen[-1] == ("dflash/ctx64", 2, 2)
    content = json.loads(certificate_file(store, first).read_text())
    assert (content["format"], content["version"]) == (2, first)
    assert [record["name"] for record in content["entries"]] == [c.name for c in made]
    assert certificate_file(store, first) == tmp_path / "sidecars" / first / "certificate.json"
    assert certify_version(store, first) == []
    second = build(specs_of({**CAUSAL, "name": "lower"}, WINDOW), store, make_current=False).version
    assert [c.name for c in certify_version(store, second)] == ["window/q64-kv64"]
    records = json.loads(certificate_file(store, second).read_text())["entries"]
    assert [r["name"] for r in records] == ["lower/q100-kv100", "window/q64-kv64"]
    assert store.verify(first) == []


def test_certificates_that_an_earlier_release_wrote_are_read(tmp_path):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    first = build(specs_of(CAUSAL), store).version
    certify_version(store, first)
    (tmp_path / "sidecars").rename(tmp_path / "attest")
    assert certify_version(store, first) == []
    second = build(specs_of(CAUSAL, WINDOW), store, make_current=False).version
    assert [c.name for c in certify_version(store, second)] == ["window/q64-kv64"]
    assert certificate_file(store, second).parent.parent == tmp_path / "sidecars"


def test_a_certificate_that_is_made_again_stands_above_that_of_an_earlier_release(tmp_path):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    version = build(specs_of(CAUSAL), store).version
    certify_version(store, version)
    (tmp_path / "sidecars").rename(tmp_path / "attest")
    old = tmp_path / "attest" / version / "certificate.json"
    old.write_text(old.read_text().replace('"findings": []', '"findings": ["spans: wrong"]'))
    assert is_refuted(store, version)
    certify_version(store, version)
    assert not is_refuted(store, version)


def test_equal_arrays_of_another_spec_are_checked_with_its_own_formula(tmp_path):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    first = build(specs_of(CAUSAL), store).version
    certify_version(store, first)
    everything = {"name": "w", "family": "sliding_window", "window": 100, "Q_LEN": 100}
    second = build(specs_of(CAUSAL, everything), store, make_current=False).version
    same, other = (info.sha256 for info in store.version(second).entries.values())
    assert same == other
    assert [made.compared for made in certify_version(store, second)] == [
        "every cell, with the formula of sliding_window"
    ]


def test_each_parametric_entry_has_a_certificate_of_its_own(tmp_path):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    # Neither has arrays, so their digests are the same.
    entries = [
        {"name": name, "family": name, "kind": "parametric", "Q_LEN": 32}
        for name in ("document", "full")
    ]
    version = build(specs_of(*entries), store).version
    made = certify_version(store, version)
    assert [c.compared.split()[-1] for c in made] == ["document", "full"]


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b'{"format": 99, "entries": []}',
        b'{"format": 1, "entries": []}',
        b'{"format": 2, "entries": 3}',
        b'{"format": 2, "entries": [3, {}, {"spec": "x", "sha256": "x", "findings": ["wrong"]}]}',
        b'{"format": 2, "entries": [{"spec": 1, "sha256": "x", "findings": []}]}',
    ],
)
def test_a_spoilt_sidecar_is_made_again(tmp_path, content):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    version = build(specs_of(CAUSAL), store).version
    file = certificate_file(store, version)
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    assert len(certify_version(store, version)) == 1
    assert json.loads(file.read_text())["entries"][0]["name"] == "causal/q100-kv100"


def test_what_was_found_wrong_is_checked_again_and_not_taken_over(tmp_path):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    first = build(specs_of(CAUSAL), store).version
    certify_version(store, first)
    file = certificate_file(store, first)
    content = json.loads(file.read_text())
    content["entries"][0]["findings"] = ["spans: wrong"]
    file.write_text(json.dumps(content))
    # Another version with that entry, then the version itself: both are checked by the formula.
    second = build(specs_of(CAUSAL, WINDOW), store, make_current=False).version
    assert [c.findings for c in certify_version(store, second)] == [(), ()]
    certificate_file(store, second).unlink()
    assert [c.findings for c in certify_version(store, first)] == [()]
    assert json.loads(file.read_text())["entries"][0]["findings"] == []


def test_certificates_that_cannot_be_written_are_a_typed_error(tmp_path):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    version = build(specs_of(CAUSAL), store).version
    (tmp_path / "sidecars").write_text("a file where the folder should be")
    with pytest.raises(StoreWriteError, match=r"cannot write .*sidecars"):
        certify_version(store, version)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC])
def test_certificates_beside_a_mount_point_in_a_read_only_folder(tmp_path, monkeypatch, number):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    version = build(specs_of(CAUSAL), store).version
    told = []

    def refuse(*_arguments, **_options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", refuse)
    if number == errno.ENOSPC:
        with pytest.raises(StoreWriteError, match="No space left"):
            certify_version(store, version, notice=told.append)
        return
    (certificate,) = certify_version(store, version, notice=told.append)
    assert certificate.findings == ()
    (line,) = told
    assert os.strerror(number) in line
    assert line.endswith("; the certificates are not kept")


def test_what_is_kept_is_the_certificate_whole(tmp_path):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    version = build(specs_of(CAUSAL, {**WINDOW, "Q_LEN": 70}), store).version
    seen = []
    made = certify_version(store, version, progress=lambda *step: seen.append(step))
    assert seen == [("causal/q100-kv100", 1, 2), ("window/q70-kv70", 2, 2)]
    records = json.loads(certificate_file(store, version).read_text())["entries"]
    for record, certificate in zip(records, made, strict=True):
        wanted = asdict(certificate)
        for name in ("findings", "first_rows_without_key"):
            wanted[name] = list(wanted[name])
        assert record == wanted
    # Taken over whole, under the new name, and those that are taken over are counted as done.
    seen.clear()
    third = build(specs_of({**CAUSAL, "name": "lower"}, WINDOW), store, make_current=False).version
    certify_version(store, third, progress=lambda *step: seen.append(step))
    assert seen == [("lower/q100-kv100", 1, 2), ("window/q64-kv64", 2, 2)]
    (taken, _) = json.loads(certificate_file(store, third).read_text())["entries"]
    assert taken == {**records[0], "name": "lower/q100-kv100"}


def test_certificates_of_any_version_are_taken_over(tmp_path):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    for entry in (CAUSAL, WINDOW, DFLASH):
        assert len(certify_version(store, build(specs_of(entry), store).version)) == 1
    version = build(specs_of(CAUSAL, WINDOW, DFLASH), store).version
    assert certify_version(store, version) == []
    # Nothing was found out anew, so nothing is kept for it.
    assert not certificate_file(store, version).exists()


@pytest.mark.parametrize("wrong", [0, 1])
def test_one_wrong_entry_refutes_a_version(tmp_path, wrong):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    version = build(specs_of(CAUSAL, WINDOW), store).version
    assert not is_refuted(store, version)
    certify_version(store, version)
    assert not is_refuted(store, version)
    file = certificate_file(store, version)
    content = json.loads(file.read_text())
    content["entries"][wrong]["findings"] = ["spans: wrong"]
    file.write_text(json.dumps(content))
    assert is_refuted(store, version)
    # The one that was found right is taken over.
    names = ["causal/q100-kv100", "window/q64-kv64"]
    assert [made.name for made in certify_version(store, version)] == [names[wrong]]


def test_a_version_at_a_url_has_no_certificate_that_refutes_it(tmp_path):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    version = build(specs_of(CAUSAL), store).version
    cache.push(store, "memory://refuted/m.zarr")
    assert not is_refuted(cache.open_store("memory://refuted/m.zarr"), version)
