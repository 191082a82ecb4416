"""What is done to a store in the drill, in a folder of its own each time, and what must hold after.

A case is a folder with a far cache (``far/m.zarr``, ``far/m.zip``) and a near one, ``near/m.zarr``,
that holds a current version, an old one, leftovers and sidecars; or no near one yet.
"""

import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import cache
from cache import chunk
from cache.errors import CacheError, StoreNotFoundError, StoreWriteError, VersionNotFoundError
from tests.cache.samples import entries, entry

AGE_S = 7200


def near(folder):
    return folder / "near" / "m.zarr"


def publish(folder):
    return cache.open_store(near(folder), writable=True).publish(entries(2, scale=50))


def replace(folder):
    """Publish what is there and damaged."""
    store = cache.open_store(near(folder), writable=True)
    return store.publish(entries(2, scale=60), on_damage=lambda error: None)


def pull(folder):
    return cache.pull(str(folder / "far" / "m.zarr"), near(folder)).version


def unpack(folder):
    return cache.unpack(folder / "far" / "m.zip", near(folder)).version


def use(folder):
    """Choose the old version."""
    store = cache.open_store(near(folder), writable=True)
    return store.use((folder / "old").read_text())


def gc(folder):
    cache.open_store(near(folder), writable=True).gc(keep=1)


def build(folder):
    from maskgen.build import build as build_masks
    from maskgen.spec import read_specs
    from maskgen.version_certificates import certify_version

    specs = read_specs(
        {
            "masks": {
                "BLOCK_SIZE": 16,
                "entry": [{"name": "causal", "family": "causal", "Q_LEN": [32, 64]}],
            }
        }
    )
    store = cache.open_store(near(folder), writable=True)
    version = build_masks(specs, store, make_current=False).version
    certify_version(store, version)
    return store.use(version)


ACTS = {act.__name__: act for act in (publish, replace, pull, unpack, use, gc, build)}
EMPTY = ("publish", "pull", "unpack", "build")
"""Those that work where there is no store yet."""


def template(folder: Path) -> None:
    """Make the case that all others are copies of."""
    with mock.patch.object(chunk, "MAX_CHUNK_VALUES", 24):
        far = cache.open_store(folder / "far" / "m.zarr", writable=True)
        wanted = far.publish(entries(3, scale=20))
        cache.pack(far, folder / "far" / "m.zip")
        store = cache.open_store(near(folder), writable=True)
        old = store.publish([entry(scale=7)])
        store.publish(entries(2, scale=60))
        damaged = store.current
        current = store.publish([entry(scale=8)])
    (near(folder) / damaged / "spans" / "c" / "0").write_bytes(b"torn")
    (folder / "old").write_text(old)
    (folder / "damaged").write_text(damaged)
    for version in (old, current):
        store.sidecar_dir(version).mkdir(parents=True)
        (store.sidecar_dir(version) / "certificate.json").write_text("{}")
    # A pull that was killed: a sound chunk, a torn one and one of another name.
    left = folder / "near" / f".m.zarr.tmp-pull-{wanted[:16]}-dead" / wanted / "spans" / "c"
    left.mkdir(parents=True)
    whole = (folder / "far" / "m.zarr" / wanted / "spans" / "c" / "0").read_bytes()
    (left / "0").write_bytes(whole)
    (left / "1").write_bytes(whole[:-3])
    (left / "0.4711.part").write_bytes(whole[:5])
    for path in (near(folder) / old, left.parents[2]):
        os.utime(path, (path.stat().st_mtime - AGE_S,) * 2)


def is_empty(folder: Path) -> bool:
    """Tell whether a case began without a near store."""
    return folder.name.startswith("empty")


def copy(made: Path, folder: Path) -> None:
    """Copy the template to a folder whose name begins with what it will be.

    ``full``, or ``empty`` without a near store; then nothing, ``-link`` (the near store is a link
    to another disk) or ``-mount`` (it is a mount point).
    """
    shutil.copytree(made, folder)
    if is_empty(folder):
        shutil.rmtree(folder / "near")
        (folder / "near").mkdir()
    if "-link" in folder.name:
        disk = Path(tempfile.mkdtemp(prefix="drill-"))
        if disk.stat().st_dev == folder.stat().st_dev:
            raise OSError(errno.EXDEV, "no second disk here")
        shutil.copytree(folder / "near", disk, dirs_exist_ok=True)
        shutil.rmtree(folder / "near")
        (folder / "near").mkdir()
        near(folder).symlink_to(disk / "m.zarr")
    elif "-mount" in folder.name:
        aside = folder / "aside.zarr"
        if not is_empty(folder):
            near(folder).rename(aside)
        near(folder).mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "drill", str(near(folder))]
        subprocess.run(mount, check=True, capture_output=True)
        if not is_empty(folder):
            shutil.copytree(aside, near(folder), dirs_exist_ok=True)


def drop(folder: Path) -> None:
    """Remove a case."""
    if near(folder).is_symlink():
        shutil.rmtree(near(folder).resolve().parent)
    if near(folder).is_mount():
        subprocess.run(["umount", str(near(folder))], check=True)
    shutil.rmtree(folder)


def outcome_of(error: BaseException | None, what: str) -> str:
    """``right``, ``refused`` where another one's work is the reason, or what is wrong."""
    if error is None:
        return "right"
    if isinstance(error, StoreWriteError) and "another gc, or a repair" in str(error):
        return "refused"
    if what == "use" and isinstance(error, VersionNotFoundError):
        return "refused"
    kind = "typed" if isinstance(error, CacheError) else "CRASH"
    return f"{kind} {type(error).__name__}: {error}"


def check(folder: Path, done: list[str | None]) -> str:
    """Say what does not hold of a case, or nothing.

    Args:
        folder: The case.
        done: What each act that succeeded returned: the version that it made current, if any.
    """
    damaged = (folder / "damaged").read_text()
    try:
        store = cache.open_store(near(folder))
    except StoreNotFoundError:
        return "SILENT lost" if done or not is_empty(folder) else ""
    try:
        known = {line.id for line in store.versions()}
        wrong = [found for found in store.verify() if found.version not in {damaged} - set(done)]
        if wrong:
            return f"SILENT damaged: {wrong[0].message}"
        if missing := {version for version in done if version} - known:
            return f"SILENT gone: {missing}"
        if store.current is None:
            return "" if is_empty(folder) and not any(done) else "SILENT no current version"
        store.load_all()
    except (CacheError, OSError) as error:
        return f"SILENT unreadable: {error}"
    return ""


def check_swept(folder: Path) -> str:
    """Sweep, then say what is left beside the store."""
    store = cache.open_store(near(folder), writable=True)
    report = store.gc(10**6, min_age_s=-1)
    beside = [*(folder / "near").iterdir(), *near(folder).resolve().parent.iterdir()]
    left = {path.name for path in beside} - {"m.zarr", "sidecars"}
    left |= set(store.strangers())
    return f"SILENT leftover {left} {report.left}" if left or report.left else ""
