"""Who is taken for dead, and when: looks of one thread at a time that the test moves."""

import os
import subprocess
from pathlib import Path

import pytest

from runtime.ranks import pulse as pulse_module
from runtime.ranks.pulse import LEFT, Pulse


class Still:
    """A store in one thread, and the time that a test moves."""

    def __init__(self):
        self.keys = {}

    def clone(self):
        return self

    def set(self, key, value):
        self.keys[key] = value.encode()

    def get(self, key):
        return self.keys[key]

    def check(self, keys):
        return all(key in self.keys for key in keys)


@pytest.fixture
def moved(monkeypatch):
    """Moves the time."""
    now = [100.0]
    monkeypatch.setattr("runtime.ranks.awake.time.monotonic", lambda: now[0])

    def move(seconds):
        now[0] += seconds

    return move


def lost_after(pulse, seconds, move):
    """Look every second; returns after how many it was lost."""
    for second in range(1, seconds + 1):
        move(1.0)
        pulse._watch()
        if pulse.lost is not None:
            return second
    return None


def test_silence_is_counted_from_the_last_sign_on(moved):
    store = Still()
    pulse = Pulse(store, 1, 3)
    store.set("beat/2", "1  77")
    assert lost_after(pulse, 50, moved) is None
    store.set("beat/2", "2  77")
    # One look sees the sign, and 60 more are not too many.
    assert lost_after(pulse, 61, moved) is None
    assert lost_after(pulse, 1, moved) == 1
    assert str(pulse.lost) == (
        "process 2 has given no sign of life for 60 s; it is dead or its host is unreachable"
    )


def test_time_in_which_this_process_was_stopped_is_no_silence(moved):
    store = Still()
    pulse = Pulse(store, 0, 2)
    store.set("beat/1", "1  77")
    pulse._watch()
    for _ in range(29):
        moved(3600.0)
        pulse._watch()
    assert pulse.lost is None, "29 looks of 2 s at most"
    for _ in range(2):
        moved(3600.0)
        pulse._watch()
    assert pulse.lost is not None


@pytest.mark.parametrize(("size", "following"), [(1, [0]), (2, [1, 0]), (4, [1, 2, 3, 0])])
def test_each_watches_the_next_and_the_last_the_first(moved, size, following):
    store = Still()
    for rank in range(size):
        pulse = Pulse(store, rank, size)
        lost_after(pulse, 61, moved)
        assert str(pulse.lost).startswith(f"process {following[rank]} has given no sign")


@pytest.mark.parametrize(
    ("state", "fate"),
    [("T", None), ("t", None), ("Z", 2), ("X", 2), ("none", 2), ("R", 61), ("S", 61), ("D", 61)],
)
def test_what_the_system_says_of_a_silent_process(moved, monkeypatch, state, fate):
    monkeypatch.setattr(pulse_module, "_state", lambda beat: state)
    store = Still()
    store.set("beat/1", "5 boot/pid:[1] 4711")
    pulse = Pulse(store, 0, 2)
    found = lost_after(pulse, 200, moved)
    # The first look sees a sign.
    assert found == (fate if fate in (None, 2) else 62)
    if fate == 2:
        assert str(pulse.lost) == "process 1 (pid 4711) was killed"


def test_one_that_said_that_it_leaves_as_it_ended_is_not_missed(moved, monkeypatch):
    """Its last sign may come between two looks."""
    store = Still()
    store.set("beat/1", "5 boot/pid:[1] 4711")
    pulse = Pulse(store, 0, 2)
    pulse._watch()

    def ended(beat):
        store.set("beat/1", LEFT)
        return "none"

    monkeypatch.setattr(pulse_module, "_state", ended)
    assert lost_after(pulse, 200, moved) is None


def test_a_sign_says_its_count_its_host_and_its_process():
    store = Still()
    pulse = Pulse(store, 3, 4)
    for count in (1, 2):
        pulse._beat()
        number, seen, pid = store.get("beat/3").decode().split(" ")
        assert (number, pid) == (str(count), str(os.getpid()))
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert seen == f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    assert pulse_module._state(store.get("beat/3").decode()) in ("R", "S", "D")
    # Of another host, or another container, the number says nothing.
    for beat in (f"1 {seen}x {pid}", f"1  {pid}", "", LEFT, f"1 {boot}/pid:[1] {pid}"):
        assert pulse_module._state(beat) == ""
    assert pulse_module._state(f"1 {seen} 999999999") == "none"


def test_a_process_whose_name_has_brackets_and_blanks_is_read(tmp_path):
    program = tmp_path / "a) T (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as process:
        state = pulse_module._state(f"1 {pulse_module._processes_seen()} {process.pid}")
        process.kill()
    assert state in ("R", "S", "D")
