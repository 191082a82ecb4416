"""What each error says word for word, and what a program can ask of it."""

import errno
import os

import pytest

from cache.errors import (
    BackendMissingError,
    CacheError,
    DamagedEntryError,
    EntryNotFoundError,
    FormatVersionError,
    InvalidEntryError,
    NotListableError,
    ShippingError,
    StoreNotFoundError,
    StoreReadError,
    StoreWriteError,
    VersionNotFoundError,
    VersionRemovedError,
)

ID = "0123456789abcdef" * 4

IN_FOLDER = "Delete this version and pull, unpack or build it again"
AT_URL = "Run it again; if it stays so, check the address, or `push` a sound version there"
IN_ZIP = "Get the zip again, or `pack` a new one"


@pytest.mark.parametrize(
    ("error", "message", "fields"),
    [
        (StoreNotFoundError("m.zarr", "it is gone"), "it is gone", {"location": "m.zarr"}),
        (
            VersionNotFoundError("abcd", "no such", ["x", "y"]),
            "no such",
            {"version": "abcd", "known": ("x", "y")},
        ),
        (VersionNotFoundError("abcd", "no such"), "no such", {"known": ()}),
        (
            VersionRemovedError(ID, "m.zarr/a"),
            "version 0123456789ab was removed while it was read: expected m.zarr/a, found neither "
            "it nor the version's document. Open the cache again, which reads its current version",
            {"version": ID, "file": "m.zarr/a", "known": ()},
        ),
        (
            EntryNotFoundError("n", ID, ["near", "next"]),
            "version 0123456789ab has no entry 'n'; nearest: near, next",
            {"name": "n", "version": ID, "nearest": ("near", "next")},
        ),
        (
            EntryNotFoundError("n", ID),
            "version 0123456789ab has no entry 'n'",
            {"nearest": ()},
        ),
        (InvalidEntryError("n", "it breaks"), "entry 'n': it breaks", {"name": "n"}),
        (
            FormatVersionError("f", "9", 1),
            "f is of format '9', this reader knows format 1: read it with the release that wrote "
            "it, or build the cache again",
            {"file": "f", "found": "9", "supported": 1},
        ),
        (
            FormatVersionError("f", 9, 1, "name another one"),
            "f is of format 9, this reader knows format 1: name another one",
            {},
        ),
        (
            StoreReadError("f", PermissionError(errno.EACCES, "No")),
            "cannot read f: No; see that its permissions allow this user that",
            {"file": "f", "errno": errno.EACCES},
        ),
        (
            StoreReadError("f", RuntimeError("two\n  lines")),
            "cannot read f: two lines; see what stands there",
            {"file": "f", "errno": None},
        ),
        (
            StoreWriteError("f", "no room", errno.ENOSPC),
            "no room",
            {"file": "f", "errno": errno.ENOSPC},
        ),
        (StoreWriteError("f", "no room"), "no room", {"errno": None}),
        (
            StoreWriteError.caused_by("f", OSError(errno.EFBIG, "Too large")),
            "cannot write f: Too large; nothing was changed; raise the limit (`ulimit -f`) or "
            "choose another file system, then run it again",
            {"file": "f", "errno": errno.EFBIG},
        ),
        (
            StoreWriteError.caused_by("f", OSError(errno.EIO, "Bad"), "half stands"),
            "cannot write f: Bad; half stands; see that its disk or mount is sound, then run it "
            "again",
            {},
        ),
        (ShippingError("s3://b/m", "it broke"), "it broke", {"location": "s3://b/m"}),
        (
            BackendMissingError("s3://b/m", "s3", "pip install s3fs"),
            "s3:// needs a package that is not installed: pip install s3fs",
            {"location": "s3://b/m", "protocol": "s3", "pip_line": "pip install s3fs"},
        ),
        (
            NotListableError("http://h/m"),
            "http://h/m cannot list its versions: load the current one, or name a version by its "
            "full id of 64 hexadecimal digits",
            {"location": "http://h/m"},
        ),
    ],
)
def test_what_an_error_says_and_carries(error, message, fields):
    assert str(error) == message
    assert {name: getattr(error, name) for name in fields} == fields
    assert isinstance(error, CacheError)


