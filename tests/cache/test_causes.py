"""File systems that cannot or may not: what still works, what stands, and what is advised."""

import errno
import os
from pathlib import Path

import pytest

import cache
from cache.causes import naming
from cache.errors import StoreReadError, StoreWriteError
from tests.cache.samples import entries, published


@pytest.fixture
def store(tmp_path):
    return published(tmp_path / "m.zarr")


def refuse(monkeypatch, call, number):
    """Let the system refuse a call."""

    def refused(*_arguments, **_options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(call, refused)


@pytest.mark.parametrize("make_current", [True, False])
def test_a_file_system_without_links_and_locks_is_published_to(tmp_path, monkeypatch, make_current):
    refuse(monkeypatch, "os.link", errno.EPERM)
    refuse(monkeypatch, "fcntl.flock", errno.ENOLCK)
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    first = store.publish(entries(2), make_current=make_current)
    assert cache.open_store(store.location).current == (first if make_current else None)
    second = store.publish(entries(2, scale=2))
    assert cache.open_store(store.location).verify() == []
    assert store.gc(keep=1, min_age_s=0).removed == (first,)
    assert cache.open_store(store.location).current == second


@pytest.mark.parametrize("publishes", [True, False])
def test_a_write_that_fails_says_what_stands(store, tmp_path, monkeypatch, publishes):
    first = store.current
    second = store.publish(entries(2, scale=5), make_current=False)
    before = cache.open_store(store.location).current

    def act():
        if publishes:
            return store.publish(entries(2, scale=7))
        return store.use(second)

    replace = Path.replace

    def full(path, target):
        if Path(target).name == "zarr.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StoreWriteError, match="make room or choose another folder") as caught:
        act()
    versions = {line.id for line in cache.open_store(store.location).versions()}
    installed = versions - {first, second}
    assert len(installed) == publishes
    for version in installed:
        state = f"; version {version[:12]} was installed, and is not current; "
        assert state in str(caught.value)
    assert ("; nothing was changed; " in str(caught.value)) == (not publishes)
    assert cache.open_store(store.location).current == before
    monkeypatch.undo()

    def unsound(folder):
        if folder == tmp_path / "m.zarr":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

    monkeypatch.setattr("cache.atomic.sync_folder", unsound)
    with pytest.raises(StoreWriteError, match="see that its disk or mount is sound") as caught:
        act() if not publishes else store.use(next(iter(installed)))
    now = cache.open_store(store.location).current
    assert now != before
    assert f"version {now[:12]} is current all the same" in str(caught.value)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EACCES, "permissions"),
        (errno.EIO, "disk or mount is sound"),
        (errno.ESTALE, "disk or mount is sound"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ELOOP, "mend the links"),
        (errno.EISDIR, "see what stands there"),
    ],
)
def test_advice_fits_why_a_read_failed(store, monkeypatch, number, advice):
    refuse(monkeypatch, "os.open", number)
    with pytest.raises(StoreReadError, match=advice) as caught:
        cache.open_store(store.location)
    assert os.strerror(number) in str(caught.value)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EROFS, "may be written"),
        (errno.EXDEV, "neither a mount point nor a link"),
        (errno.EBUSY, "neither a mount point nor a link"),
        (errno.EPERM, "permissions"),
    ],
)
def test_advice_fits_why_a_write_failed(store, monkeypatch, number, advice):
    refuse(monkeypatch, "tempfile.mkdtemp", number)
    with pytest.raises(StoreWriteError, match=f"; nothing was changed; .*{advice}.*, then run it"):
        store.publish(entries(2, scale=9))


@pytest.mark.parametrize("named", [None, "/the/other"])
def test_an_error_of_the_system_keeps_the_file_that_it_names(named):
    with pytest.raises(OSError, match="No space left") as caught, naming("/the/block"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), named)
    assert caught.value.filename == (named or "/the/block")


@pytest.mark.parametrize("path", ["/the/block", Path("/the/block")])
def test_what_the_system_said_to_another_language_is_an_error_of_the_system_again(path):
    cause = RuntimeError("cannot write: some text (os error 28)")
    with pytest.raises(OSError, match="No space left") as caught, naming(path):
        raise cause
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/the/block")
    assert caught.value.strerror == os.strerror(errno.ENOSPC)
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize("error", [ValueError("os error 28"), RuntimeError("(os error x)")])
def test_another_error_gets_a_note_of_its_file(error):
    with pytest.raises(type(error)) as caught, naming("/the/block"):
        raise error
    assert caught.value is error
    assert caught.value.__notes__ == ["in /the/block"]


def test_what_ends_a_program_gets_no_note():
    with pytest.raises(KeyboardInterrupt) as caught, naming("/the/block"):
        raise KeyboardInterrupt
    assert not hasattr(caught.value, "__notes__")
    with naming("/the/block"):
        pass
