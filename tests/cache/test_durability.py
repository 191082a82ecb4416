"""What is renamed into place is on the disk before, and its new name after: after a power cut a
reader finds the old state or the new one, never a name without its bytes."""

import os
import shutil
from pathlib import Path

import pytest
import torch

import cache
from cache import place
from maskgen.build import build
from maskgen.spec import read_specs
from maskgen.version_certificates import certify_version
from runtime.training.checkpoint import find_checkpoints, save_checkpoint
from tests.cache.samples import entries, published


class Disk:
    """Records in order which inodes are forced to the disk and what is renamed or linked."""

    def __init__(self, monkeypatch):
        self.synced = {}
        self.moves = []
        self.count = 0
        self._patch(monkeypatch)

    def _patch(self, monkeypatch):
        fsync = os.fsync

        def recorded(descriptor):
            fsync(descriptor)
            self.count += 1
            found = os.fstat(descriptor)
            self.synced[found.st_ino] = self.count, found.st_mtime_ns

        monkeypatch.setattr(os, "fsync", recorded)
        for name in ("rename", "replace", "link"):
            monkeypatch.setattr(os, name, self._recording(getattr(os, name)))

    def _recording(self, function):
        def move(source, target, *args, **kwargs):
            source, target = Path(source), Path(target)
            parts = [source, *source.rglob("*")] if source.is_dir() else [source]
            unsynced = [
                str(part.relative_to(source.parent))
                for part in parts
                if self.synced_at(part)[1] != part.stat().st_mtime_ns
            ]
            function(source, target, *args, **kwargs)
            self.count += 1
            # What is moved about within a staging folder is seen by nobody.
            if not any(part.startswith(".") for part in target.parts):
                self.moves.append((target, self.count, unsynced))

        return move

    def synced_at(self, path):
        """When, and how the file or folder was last changed before."""
        return self.synced.get(path.stat().st_ino, (0, 0))

    def check(self, *names):
        """All moves were of synced files, and the folders that they went into synced after.

        Args:
            names: Of the moves' targets, in order.
        """
        assert [target.name for target, _, _ in self.moves] == list(names)
        for target, at, unsynced in self.moves:
            assert unsynced == [], f"{target} was put into place before these were on the disk"
            assert self.synced_at(target.parent)[0] > at, target


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def test_a_publish(tmp_path, disk):
    store = published(tmp_path / "m.zarr")
    first = store.current
    store.publish(entries(2), make_current=False)
    newest = store.versions()[0].id
    store.use(newest)
    assert newest != first
    disk.check(first, "zarr.json", newest, "zarr.json")
    # The root of a store that has no current version yet.
    disk.moves.clear()
    cache.open_store(tmp_path / "new.zarr", writable=True).publish(entries(), make_current=False)
    disk.check(first, "zarr.json")


def test_pack_unpack_and_pull(tmp_path, disk):
    store = published(tmp_path / "m.zarr")
    disk.moves.clear()
    cache.pack(store, tmp_path / "m.zip")
    disk.check("m.zip")
    for name, bring in (("unpacked", cache.unpack), ("pulled", cache.pull)):
        disk.moves.clear()
        source = tmp_path / ("m.zip" if name == "unpacked" else "m.zarr")
        bring(str(source), tmp_path / f"{name}.zarr")
        disk.check(store.current, "zarr.json")


def test_a_pull_over_parts_that_were_left(tmp_path, disk):
    store = published(tmp_path / "m.zarr")
    part = tmp_path / f".n.zarr.tmp-pull-{store.current[:16]}-dead" / store.current
    shutil.copytree(tmp_path / "m.zarr" / store.current, part)
    disk.moves.clear()
    assert cache.pull(str(tmp_path / "m.zarr"), tmp_path / "n.zarr").kept == 2
    disk.check(store.current, "zarr.json")


def test_a_damaged_version_that_is_replaced(tmp_path, disk):
    store = published(tmp_path / "m.zarr")
    (tmp_path / "m.zarr" / store.current / "tables" / "c" / "0").unlink()
    disk.moves.clear()
    store.publish(entries(), on_damage=lambda error: None)
    # The root names it already.
    disk.check(store.current)


def test_a_store_that_is_a_mount_point(tmp_path, disk, monkeypatch):
    (tmp_path / "m.zarr").mkdir()
    monkeypatch.setattr(place, "_reaches", lambda staging, folder: folder in staging.parents)
    store = published(tmp_path / "m.zarr")
    disk.check(store.current, "zarr.json")


def test_a_sidecar(tmp_path, disk):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    masks = {"entry": [{"name": "a", "family": "causal", "Q_LEN": 32}], "BLOCK_SIZE": 16}
    build(read_specs({"masks": masks}), store)
    disk.moves.clear()
    certify_version(store, store.current)
    disk.check("certificate.json")


def test_a_gc_deletes_what_goes_once_its_new_name_is_on_the_disk(tmp_path, disk, monkeypatch):
    store = published(tmp_path / "m.zarr")
    old = store.current
    store.publish(entries(2))
    (tmp_path / "sidecars" / old).mkdir(parents=True)
    (tmp_path / "sidecars" / old / "certificate.json").write_bytes(b"{}")
    (tmp_path / ".m.zarr.tmp-dead").mkdir()
    (tmp_path / ".m.zarr.tmp-dead" / "half").write_bytes(b"x")
    moved, late = {}, []
    rename = os.rename

    def moving(source, target, *args, **kwargs):
        rename(source, target, *args, **kwargs)
        disk.count += 1
        if Path(target).parts[-1] != "probe":
            moved[Path(source).parent] = disk.count

    def deleting(path, *args, _unlink=os.unlink, **kwargs):
        if Path(path).name in ("0", "half", "certificate.json"):
            late.append({folder: disk.synced_at(folder)[0] > at for folder, at in moved.items()})
        return _unlink(path, *args, **kwargs)

    monkeypatch.setattr(os, "rename", moving)
    monkeypatch.setattr(os, "unlink", deleting)
    report = store.gc(1, min_age_s=-1)
    assert (report.removed, len(report.swept), len(late)) == ((old,), 2, 4)
    sidecars, there = tmp_path / "sidecars", tmp_path / "m.zarr"
    # The sidecar goes first; the version and the leftover once all was looked at.
    assert late[0][sidecars]
    for synced in late[1:]:
        assert synced[there]
        assert synced[tmp_path]


def test_a_checkpoint(tmp_path, disk):
    for step in (1, 2):
        save_checkpoint(
            tmp_path / "checkpoints",
            {"x": torch.ones(3)},
            step=step,
            fingerprint="f",
            published={},
            keep=5,
        )
    disk.check("step-00000001", "step-00000002")
    assert len(find_checkpoints(tmp_path / "checkpoints")) == 2
