"""What a run leaves on the disk, killed, torn or refused at each file operation, and many at once.

The work is done in a process of its own that has one thread, so that it may fork. Each act runs in
a child, in a copy of the case; at file operation number k it is killed (``kill``), killed with half
of the file that it forces to the disk (``tear``), or refused by a full disk from then on
(``fill``). Then the case is checked, the act is done again, and the case is checked again.
"""

import collections
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError

from tests.runtime.crash_cases import CASES, WrongError

MODES = ("kill", "tear", "fill")
PAUSE_S = 0.5
"""In which another process does all of its act, unless it waits for a lock."""
MOST = 400
"""Operations of an act, at most."""
TYPED = 3
"""Exit code of an act that ended in an error of the runtime's own or of the system."""
EVENTS = ("os.rename", "os.mkdir", "os.link", "os.remove", "os.rmdir", "os.truncate")
MAKING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def run(jobs):
    """Do jobs in a process of its own.

    Args:
        jobs: (what, case, number): one of ``MODES``, ``beside`` (one is killed, another is not) or
            ``held`` (one is held up, another is not) at every so many-th operation, or
            ``together``, so many at once.

    Returns:
        Of each job its outcomes, its seconds, and what was bad.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.crash"],
        input=json.dumps(jobs),
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    for counts, seconds, bad in json.loads(done.stdout.splitlines()[-1]):
        yield collections.Counter(counts), seconds, bad


class _Hook:
    """Meets the file operations of this process; ``torn`` says what is left of a file's size."""

    def __init__(self, mode, step, torn, place):
        self.mode = mode
        self.torn = torn
        self.place = place
        self.left = step
        self._fsync, self._serialize = os.fsync, safetensors.torch.serialize_file
        os.fsync = self._synced
        safetensors.torch.serialize_file = self._serialized
        sys.addaudithook(self._meet)

    def _meet(self, event, arguments):
        is_making = event == "open" and isinstance(arguments[2], int) and arguments[2] & MAKING
        if is_making or event in EVENTS:
            self._at(event, None)

    def _synced(self, descriptor):
        self._at("fsync", descriptor)
        self._fsync(descriptor)

    def _serialized(self, tensors, path, **rest):
        def tear():
            self._serialize(tensors, path, **rest)
            os.truncate(path, Path(path).stat().st_size // 2)

        try:
            self._at("serialize", None, tear)
        except OSError as error:
            # As the library says it.
            raise SafetensorError(f"Error: No space left (os error {error.errno})") from None
        self._serialize(tensors, path, **rest)

    def _at(self, event, descriptor, tear=lambda: None):
        self.left -= 1
        if self.left >= 0 or (self.left < -1 and self.mode != "fill"):
            return
        if self.mode == "fill":
            if event not in ("os.remove", "os.rmdir", "os.rename", "os.truncate"):
                raise OSError(28, "No space left on device")
            return
        if self.mode == "pause":
            (self.place / "paused").touch()
            _await(PAUSE_S, self.place / "ended 1")
            return
        if self.mode == "tear":
            tear()
            path = Path(f"/proc/self/fd/{descriptor}")
            if path.is_file():
                os.truncate(path, self.torn(path.stat().st_size))
        os._exit(9)


def _start(case, folder, who=0, mode="", step=0, gate=None):
    """An act in a child of its own; the exit code tells how it ended."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        sys.stderr = io.StringIO()
        if gate is not None:
            os.close(gate[1])
            os.read(gate[0], 1)
        torn = getattr(case, "torn", lambda size: size // 2)
        if mode == "later":
            _await(60, folder.parent / "paused", folder.parent / "ended 0")
        hook = _Hook(mode, step, torn, folder.parent) if mode not in ("", "later") else None
        try:
            case.act(folder, who)
            # Fewer operations than that: all was done.
            code = 0 if hook is None or hook.left < 0 else 7
        except BaseException as error:
            if hook is not None:
                hook.left = MOST
            if isinstance(getattr(error, "exit_code", None), int) or isinstance(error, OSError):
                code = TYPED
            else:
                (folder.parent / "crash").write_text(repr(error))
        (folder.parent / f"ended {who}").touch()
    finally:
        os._exit(code)


def _await(seconds, *paths):
    until = time.monotonic() + seconds
    while not any(path.exists() for path in paths) and time.monotonic() < until:
        time.sleep(0.002)


def _wait(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class _Row:
    def __init__(self, scratch):
        self.scratch = scratch
        self.counts = collections.Counter()
        self.bad = []

    def fresh(self, name):
        folder = self.scratch / "case" / name
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.parent.mkdir()
        made = self.scratch / name
        if not made.exists():
            made.mkdir()
            CASES[name].make(made)
        shutil.copytree(made, folder, symlinks=True)
        return folder

    def judge(self, name, folder, what, codes):
        """Check a case, do its act once more, and check again."""
        case = CASES[name]
        outcome = "refused" if set(codes) == {TYPED} else "right"
        try:
            if not set(codes) <= {0, 9, TYPED, 7}:
                self.note("CRASH", f"{name} {what}: {(folder.parent / 'crash').read_text()}")
                return
            case.check(folder, codes)
            again = _wait(_start(case, folder))
            if again != 0:
                crash = folder.parent / "crash"
                said = crash.read_text() if crash.exists() else f"code {again}"
                self.note("CRASH", f"{name} {what}, again: {said}")
                return
            case.check_done(folder)
        except (WrongError, AssertionError) as error:
            self.note("SILENT", f"{name} {what}: {error}")
            return
        except Exception as error:
            self.note("CRASH", f"{name} {what}: {error!r}")
            return
        self.counts[outcome] += 1

    def note(self, outcome, line):
        self.counts[outcome] += 1
        self.bad.append(f"{outcome} {line}")

    def kill_at_each(self, name, mode, stride):
        for step in range(0, MOST, stride):
            folder = self.fresh(name)
            code = _wait(_start(CASES[name], folder, mode=mode, step=step))
            if code == 7:
                return
            self.judge(name, folder, f"{mode} at {step}", [code])
        self.note("CRASH", f"{name} {mode}: it does not end")

    def beside(self, name, mode, stride):
        for step in range(0, MOST, stride):
            folder = self.fresh(name)
            other = "later" if mode == "pause" else ""
            codes = self.at_once(name, folder, [(mode, step), (other, 0)])
            if codes[0] == 7:
                return
            self.judge(name, folder, f"{mode} at {step} beside another", codes)
        self.note("CRASH", f"{name} {mode} beside another: it does not end")

    def together(self, name, number):
        folder = self.fresh(name)
        codes = self.at_once(name, folder, [("", 0)] * number)
        self.judge(name, folder, f"{number} at once", codes)

    def at_once(self, name, folder, modes):
        gate = os.pipe()
        children = [
            _start(CASES[name], folder, who, mode, step, gate)
            for who, (mode, step) in enumerate(modes)
        ]
        os.close(gate[0])
        os.close(gate[1])
        return [_wait(child) for child in children]


def main(jobs):
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    found = []
    with tempfile.TemporaryDirectory(dir=memory) as scratch:
        for what, name, number in jobs:
            row = _Row(Path(scratch))
            start = time.perf_counter()
            if what in MODES:
                row.kill_at_each(name, what, number)
            elif what in ("beside", "held"):
                row.beside(name, {"beside": "kill", "held": "pause"}[what], number)
            else:
                row.together(name, number)
            found.append([row.counts, time.perf_counter() - start, row.bad])
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.load(sys.stdin))
