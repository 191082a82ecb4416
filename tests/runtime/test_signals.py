"""Signals while steps run, and outside of them: in the main thread, and off it."""

import contextlib
import signal
import threading

import pytest

from runtime.signals import exiting_on_signals, handling, stop_on_signals

BOTH = (signal.SIGINT, signal.SIGTERM)
ALL = (*BOTH, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def handlers():
    before = [signal.getsignal(number) for number in ALL]
    yield
    assert [signal.getsignal(number) for number in ALL] == before


@pytest.mark.parametrize("first", BOTH)
def test_the_first_signal_asks_for_a_stop_and_ctrl_c_after_it_interrupts(first):
    asked = []
    with stop_on_signals(asked.append, print):
        signal.raise_signal(first)
        assert asked == [first]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert asked == [first]


def test_where_a_launcher_passes_ctrl_c_on_each_one_asks_for_a_stop():
    asked = []
    with stop_on_signals(asked.append, print, interruptible=False):
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
    assert asked == [signal.SIGINT, signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("interruptible", [True, False])
def test_usr1_asks_for_a_save_each_time_and_for_nothing_else(interruptible):
    stops, saves = [], []
    with stop_on_signals(stops.append, lambda: saves.append(1), interruptible=interruptible):
        for _ in range(3):
            signal.raise_signal(signal.SIGUSR1)
        assert (stops, len(saves)) == ([], 3)
        signal.raise_signal(signal.SIGINT)
    assert (stops, len(saves)) == ([signal.SIGINT], 3)


def test_usr1_outside_of_the_steps_is_noted_and_ends_nothing(capfd):
    with exiting_on_signals():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
    lines = capfd.readouterr().err.splitlines()
    assert lines == ["SIGUSR1: no steps run now, so there is nothing to save; going on"] * 2


@pytest.mark.parametrize("guard", [lambda: stop_on_signals(print, print), exiting_on_signals])
def test_off_the_main_thread_handlers_stay_as_they_are(guard):
    found = []

    def work():
        try:
            with guard():
                found.append([signal.getsignal(number) for number in ALL])
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert found == [[signal.getsignal(number) for number in ALL]]


def test_what_a_thread_waits_for_is_broken_off_by_usr1_alone_not(monkeypatch):
    told = []
    monkeypatch.setattr(signal, "siginterrupt", lambda *how: told.append(how))
    with stop_on_signals(print, print):
        assert told == [(signal.SIGUSR1, False)]
    with handling({signal.SIGINT: print}):
        pass
    assert told == [(signal.SIGUSR1, False)]


def test_handlers_come_back_where_the_block_fails():
    before = signal.getsignal(signal.SIGTERM)
    handlers = {signal.SIGTERM: print, signal.SIGINT: print}
    with contextlib.suppress(ZeroDivisionError), handling(handlers):
        assert signal.getsignal(signal.SIGTERM) is print
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_is_handed_on_as_what_it_is():
    asked = []
    with stop_on_signals(asked.append, print):
        signal.raise_signal(signal.SIGTERM)
    (number,) = asked
    assert isinstance(number, signal.Signals)
    assert number.name == "SIGTERM"
