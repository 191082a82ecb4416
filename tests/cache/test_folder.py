"""A folder as a source of bytes: limits, what is listed, and what the system refuses."""

import errno
import os
from pathlib import Path

import pytest

from cache.errors import DamagedEntryError, StoreReadError
from cache.source import FolderSource, check_size, may_exist, read_bounded
from tests.cache.samples import entries, published


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "m.zarr").mkdir()
    return tmp_path / "m.zarr"


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("size", [0, 1, 100, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_a_file_is_read_up_to_its_limit(folder, size):
    data = os.urandom(size)
    (folder / "file").write_bytes(data)
    source = FolderSource(folder)
    for limit in (size, size + 1, 1 << 30):
        assert source.read("file", limit) == data
    # By its size, so that nothing of a far longer one is read.
    for limit in {size - 1, size // 2, 0} if size else ():
        with pytest.raises(DamagedEntryError) as caught:
            source.read("file", limit)
        error = caught.value
        assert (error.file, error.rule) == (f"{folder}/file", "it is longer than it can be")
        assert (error.expected, error.found) == (f"at most {limit} bytes", size)


def test_a_file_that_grows_as_it_is_read_is_refused(folder, monkeypatch):
    (folder / "file").write_bytes(b"12345")
    fstat = os.fstat

    def shorter(descriptor):
        found = list(fstat(descriptor))
        found[6] = 3
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", shorter)
    assert FolderSource(folder).read("file", 5) == b"12345"
    for limit in (3, 4):
        with pytest.raises(DamagedEntryError) as caught:
            FolderSource(folder).read("file", limit)
        assert caught.value.found == limit + 1


@pytest.mark.parametrize("most", [1, 3, 7, 100])
def test_what_comes_in_parts_is_put_together(most):
    data = bytes(range(20))
    for limit in (20, 21, 100):
        left = [data]

        def read(count, left=left):
            count = min(count, most)
            part, left[0] = left[0][:count], left[0][count:]
            return part

        assert read_bounded(read, "f", limit) == data


def test_what_never_ends_is_read_one_byte_past_its_limit():
    for limit in (0, 10, (1 << 20) - 1, 1 << 20, (1 << 21) + 5):
        asked = []

        def read(count, asked=asked):
            asked.append(count)
            return b"x" * count

        with pytest.raises(DamagedEntryError) as caught:
            read_bounded(read, "f", limit)
        assert sum(asked) == limit + 1
        assert max(asked) <= 1 << 20
        assert (caught.value.file, caught.value.found) == ("f", limit + 1)


def test_a_size_at_its_limit_is_allowed():
    check_size("f", 7, 7)
    check_size("f", 0, 0)
    with pytest.raises(DamagedEntryError):
        check_size("f", 8, 7)


def test_nothing_stays_open(folder):
    source = FolderSource(folder)
    (folder / "file").write_bytes(b"12345")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    before = open_files()
    assert source.read("file", 9) == b"12345"
    assert source.read("absent", 9) is None
    assert source.read("file/below", 9) is None
    for key in ("folder", "pipe"):
        with pytest.raises(DamagedEntryError, match="it must be a regular file") as caught:
            source.read(key, 9)
        assert caught.value.file == f"{folder}/{key}"
    with pytest.raises(DamagedEntryError):
        source.read("file", 4)
    source.version_ids()
    source.strangers()
    assert open_files() == before


@pytest.mark.parametrize("call", ["open", "fstat", "read"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ELOOP])
def test_what_the_system_refuses_is_typed_and_named(folder, monkeypatch, call, number):
    (folder / "file").write_bytes(b"12345")
    before = open_files()
    cause = OSError(number, os.strerror(number))

    def refuse(*_arguments):
        raise cause

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(StoreReadError) as caught:
            FolderSource(folder).read("file", 9)
    assert (caught.value.file, caught.value.errno) == (f"{folder}/file", number)
    assert caught.value.__cause__ is cause
    assert open_files() == before


def versions(folder, *ages):
    """Versions of these ages by their first digit, a document in each."""
    for digit, age in enumerate(ages):
        place = folder / (str(digit) * 64)
        place.mkdir()
        (place / "zarr.json").write_bytes(b"")
        os.utime(place, (10**9 - age, 10**9 - age))
    return [str(digit) * 64 for digit in range(len(ages))]


def test_the_newest_version_is_the_first(folder):
    zero, one, two, three = versions(folder, 20, 10, 30, 10)
    assert FolderSource(folder).version_ids() == [one, three, zero, two]


def test_a_name_that_is_no_id_or_has_no_document_is_no_version(folder):
    (known,) = versions(folder, 1)
    for name in ("a" * 63, "a" * 65, "A" * 64, "g" * 64, "b" * 64, ".tmp-x"):
        (folder / name).mkdir()
        if name != "b" * 64:
            (folder / name / "zarr.json").write_bytes(b"")
    (folder / ("c" * 64)).write_bytes(b"")
    (folder / ("d" * 64)).mkdir()
    (folder / ("d" * 64) / "zarr.json").symlink_to("zarr.json")
    assert FolderSource(folder).version_ids() == [known]
    strange = ["a" * 63, "a" * 65, "A" * 64, "b" * 64, "c" * 64, "d" * 64, "g" * 64, ".tmp-x"]
    assert FolderSource(folder).strangers() == sorted(f"{folder}/{name}" for name in strange)


def test_a_version_of_another_user_is_listed(folder, monkeypatch):
    (known,) = versions(folder, 1)
    stat = os.stat

    def refuse(path, **options):
        if Path(path) == folder / known / "zarr.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert FolderSource(folder).version_ids() == [known]
    assert FolderSource(folder).strangers() == []


def test_what_may_be_there(folder, monkeypatch):
    (folder / "file").write_bytes(b"")
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("absent")
    (folder / "link").symlink_to("file")
    found = {name: may_exist(folder / name) for name in ("file", "loop", "dangling", "link", "x")}
    assert found == {"file": True, "loop": False, "dangling": False, "link": True, "x": False}
    assert may_exist(folder)
    assert not may_exist(folder / "file" / "below")
    assert not may_exist(folder / "x" / "below")
    for number, may in ((errno.EACCES, True), (errno.EIO, True), (errno.ELOOP, False)):
        cause = OSError(number, "refused")

        def refuse(*_arguments, cause=cause, **_options):
            raise cause

        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", refuse)
            assert may_exist(Path("x")) == may


def test_sizes_are_those_of_all_files_of_one_version(folder):
    one, two = versions(folder, 1, 2)
    for key, size in ((f"{one}/spans/c/0", 5), (f"{one}/notes/deep/a.txt", 7), (f"{two}/x", 9)):
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(b"x" * size)
    (folder / one / "link").symlink_to("spans/c/0")
    assert FolderSource(folder).file_sizes(one) == {
        f"{one}/zarr.json": 0,
        f"{one}/spans/c/0": 5,
        f"{one}/notes/deep/a.txt": 7,
        # Of the link itself.
        f"{one}/link": len("spans/c/0"),
    }
    assert FolderSource(folder).file_sizes(two) == {f"{two}/zarr.json": 0, f"{two}/x": 9}
    assert FolderSource(folder).file_sizes("f" * 64) == {}


def test_a_file_that_goes_as_sizes_are_listed_is_none(folder, monkeypatch):
    (one,) = versions(folder, 1)
    (folder / one / "a").write_bytes(b"x")
    lstat = Path.lstat

    def going(path):
        if path.name == "a":
            path.unlink(missing_ok=True)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", going)
    assert FolderSource(folder).file_sizes(one) == {f"{one}/zarr.json": 0}


def test_a_version_that_goes_as_it_is_listed_is_none(folder, monkeypatch):
    one, two = versions(folder, 1, 2)
    stat = os.stat

    def going(path, **options):
        found = stat(path, **options)
        if Path(path) == folder / one / "zarr.json":
            (folder / one).rename(folder.parent / "aside")
        return found

    monkeypatch.setattr(os, "stat", going)
    assert FolderSource(folder).version_ids() == [two]


def test_a_folder_that_is_not_there_or_may_not_be_listed(folder, monkeypatch):
    absent = FolderSource(folder / "absent")
    assert (absent.version_ids(), absent.strangers(), absent.file_sizes("0" * 64)) == ([], [], {})

    def refuse(*_arguments):
        raise PermissionError(errno.EACCES, "Permission denied")

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, refuse)
    for ask in (FolderSource(folder).version_ids, FolderSource(folder).strangers):
        with pytest.raises(StoreReadError) as caught:
            ask()
        assert (caught.value.file, caught.value.errno) == (str(folder), errno.EACCES)
        assert isinstance(caught.value.__cause__, PermissionError)


def test_a_link_is_called_by_its_name_and_read_where_it_leads(tmp_path):
    store = published(tmp_path / "real.zarr", entries(1))
    (tmp_path / "m.zarr").symlink_to("real.zarr")
    source = FolderSource(tmp_path / "m.zarr")
    assert source.location == f"{tmp_path}/m.zarr"
    assert source.folder == tmp_path / "real.zarr"
    assert source.name("a/b") == f"{tmp_path}/real.zarr/a/b"
    assert source.version_ids() == [store.current]
