"""kill -9 at every file operation of a publish, and many publishers at once.

The work is done in a process of its own that has one thread, so that it may fork.
"""

import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import cache
from tests.cache.samples import entries

_OPERATIONS = {"open", "os.rename", "os.mkdir", "os.link", "os.remove", "os.rmdir", "shutil.rmtree"}


def kills(folder: Path, count: int) -> collections.Counter:
    """Kill ``count`` publishers and say what each left; even ones at a file operation."""
    return _in_process("kills", folder, count)


def writers(folder: Path, count: int) -> collections.Counter:
    """Let ``count`` processes publish at once and say what became of each."""
    return _in_process("writers", folder, count)


def _in_process(what, folder, count):
    done = subprocess.run(
        [sys.executable, "-m", "tests.cache.crash", what, str(folder), str(count)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    return collections.Counter(json.loads(done.stdout))


def _run_kills(folder: Path, count: int) -> collections.Counter:
    outcomes = collections.Counter()
    rng = random.Random(0)
    location = folder / "m.zarr"
    folder.mkdir()
    old = None
    for index in range(count):
        made = entries(3, scale=10 + index)
        child = os.fork()
        if child == 0:
            if index % 2 == 0:
                _kill_self_at(index // 2)
            with contextlib.suppress(BaseException):
                cache.open_store(location, writable=True).publish(made)
            os._exit(0)
        if index % 2:
            time.sleep(rng.uniform(0, 0.02))
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        outcome, old = _state(location, old, made)
        outcomes[outcome] += 1
    return outcomes


def _kill_self_at(step: int) -> None:
    left = step

    def hook(event, _arguments):
        nonlocal left
        if event in _OPERATIONS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def _state(location, old, made):
    """Check that the old version or the new one is current, whole, and that gc cleans up."""
    try:
        store = cache.open_store(location)
    except cache.errors.StoreNotFoundError:
        if old is not None:
            return "SILENT lost", old
        store = cache.open_store(location, writable=True)
    else:
        scales = {entry.name: entry.spans["starts"] for entry in made}
        if store.current != old and any(
            (store.load(name).arrays["starts"] != values).any() for name, values in scales.items()
        ):
            return "SILENT mixed", old
        if store.verify() != []:
            return "SILENT damaged", old
        old = store.current
        store = cache.open_store(location, writable=True)
    if location.exists():
        store.gc(10**6, min_age_s=0)
        if list(location.parent.iterdir()) != [location]:
            return "SILENT leftover", old
    return "right", old


def _run_writers(folder: Path, count: int) -> collections.Counter:
    folder.mkdir()
    location = folder / "m.zarr"
    start_out, start_in = os.pipe()
    children = []
    for index in range(count):
        child = os.fork()
        if child == 0:
            os.close(start_in)
            os.read(start_out, 1)
            code = 1
            with contextlib.suppress(BaseException):
                # Every second pair publishes the same content.
                made = entries(3, scale=100 + index // 2)
                cache.open_store(location, writable=True).publish(made)
                code = 0
            os._exit(code)
        children.append(child)
    os.close(start_out)
    os.close(start_in)
    codes = [os.waitpid(child, 0)[1] for child in children]
    outcomes = collections.Counter()
    store = cache.open_store(location)
    ids = {line.id for line in store.versions()}
    whole = (
        len(ids) == (count + 1) // 2
        and store.current in ids
        and store.verify() == []
        and list(folder.iterdir()) == [location]
    )
    for code in codes:
        outcomes["right" if code == 0 and whole else "SILENT"] += 1
    return outcomes


if __name__ == "__main__":
    run = {"kills": _run_kills, "writers": _run_writers}[sys.argv[1]]
    print(json.dumps(run(Path(sys.argv[2]), int(sys.argv[3]))))
