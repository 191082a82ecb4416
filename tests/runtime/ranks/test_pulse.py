"""Signs of life: of threads over one store, and of real processes that are stopped or killed."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch import distributed

from runtime.ranks import pulse as pulse_module
from runtime.ranks.awake import wait_until
from runtime.ranks.pulse import LEFT, Pulse

ROOT = Path(__file__).parents[3]
LIMIT_S = 60.0


@pytest.fixture
def quick(monkeypatch):
    """Beats and time-outs of a fraction of a second."""
    monkeypatch.setattr(pulse_module, "BEAT_S", 0.02)
    monkeypatch.setattr(pulse_module, "SILENCE_S", 0.5)


@pytest.fixture
def started(quick):
    """Starts pulses, and ends them."""
    pulses = []

    def start(store, rank, size):
        pulses.append(Pulse(store, rank, size))
        pulses[-1].start()
        return pulses[-1]

    yield start
    for pulse in pulses:
        pulse.end()


def elsewhere(monkeypatch):
    """Let processes be of hosts that do not see each other."""
    monkeypatch.setattr(pulse_module, "_processes_seen", lambda: "")


def test_a_process_on_another_host_that_falls_silent_is_found_by_the_one_before_it(
    started, monkeypatch
):
    elsewhere(monkeypatch)
    store = distributed.HashStore()
    pulses = [started(store, rank, 3) for rank in range(3)]
    assert not wait_until(lambda: any(pulse.lost for pulse in pulses), 1.5)
    pulses[2]._ended.set()
    assert wait_until(lambda: pulses[1].lost is not None, LIMIT_S)
    assert str(pulses[1].lost) == (
        "process 2 has given no sign of life for 0 s; it is dead or its host is unreachable"
    )
    assert pulses[0].lost is None


def test_a_process_that_never_gave_a_sign_is_found(started):
    pulse = started(distributed.HashStore(), 0, 2)
    assert wait_until(lambda: pulse.lost is not None, LIMIT_S)


def test_a_process_that_is_through_is_not_missed(started):
    store = distributed.HashStore()
    first, second = (started(store, rank, 2) for rank in range(2))
    second.end()
    assert store.get("beat/1") == LEFT.encode()
    assert not wait_until(lambda: first.lost is not None, 1.5)


def test_a_store_that_is_gone_is_told_in_one_line(quick):
    class Gone:
        def clone(self):
            return self

        def set(self, key, value):
            raise distributed.DistNetworkError("connection reset\nException raised from recv\n#0")

    pulse = Pulse(Gone(), 0, 2)
    pulse.start()
    pulse.end()
    assert str(pulse.lost) == "lost touch with the other processes: connection reset"


CHILD = """
import datetime, sys, time
from torch import distributed
from runtime.ranks import pulse
pulse.BEAT_S = 0.02
store = distributed.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, wait_for_workers=False)
pulse.Pulse(store, 1, 2).start()
print("beating", flush=True)
time.sleep(600)
"""


@pytest.fixture
def child():
    """A process that beats as rank 1 of 2, and the store."""
    store = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(store.port)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout.readline() == "beating\n"
        yield process, store
        process.kill()


def test_a_stopped_process_is_waited_for_and_a_killed_one_is_not(child, started, monkeypatch):
    process, store = child
    pulse = started(store, 0, 2)
    assert wait_until(lambda: store.check(["beat/1"]), LIMIT_S)
    process.send_signal(signal.SIGSTOP)
    # Three times the time-out.
    assert not wait_until(lambda: pulse.lost is not None, 1.5)
    process.send_signal(signal.SIGCONT)
    assert not wait_until(lambda: pulse.lost is not None, 0.5)
    # However long the time-out is.
    monkeypatch.setattr(pulse_module, "SILENCE_S", 1e6)
    process.kill()
    assert wait_until(lambda: pulse.lost is not None, LIMIT_S)
    assert str(pulse.lost) == f"process 1 (pid {process.pid}) was killed"


def test_a_stopped_process_of_another_host_is_silent(child, started, monkeypatch):
    process, store = child
    elsewhere(monkeypatch)
    pulse = started(store, 0, 2)
    assert wait_until(lambda: store.check(["beat/1"]), LIMIT_S)
    process.send_signal(signal.SIGSTOP)
    assert wait_until(lambda: pulse.lost is not None, LIMIT_S)
    assert "has given no sign of life" in str(pulse.lost)


def test_signs_go_on_while_the_main_thread_is_busy(started):
    store = distributed.HashStore()
    first, _ = (started(store, rank, 2) for rank in range(2))
    until = threading.Event()
    threading.Timer(1.0, until.set).start()
    while not until.is_set():
        sum(range(10_000))
    assert first.lost is None


def test_an_end_is_told_though_the_store_is_gone(started):
    store = distributed.HashStore()
    pulse = started(store, 0, 2)
    assert wait_until(lambda: store.check(["beat/0"]), LIMIT_S)
    pulse.end()
    assert not pulse.is_alive()
    assert pulse.daemon
    assert store.get("beat/0") == LEFT.encode()
    pulse.end()
