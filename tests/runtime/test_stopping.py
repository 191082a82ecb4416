"""Signals while steps run, and outside of them: in the main thread, and off it."""

import signal
import threading

import pytest

from runtime.leaving import exiting_on_signals
from runtime.stopping import stop_on_signals

BOTH = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers():
    before = [signal.getsignal(number) for number in BOTH]
    yield
    assert [signal.getsignal(number) for number in BOTH] == before


@pytest.mark.parametrize("first", BOTH)
def test_the_first_signal_asks_for_a_stop_and_ctrl_c_after_it_interrupts(first):
    asked = []
    with stop_on_signals(asked.append):
        signal.raise_signal(first)
        assert asked == [first]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert asked == [first]


def test_where_a_launcher_passes_ctrl_c_on_each_one_asks_for_a_stop():
    asked = []
    with stop_on_signals(asked.append, interruptible=False):
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
    assert asked == [signal.SIGINT, signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("guard", [lambda: stop_on_signals(print), exiting_on_signals])
def test_off_the_main_thread_handlers_stay_as_they_are(guard):
    found = []

    def work():
        try:
            with guard():
                found.append([signal.getsignal(number) for number in BOTH])
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert found == [[signal.getsignal(number) for number in BOTH]]
