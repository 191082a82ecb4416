"""One process at a time in a folder: who waits, for how long, and what is left."""

import contextlib
import errno
import fcntl
import os
import threading
from pathlib import Path

import pytest

from runtime.files.lock import ATTEMPTS, folder_lock


def is_free(folder):
    """Whether another open file of the folder gets the lock at once."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_the_lock_is_exclusive_and_ends_with_the_block(tmp_path):
    before = open_files()
    folder = tmp_path / "a" / "b"
    with folder_lock(folder) as is_locked:
        assert is_locked
        assert not is_free(folder)
    assert is_free(folder)
    with contextlib.suppress(ZeroDivisionError), folder_lock(folder):
        raise ZeroDivisionError
    assert is_free(folder)
    assert list(folder.iterdir()) == []
    assert open_files() == before


def test_a_second_one_waits_until_the_first_is_through(tmp_path):
    entered = threading.Event()

    def second():
        with folder_lock(tmp_path) as is_locked:
            assert is_locked
            entered.set()

    thread = threading.Thread(target=second, daemon=True)
    with folder_lock(tmp_path):
        thread.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    thread.join()


def test_readers_exclude_each_other_too(tmp_path):
    """A shared lock would let two writers in."""
    held = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(held, fcntl.LOCK_SH)
    entered = threading.Event()

    def enter():
        with folder_lock(tmp_path):
            entered.set()

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    assert not entered.wait(0.2)
    os.close(held)
    assert entered.wait(10)
    thread.join()


def test_of_a_link_that_leads_nowhere_what_it_names_is_made(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk" / "data")
    with folder_lock(link) as is_locked:
        assert is_locked
        assert not is_free(tmp_path / "disk" / "data")
    assert link.is_symlink()


def test_a_file_system_without_locks_is_worked_on_and_told(tmp_path, monkeypatch):
    def refuse(*_arguments):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with folder_lock(tmp_path / "data") as is_locked:
        assert is_locked is False
        assert (tmp_path / "data").is_dir()


@pytest.mark.parametrize("again", [False, True])
def test_a_folder_that_its_holder_removed_is_made_and_locked_anew(tmp_path, monkeypatch, again):
    """``again``: another made one in its place, whose lock is what counts."""
    folder, flock, calls = tmp_path / "data", fcntl.flock, []

    def flock_late(descriptor, kind):
        calls.append(kind)
        if len(calls) == 1:
            folder.rename(tmp_path / "removed")
            if again:
                folder.mkdir()
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    before = open_files()
    with folder_lock(folder) as is_locked:
        monkeypatch.undo()
        assert is_locked
        assert not is_free(folder)
        assert is_free(tmp_path / "removed"), "what was taken first is let go"
    assert len(calls) == 2
    assert open_files() == before


def test_a_folder_that_never_stays_is_given_up(tmp_path, monkeypatch):
    folder, removed = tmp_path / "data", []

    def remove(*_arguments):
        folder.rmdir()
        removed.append(1)

    monkeypatch.setattr(fcntl, "flock", remove)
    before = open_files()
    with pytest.raises(FileNotFoundError, match="removed again and again") as caught:
        folder_lock(folder).__enter__()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(folder))
    assert len(removed) == ATTEMPTS
    assert open_files() == before


def test_what_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="File exists"):
        folder_lock(tmp_path / "file").__enter__()
    with pytest.raises(NotADirectoryError):
        folder_lock(tmp_path / "file" / "data").__enter__()
