"""Acts on a store: killed, torn, refused or held up at each file operation, and many at once.

The work is done in a process of its own that has one thread, so that it may fork. Each act runs in
a child; where a hook meets file operation number k it does what the mode says.
"""

import collections
import json
import os
import random
import select
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

from cache import chunk
from tests.cache.acts import ACTS, EMPTY, check, check_swept, copy, drop, outcome_of, template

_MADE = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_NO_LONGER_S = 5.0
"""How long one that was held up waits for another one, which may wait for its lock."""


def run(row, acts, others, number):
    """Run one of ``ROWS`` in a process of its own; return the outcomes and what was bad."""
    arguments = map(json.dumps, (list(acts), list(others), number))
    done = subprocess.run(
        [sys.executable, "-m", "tests.cache.crash", row, *arguments],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    counts, bad = json.loads(done.stdout)
    return collections.Counter(counts), bad


class Child:
    """An act in a process of its own.

    Args:
        act: Its name.
        folder: The case.
        mode: ``kill``, ``tear`` (as kill, with half of the file that is forced to the disk),
            ``fill`` (from here on the disk is full), ``pause``, or none.
        step: Number of the file operation.
        gate: A pipe's end; it begins when the other end is closed.
    """

    def __init__(self, act, folder, mode="", step=0, gate=None):
        self.act = act
        self.mode = mode
        self._paused, self._paused_in = os.pipe()
        self._go_out, self._go = os.pipe()
        self._said, said_in = os.pipe()
        self.process = os.fork()
        if self.process:
            for descriptor in (self._paused_in, self._go_out, said_in):
                os.close(descriptor)
            return
        try:
            for descriptor in (self._paused, self._go, self._said):
                os.close(descriptor)
            if gate is not None:
                os.close(gate[1])
                os.read(gate[0], 1)
            error, version = None, None
            hook = _Hook(mode, step, self._paused_in, self._go_out)
            try:
                version = ACTS[act](folder)
            except BaseException as caught:
                error = caught
            hook.is_on = False
            said = {"outcome": outcome_of(error, act), "version": version, "steps": hook.count}
            os.write(said_in, json.dumps(said).encode()[:4000])
        finally:
            os._exit(0)

    def is_held(self, seconds):
        """Wait until it is held up, or ended; tell which."""
        ready, _, _ = select.select([self._paused], [], [], seconds)
        return bool(ready) and os.read(self._paused, 1) == b"p"

    def go(self):
        # Written, since another child holds the pipe open, too.
        os.write(self._go, b"g")

    def wait(self):
        """Return what it said: nothing when it was killed."""
        with os.fdopen(self._said, "rb") as file:
            said = file.read()
        os.waitpid(self.process, 0)
        os.close(self._paused)
        os.close(self._go)
        return json.loads(said) if said else None


class _Hook:
    def __init__(self, mode, step, paused, go):
        self.mode, self.step, self.paused, self.go = mode, step, paused, go
        self.count = 0
        self.is_on = True
        fsync = os.fsync

        def synced(descriptor):
            self._at("fsync", descriptor)
            fsync(descriptor)

        os.fsync = synced
        sys.addaudithook(self._meet)

    def _meet(self, event, arguments):
        if event == "open":
            if arguments[2] & _MADE:
                self._at("make")
        elif event == "os.mkdir":
            self._at("make")
        elif event in ("os.rename", "os.link", "os.remove", "os.rmdir", "os.utime"):
            self._at(event)

    def _at(self, what, descriptor=None):
        tears = descriptor is not None and stat.S_ISREG(os.fstat(descriptor).st_mode)
        if not self.is_on or (self.mode == "tear" and not tears):
            return
        self.count += 1
        if self.count < self.step or not self.step:
            return
        if self.mode == "fill" and what in ("make", "fsync"):
            raise OSError(28, "No space left on device")
        if self.count > self.step:
            return
        if self.mode == "tear":
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
        if self.mode in ("kill", "tear"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "pause":
            os.write(self.paused, b"p")
            os.read(self.go, 1)


class Drill:
    """Cases of one row, each a copy of the template, and what became of them."""

    def __init__(self, scratch):
        self.scratch = Path(scratch)
        self.made = self.scratch / "template"
        self.made.mkdir()
        template(self.made)
        self.count = 0
        self.outcomes = collections.Counter()
        self.bad = []

    def case(self, start):
        self.count += 1
        folder = self.scratch / f"{start}{self.count}"
        copy(self.made, folder)
        return folder

    def judge(self, folder, said, again, what):
        """Count a case: what was said, what stands, and whether each act succeeds afterwards."""
        found = [each["outcome"] for each in said if each is not None]
        wrong = next((outcome for outcome in found if outcome not in ("right", "refused")), "")
        done = [each["version"] for each in said if each and each["outcome"] == "right"]
        if None not in said and not done and not wrong:
            wrong = "SILENT nobody succeeded"
        wrong = wrong or check(folder, done)
        for act in again:
            if not wrong:
                after = Child(act, folder).wait()
                done.append(after["version"])
                wrong = "" if after["outcome"] == "right" else f"again: {after['outcome']}"
                if act == "use" and after["outcome"] == "refused":
                    done.pop()
                    wrong = ""
                wrong = wrong or check(folder, done)
        wrong = wrong or (again and check_swept(folder)) or ""
        kind = wrong.split()[0] if wrong else "refused" if "refused" in found else "right"
        self.outcomes[kind if kind in ("right", "refused", "SILENT", "CRASH") else "CRASH"] += 1
        if wrong:
            self.bad.append(f"{what}: {wrong}"[:600])
        drop(folder)

    def steps(self, act, start, mode=""):
        """How many file operations an act takes."""
        folder = self.case(start)
        steps = Child(act, folder, mode).wait()["steps"]
        drop(folder)
        return steps

    def killed(self, act, start, mode, stride=1, beside=""):
        """Kill an act at each operation, let another one work meanwhile, then do it again."""
        for step in range(1, self.steps(act, start, mode) + 1, stride):
            folder = self.case(start)
            gate = os.pipe()
            names = [act, beside] if beside else [act]
            children = [
                Child(name, folder, mode if index == 0 else "", step, gate)
                for index, name in enumerate(names)
            ]
            for end in gate:
                os.close(end)
            said = [child.wait() for child in children]
            if mode == "fill" and said[0]["outcome"].startswith("typed StoreWriteError"):
                said[0] = None
            self.judge(folder, said, names, f"{mode} {act} at {step} ({start}) {beside}")

    def held_up(self, act, other, start, stride=1):
        """Hold an act up at each operation while another one works from beginning to end."""
        for step in range(1, self.steps(act, start) + 1, stride):
            folder = self.case(start)
            first = Child(act, folder, "pause", step)
            first.is_held(_NO_LONGER_S)
            second = Child(other, folder)
            # It may wait for a lock of the first one.
            select.select([second._said], [], [], 0.4)
            first.go()
            said = [second.wait(), first.wait()]
            self.judge(folder, said, [other, act], f"{act} held at {step}, {other} ({start})")

    def at_once(self, acts, start, rounds):
        """Let all work at once."""
        for _ in range(rounds):
            folder = self.case(start)
            gate = os.pipe()
            children = [Child(act, folder, gate=gate) for act in acts]
            for end in gate:
                os.close(end)
            said = [child.wait() for child in children]
            self.judge(folder, said, (), f"{acts} ({start})")


def _starts(act):
    return ("full", "empty") if act in EMPTY else ("full",)


def _every(drill, mode, acts, stride):
    for act in acts:
        for start in _starts(act):
            drill.killed(act, start, mode, stride)


def _beside(drill, acts, others, stride):
    for act in acts:
        for other in others or (act, "gc"):
            for start in set(_starts(act)) & set(_starts(other)):
                drill.killed(act, start, "kill", stride, other)


def _held(drill, acts, others, stride):
    for act in acts:
        for other in others:
            for start in set(_starts(act)) & set(_starts(other)):
                drill.held_up(act, other, start, stride)


def _together(drill, acts, _, rounds):
    for count in (2, 4, 8):
        for act in acts:
            for start in _starts(act):
                drill.at_once([act] * count, start, rounds)


def _mixed(drill, acts, _, rounds):
    rng = random.Random(0)
    for count in (2, 4, 8):
        for _ in range(rounds):
            chosen = [rng.choice(acts) for _ in range(count)]
            start = "empty" if all(act in EMPTY for act in chosen) else "full"
            drill.at_once(chosen, start, 1)


def _elsewhere(place):
    def row(drill, acts, _, stride):
        for act in acts:
            for start in _starts(act):
                drill.killed(act, start + place, "kill", stride)
                drill.killed(act, start + place, "fill", stride)
                drill.at_once([act, act], start + place, 2)

    return row


ROWS = {
    "kill -9 at each file operation": lambda drill, acts, _, n: _every(drill, "kill", acts, n),
    "kill -9 amid each file's write": lambda drill, acts, _, n: _every(drill, "tear", acts, n),
    "disk full from each operation on": lambda drill, acts, _, n: _every(drill, "fill", acts, n),
    "kill -9 with a second one at work": _beside,
    "held up at each, a second one works": _held,
    "2, 4 and 8 of a kind at once": _together,
    "2, 4 and 8 of mixed kinds at once": _mixed,
    "a link to another disk: killed, full, two": _elsewhere("-link"),
    "a mount point: killed, full, two": _elsewhere("-mount"),
}
"""What is done, and how: with a stride over file operations, or the number of rounds."""

STORE_ACTS = ("publish", "replace", "pull", "unpack", "use", "gc")
FULL = (
    ("kill -9 at each file operation", [*STORE_ACTS, "build"], [], 1),
    ("kill -9 amid each file's write", [*STORE_ACTS, "build"], [], 1),
    ("disk full from each operation on", [*STORE_ACTS, "build"], [], 1),
    ("kill -9 with a second one at work", [*STORE_ACTS, "build"], [], 2),
    ("held up at each, a second one works", STORE_ACTS, STORE_ACTS, 3),
    ("held up at each, a second one works", ["build"], ["build", "gc"], 4),
    ("2, 4 and 8 of a kind at once", [*STORE_ACTS, "build"], [], 10),
    ("2, 4 and 8 of mixed kinds at once", [*STORE_ACTS, "build"], [], 60),
    ("a link to another disk: killed, full, two", STORE_ACTS, [], 5),
    ("a mount point: killed, full, two", [*STORE_ACTS, "build"], [], 2),
)
"""The whole drill: row, acts, others, stride or rounds."""

QUICK = (
    ("kill -9 at each file operation", ["publish", "pull", "use", "gc"], [], 5),
    ("kill -9 amid each file's write", ["unpack"], [], 2),
    ("disk full from each operation on", ["replace", "pull", "gc"], [], 7),
    ("kill -9 with a second one at work", ["pull", "gc"], [], 9),
    ("held up at each, a second one works", ["publish", "pull"], ["pull", "gc"], 9),
    ("held up at each, a second one works", ["replace", "gc"], ["replace", "use"], 7),
    ("2, 4 and 8 of a kind at once", ["publish", "replace", "pull", "unpack"], [], 1),
    ("2, 4 and 8 of mixed kinds at once", STORE_ACTS, [], 2),
)
"""What the tests do of it."""


def main(row, acts, others, number):
    # In memory where that is possible: what a kill leaves does not depend on the disk.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(dir=memory) as scratch,
        mock.patch.object(chunk, "MAX_CHUNK_VALUES", 24),
    ):
        drill = Drill(scratch)
        if "build" in acts + others:
            import torch

            torch.set_num_threads(1)
        try:
            ROWS[row](drill, acts, others, number)
        except (OSError, subprocess.CalledProcessError) as error:
            if drill.outcomes:
                raise
            # No right to mount, or one disk only.
            drill.outcomes["untried"] += 1
            drill.bad.append(f"{row}: not tried: {error}")
        print(json.dumps([drill.outcomes, drill.bad]))


if __name__ == "__main__":
    main(sys.argv[1], *map(json.loads, sys.argv[2:]))