def test_an_error_without_a_text_is_called_by_its_kind():
    error = CacheError("x")
    error.args = ()
    assert str(error) == "CacheError"


@pytest.mark.parametrize(
    ("file", "options", "remedy"),
    [
        ("m.zarr/a", {}, IN_FOLDER),
        ("m.zarr/a", {"in_folder": "Delete it"}, "Delete it"),
        ("s3://b/m.zarr/a", {}, AT_URL),
        ("s3://b/m.zip", {"in_folder": "Delete it"}, AT_URL),
        ("m.zip", {}, IN_ZIP),
        ("m.zip!a/zarr.json", {"in_folder": "Delete it"}, IN_ZIP),
        ("m.zip/a", {}, IN_FOLDER),
        ("m.zarr/a!b.zip", {}, IN_FOLDER),
        ("s3://b/m.zarr/a", {"remedy": "Delete that"}, "Delete that"),
        ("m.zip", {"remedy": "Delete that"}, "Delete that"),
    ],
)
def test_what_is_to_be_done_about_damage_goes_by_where_it_is(file, options, remedy):
    error = DamagedEntryError(file, "it must be whole", **options)
    assert str(error) == f"{file} is damaged: it must be whole; it is not used. {remedy}"
    assert error.summary == f"{file} is damaged: it must be whole"


@pytest.mark.parametrize(
    ("options", "summary"),
    [
        ({"expected": 4}, "f is damaged: r (expected 4)"),
        ({"found": 0}, "f is damaged: r (found 0)"),
        ({"found": ""}, "f is damaged: r (found )"),
        ({"expected": 4, "found": 5}, "f is damaged: r (expected 4, found 5)"),
        ({"entry": "e"}, "f of entry 'e' is damaged: r"),
        ({"entry": "e", "expected": 4, "found": 5}, "f of entry 'e' is damaged: r (expected 4, fou"
         "nd 5)"),
        ({"found": "x" * 80}, f"f is damaged: r (found {'x' * 80})"),
        ({"found": "y" * 64 + "x" * 17}, f"f is damaged: r (found {'y' * 64}... (81 characters))"),
    ],
)  # fmt: skip
def test_what_differs_is_said_and_carried(options, summary):
    error = DamagedEntryError("f", "r", **options)
    assert error.summary == summary
    assert str(error) == f"{summary}; it is not used. {IN_FOLDER}"
    assert (error.file, error.rule) == ("f", "r")
    carried = {"expected": None, "found": None, "entry": None} | options
    assert {name: getattr(error, name) for name in carried} == carried


def test_a_secret_in_what_differs_is_not_shown():
    error = DamagedEntryError("https://h/m?token=secret", "r", found="https://u:secret@h/")
    assert "secret" not in str(error)


@pytest.mark.parametrize(
    ("numbers", "advice"),
    [
        (["EACCES", "EPERM"], "see that its permissions allow this user that"),
        (["EROFS"], "choose a folder that may be written"),
        (["ENOMEM"], "close other programs, or use a machine with more memory"),
        (["ENOENT"], "see that it is there"),
        (["ENOSPC", "EDQUOT"], "make room or choose another folder"),
        (["EFBIG"], "raise the limit (`ulimit -f`) or choose another file system"),
        (
            ["EIO", "ESTALE", "ENODEV", "ENXIO", "ENOTCONN", "ETIMEDOUT"],
            "see that its disk or mount is sound",
        ),
        (["EMFILE", "ENFILE"], "close files or raise the limit (`ulimit -n`)"),
        (["ENAMETOOLONG"], "choose a shorter path"),
        (["ELOOP"], "mend the links on its path"),
        (
            ["EXDEV", "EBUSY"],
            "choose a folder that is neither a mount point nor a link to another file system",
        ),
        (
            ["ENOTSUP", "EOPNOTSUPP", "ENOSYS", "ENOLCK"],
            "its file system cannot do that: choose a folder on another one",
        ),
        (["EISDIR", "ENOTDIR", "EINVAL"], "see what stands there"),
    ],
)
def test_each_error_of_the_system_has_its_advice(numbers, advice):
    for name in numbers:
        number = getattr(errno, name)
        what = os.strerror(number)
        cause = OSError(number, what)
        assert str(StoreReadError("f", cause)) == f"cannot read f: {what}; {advice}"
