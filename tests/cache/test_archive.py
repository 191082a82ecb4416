"""A packed cache: which members a zip may have, and what is said of the one at fault."""

import stat
import zipfile
from pathlib import Path

import pytest

import cache
from cache.archive import ZipSource
from cache.errors import DamagedEntryError, StoreNotFoundError, StoreReadError
from tests.cache.samples import entries, files_of, published

ID, OTHER = "0123456789abcdef" * 4, "f" * 64


def zipped(path, members, **fields):
    """A zip of members by name; ``fields`` are set on the one that is called ``at``."""
    at = fields.pop("at", None)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            for field, value in fields.items() if name == at else ():
                setattr(info, field, value)
            archive.writestr(info, data)
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "z.zip"


def opened(path):
    source = ZipSource(path)
    source.close()
    return source


def refused(path):
    """How a zip is refused; its file is closed."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(DamagedEntryError) as caught:
        ZipSource(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    return caught.value


GOOD = [
    "zarr.json",
    f"{ID}/zarr.json",
    f"{ID}/spans/zarr.json",
    f"{ID}/tables/zarr.json",
    f"{ID}/spans/c/0",
    f"{ID}/tables/c/7",
    f"{ID}/spans/c/10",
    f"{ID}/spans/c/9999",
    f"{OTHER}/zarr.json",
]
BAD = [
    "zarr,json",
    "xzarr.json",
    "zarr.jsonx",
    f"{ID[1:]}/zarr.json",
    f"0{ID}/zarr.json",
    f"{ID.upper()}/zarr.json",
    f"{ID}/zarr.json/",
    f"{ID}/spans/c/",
    f"{ID}/spans/c/00",
    f"{ID}/spans/c/01",
    f"{ID}/spans/c/10000",
    f"{ID}/spans/c/-1",
    f"{ID}/spans/0",
    f"{ID}/spans/d/0",
    f"{ID}/span/c/0",
    f"{ID}/c/0",
    f"{ID}/zarr.json\n",
    f"x/{ID}/zarr.json",
]


def test_all_keys_of_the_format_may_be_members(path):
    members = {name: name.encode() for name in GOOD}
    source = ZipSource(zipped(path, members))
    for name, data in members.items():
        assert source.read(name, len(data)) == data
        with pytest.raises(DamagedEntryError) as caught:
            source.read(name, len(data) - 1)
        assert caught.value.file == source.name(name) == f"{path}!{name}"
        assert (caught.value.expected, caught.value.found) == (
            f"at most {len(data) - 1} bytes",
            len(data),
        )
    assert source.read("absent", 100) is None
    assert source.version_ids() == sorted([ID, OTHER])
    assert source.file_sizes(ID) == {n: len(n) for n in GOOD if n.startswith(ID)}
    assert source.file_sizes(OTHER) == {f"{OTHER}/zarr.json": 74}
    assert source.file_sizes("0" * 64) == {}
    assert source.strangers() == []
    assert source.location == str(path)
    source.close()


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("is_first", [True, False])
def test_any_other_name_is_refused(path, name, is_first):
    good = dict.fromkeys(GOOD, b"x")
    error = refused(zipped(path, {name: b"x"} | good if is_first else good | {name: b"x"}))
    assert error.rule == "a member must be named by a key of the format"
    assert (error.file, error.found) == (str(path), name)


@pytest.mark.parametrize("at", [0, 4, len(GOOD) - 1])
@pytest.mark.parametrize(
    ("fields", "rule", "found"),
    [
        ({"external_attr": (stat.S_IFLNK | 0o777) << 16}, "must be a regular file", "a link or"),
        ({"external_attr": (stat.S_IFDIR | 0o777) << 16}, "must be a regular file", "a link or"),
        ({"external_attr": (stat.S_IFCHR | 0o777) << 16}, "must be a regular file", "a link or"),
        ({"compress_type": zipfile.ZIP_DEFLATED}, "must be stored, neither packed nor", ""),
        ({"compress_type": zipfile.ZIP_BZIP2}, "must be stored, neither packed nor", ""),
    ],
)
def test_a_member_that_is_no_stored_file_is_named(path, at, fields, rule, found):
    members = dict.fromkeys(GOOD, b"x" * 50)
    error = refused(zipped(path, members, at=GOOD[at], **fields))
    assert rule in error.rule
    assert error.file == f"{path}!{GOOD[at]}"
    assert str(error.found or "").startswith(found)
    assert str(error).endswith("Get the zip again, or `pack` a new one")


@pytest.mark.parametrize("attr", [0, 0o644 << 16, (stat.S_IFREG | 0o600) << 16])
def test_a_regular_file_of_any_mode_is_taken(path, attr):
    members = dict.fromkeys(GOOD, b"x")
    opened(zipped(path, members, at=GOOD[0], external_attr=attr))


def patched(path, name, offset, data):
    """Change the bytes of a member's line in the zip's directory."""
    content = bytearray(path.read_bytes())
    line = content.rindex(name.encode()) - 46
    assert content[line : line + 4] == b"PK\1\2"
    content[line + offset : line + offset + len(data)] = data
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", [GOOD[1], GOOD[-1]])
def test_an_encrypted_member_is_refused(path, name):
    zipped(path, dict.fromkeys(GOOD, b"x"))
    error = refused(patched(path, name, 8, b"\1"))
    assert error.rule == "a member must be stored, neither packed nor encrypted"
    assert error.file == f"{path}!{name}"


def test_a_member_whose_two_sizes_differ_is_refused(path):
    for offset in (20, 24):
        zipped(path, dict.fromkeys(GOOD, b"x" * 9))
        error = refused(patched(path, GOOD[4], offset, b"\x08\0\0\0"))
        assert error.rule == "sizes must fit the file"
        assert error.file == f"{path}!{GOOD[4]}"
        assert error.found == (9 if offset == 20 else 8)


def test_members_together_are_no_longer_than_the_file(path):
    """One of them may fill it, the next is one too many."""
    zipped(path, dict.fromkeys(GOOD[:3], b""))
    size = path.stat().st_size
    for claimed, is_refused in ((size, False), (size + 1, True)):
        zipped(path, dict.fromkeys(GOOD[:3], b""))
        patched(path, GOOD[1], 20, claimed.to_bytes(4, "little") * 2)
        if is_refused:
            error = refused(path)
            assert (error.rule, error.found) == ("sizes must fit the file", size + 1)
        else:
            opened(path)
    zipped(path, dict.fromkeys(GOOD[:3], b""))
    patched(path, GOOD[1], 20, (size - 5).to_bytes(4, "little") * 2)
    patched(path, GOOD[2], 20, (6).to_bytes(4, "little") * 2)
    error = refused(path)
    assert (error.file, error.rule) == (f"{path}!{GOOD[2]}", "sizes must fit the file")
    patched(path, GOOD[2], 20, (5).to_bytes(4, "little") * 2)
    opened(path)


def test_a_name_that_stands_twice_is_named(path):
    zipped(path, dict.fromkeys(GOOD, b"x"))
    with (
        zipfile.ZipFile(path, "a") as archive,
        pytest.warns(UserWarning, match="Duplicate name"),
    ):
        archive.writestr(GOOD[2], b"x")
    error = refused(path)
    assert (error.file, error.rule) == (f"{path}!{GOOD[2]}", "a name must stand once")
    assert error.found == "two"


def test_as_many_members_as_allowed_are_taken(path, monkeypatch):
    zipped(path, dict.fromkeys(GOOD, b""))
    monkeypatch.setattr("cache.archive.MAX_ZIP_MEMBERS", len(GOOD))
    opened(path)
    monkeypatch.setattr("cache.archive.MAX_ZIP_MEMBERS", len(GOOD) - 1)
    error = refused(path)
    assert error.rule == f"a packed cache has at most {len(GOOD) - 1} members"
    assert (error.file, error.found) == (str(path), len(GOOD))


def test_the_most_chunks_of_a_version_fit_into_a_zip():
    """2**36 values a section, in chunks of 2**24."""
    from cache.archive import MAX_ZIP_MEMBERS
    from cache.chunk import MAX_CHUNK_VALUES
    from cache.format import MAX_SECTION_VALUES

    assert MAX_ZIP_MEMBERS == 65536
    chunks = MAX_SECTION_VALUES // MAX_CHUNK_VALUES
    assert chunks == 4096
    assert 2 * chunks + 4 <= MAX_ZIP_MEMBERS


def test_what_is_no_zip_or_not_there_is_typed(path, tmp_path):
    for data in (b"", b"no zip", b"PK\5\6"):
        path.write_bytes(data)
        error = refused(path)
        assert (error.file, error.rule) == (str(path), "it must be a zip")
        assert error.found == str(error.__cause__) != ""
    with pytest.raises(StoreReadError) as caught:
        ZipSource(tmp_path)
    assert caught.value.file == str(tmp_path)
    assert isinstance(caught.value.__cause__, IsADirectoryError)
    with pytest.raises(StoreNotFoundError) as caught:
        ZipSource(tmp_path / "absent.zip")
    assert caught.value.location == f"{tmp_path}/absent.zip"


def test_a_member_that_is_spoilt_is_told_and_spares_the_others(tmp_path):
    store = published(tmp_path / "m.zarr", entries(2))
    cache.pack(store, tmp_path / "m.zip")
    whole = (tmp_path / "m.zip").read_bytes()
    files = files_of(store)
    for key in sorted(files):
        with zipfile.ZipFile(tmp_path / "m.zip") as archive:
            header = archive.getinfo(key).header_offset
        for place in (header + 30 + len(key), header + 30 + len(key) + len(files[key]) - 1):
            content = bytearray(whole)
            content[place] ^= 1
            (tmp_path / "m.zip").write_bytes(content)
            source = ZipSource(tmp_path / "m.zip")
            with pytest.raises(DamagedEntryError) as caught:
                source.read(key, 1 << 20)
            assert caught.value.file == f"{tmp_path}/m.zip!{key}"
            assert caught.value.rule == "the zip must hold it whole"
            assert caught.value.found == str(caught.value.__cause__) != ""
            assert all(source.read(k, 1 << 20) == d for k, d in files.items() if k != key)
            source.close()
        # A header of its own that says another thing than the directory.
        content = bytearray(whole)
        content[header + 30] ^= 1
        (tmp_path / "m.zip").write_bytes(content)
        source = ZipSource(tmp_path / "m.zip")
        with pytest.raises(DamagedEntryError, match="the zip must hold it whole"):
            source.read(key, 1 << 20)
        source.close()
        (tmp_path / "m.zip").write_bytes(whole)


def test_a_disk_that_fails_as_a_member_is_read_is_typed(path, monkeypatch):
    source = ZipSource(zipped(path, dict.fromkeys(GOOD, b"x")))
    cause = OSError(5, "Input/output error")

    def refuse(*_arguments):
        raise cause

    monkeypatch.setattr(zipfile.ZipFile, "read", refuse)
    with pytest.raises(StoreReadError) as caught:
        source.read(GOOD[0], 9)
    assert (caught.value.file, caught.value.errno) == (f"{path}!{GOOD[0]}", 5)
    assert caught.value.__cause__ is cause
    source.close()
