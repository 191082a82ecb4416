"""The lock of a store: who has it, how long another one waits, and when it is free again."""

import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from cache import place
from cache.place import locked

pytestmark = pytest.mark.timeout(60)


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def is_locked(folder):
    """As another process sees it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def test_one_has_it_and_the_next_one_is_told(tmp_path):
    before = open_files()
    with locked(tmp_path) as first:
        assert first is True
        assert is_locked(tmp_path)
        with locked(tmp_path, 0) as second:
            assert second is False
        # Who did not get it does not free it.
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    with locked(tmp_path, 0) as third:
        assert third is True
    assert open_files() == before


def test_it_is_free_after_an_error(tmp_path):
    before = open_files()
    with pytest.raises(KeyboardInterrupt), locked(tmp_path):
        raise KeyboardInterrupt
    assert not is_locked(tmp_path)
    assert open_files() == before


def test_two_stores_have_two_locks(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with locked(tmp_path / "a"), locked(tmp_path / "b", 0) as other:
        assert other is True


@pytest.mark.parametrize("by_default", [True, False])
def test_it_is_waited_for_as_long_as_patience_lasts(tmp_path, monkeypatch, by_default):
    monkeypatch.setattr(place, "PATIENCE_S", 0.1 if by_default else 100)
    with locked(tmp_path):
        begun = time.monotonic()
        with locked(tmp_path, None if by_default else 0.1) as is_free:
            assert is_free is False
        assert 0.1 <= time.monotonic() - begun < 20
    monkeypatch.setattr(place, "PATIENCE_S", 30)
    begun, waiting = threading.Event(), threading.Event()

    def hold():
        with locked(tmp_path):
            begun.set()
            waiting.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait(20)
    sleep = time.sleep

    def slept(seconds):
        waiting.set()
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", slept)
    with locked(tmp_path, None if by_default else 30) as is_free:
        assert is_free is True
        assert is_locked(tmp_path)
    thread.join()


def test_a_writer_waits_ten_seconds():
    assert place.PATIENCE_S == 10


def test_what_cannot_be_locked_is_gone_on_with(tmp_path, monkeypatch):
    before = open_files()
    with locked(tmp_path / "absent") as is_free:
        assert is_free is True
    for number in (errno.ENOLCK, errno.ENOTSUP, errno.EACCES, errno.EBADF):

        def refuse(*_arguments, number=number):
            raise OSError(number, os.strerror(number))

        for owner, call in ((fcntl, "flock"), (os, "open")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, call, refuse)
                with locked(tmp_path, 30) as is_free:
                    assert is_free is True
    assert open_files() == before


def test_what_the_block_raises_is_not_taken_for_a_missing_lock(tmp_path):
    with pytest.raises(OSError, match="of the block"), locked(tmp_path):
        raise OSError(errno.EIO, "of the block")
