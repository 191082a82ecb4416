"""What is renamed into place is on the disk before, and its new name after: after a power cut a
reader finds the old state or the new one, never a name without its bytes."""

import os
from pathlib import Path

import pytest
import torch

import cache
from runtime.checkpoint import find_checkpoints, save_checkpoint
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


def test_a_checkpoint(tmp_path, disk):
    for step in (1, 2):
        save_checkpoint(
            tmp_path / "checkpoints",
            {"x": torch.ones(3)},
            step=step,
            fingerprint="f",
            drafter={},
            keep=5,
        )
    disk.check("step-00000001", "step-00000002")
    assert len(find_checkpoints(tmp_path / "checkpoints")) == 2
