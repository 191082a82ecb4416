"""What of an address is shown: no password, no token, wherever they stand."""

import pytest

from cache.address import is_url, split_query, without_secrets, without_secrets_in
from cache.errors import CacheError, DamagedEntryError, StoreReadError


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sftp://user:secret@host/x.zarr", "sftp://user:***@host/x.zarr"),
        ("http://user:se@cret@host:1/x", "http://***@host:1/x"),
        ("sftp://user:se/cret@host/x", "sftp://user:***@host/x"),
        ("s3://bucket/x@y", "s3://bucket/x@y"),
        ("s3://KEY:secret@bucket/x", "s3://KEY:***@bucket/x"),
        ("sftp://user@host/x", "sftp://user@host/x"),
        (
            "abfs://container@account.dfs.core.windows.net/m",
            "abfs://container@account.dfs.core.windows.net/m",
        ),
        ("https://ghp_secret@host/x", "https://***@host/x"),
        ("https://ghp_secret:x-oauth-basic@host/x", "https://***@host/x"),
        ("https://host/m.zarr?token=secret", "https://host/m.zarr?token=***"),
        (
            "https://host/m?a=se&X-Amz-Signature=cret#s",
            "https://host/m?a=***&X-Amz-Signature=***#***",
        ),
        ("https://host/m?sig=se;cret=x", "https://host/m?sig=***;cret=***"),
        ("https://host/m?secret", "https://host/m?***"),
        ("https://host/m#access_token=secret", "https://host/m#access_token=***"),
        ("https://host:80/m?mail=secret@secret", "https://***"),
        ("https://host/m?mail=secret@secret", "https://host/m?mail=***"),
        ("sftp://user:se?cret@host/m", "sftp://user:***"),
        ("zip://x::https://host/m?token=secret", "zip://x::https://host/m?token=***"),
        ("https://host/m.zarr?token=", "https://host/m.zarr?***"),
        ("folder/m.zarr?x=1", "folder/m.zarr?x=1"),
    ],
)
def test_no_secret_is_shown(url, shown):
    assert without_secrets(url) == shown
    assert without_secrets(shown) == shown


def test_addresses_within_a_text_are_cleaned_and_the_text_stays():
    text = "403, url='https://u:secret@h/m?token=secret', then https://h/m?sig=secret; try again"
    clean = "403, url='https://***@h/m?token=***', then https://h/m?sig=***; try again"
    assert without_secrets_in(text) == clean
    assert without_secrets_in(clean) == clean


def test_no_error_of_the_package_shows_one():
    url = "https://host/m.zarr/zarr.json?token=secret"
    for error in (
        CacheError(f"cannot do with {url}"),
        StoreReadError(url, ValueError(f"refused by {url}")),
        DamagedEntryError(url, "it must be sound"),
    ):
        assert "secret" not in str(error)
        assert "https://host/m.zarr/zarr.json?token=***" in str(error)


def test_a_query_stays_behind_the_path():
    assert split_query("https://h/m?a=b#c") == ("https://h/m", "?a=b#c")
    assert split_query("https://h/m#c?d") == ("https://h/m", "#c?d")
    assert split_query("https://h/m") == ("https://h/m", "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("nothing to hide: user:secret@host", "nothing to hide: user:secret@host"),
        ("(https://u:secret@h/m)", "(https://***@h/m)"),
        ("<sftp://u:secret@h/m>", "<sftp://u:***@h/m>"),
        ("'s3://K:secret@b/m'", "'s3://K:***@b/m'"),
        ('"https://h/m?a=secret"', '"https://h/m?a=***"'),
        ("`https://h/m?a=secret`", "`https://h/m?a=***`"),
        ("at https://h/m?a=secret.", "at https://h/m?a=***."),
        ("at https://h/m?a=secret, then", "at https://h/m?a=***, then"),
        ("at https://h/m?a=secret: no", "at https://h/m?a=***: no"),
        ("a+b.c-1://u:secret@h/m", "a+b.c-1://u:***@h/m"),
        (
            "https://h/m?a=secret and sftp://u:secret@h/m\nhttp://secret@h/m",
            "https://h/m?a=*** and sftp://u:***@h/m\nhttp://***@h/m",
        ),
        ("https://h/m!zarr.json?a=secret", "https://h/m!zarr.json?a=***"),
    ],
)
def test_each_address_in_a_text_is_cleaned_up_to_its_end(text, shown):
    assert without_secrets_in(text) == shown
    assert str(CacheError(text)) == shown


def test_a_url_is_told_from_a_path():
    assert all(map(is_url, ("s3://b", "file:///m", "a://", "zip::s3://b")))
    assert not any(map(is_url, ("m.zarr", "/a/b", "C:\\m", "a:/b", "a//b", "")))
