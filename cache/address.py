"""Addresses of caches: which are URLs, and what of them may be shown."""

import re

_WEB = ("http", "https")
_QUERY = re.compile(r"([?&;#])([^=&;#]*=)?[^&;#]+")
_IN_TEXT = re.compile(r"\b[A-Za-z][\w+.-]*://[^\s'\"<>`]*[^\s'\"<>`;:,.)]")


def is_url(location: str) -> bool:
    """Return whether ``location`` is a URL rather than a path."""
    return "://" in location


def split_query(url: str) -> tuple[str, str]:
    """Return a URL up to its query or fragment, and the rest with its ``?`` or ``#``."""
    start = re.search(r"[?#]|$", url)
    assert start is not None
    return url[: start.start()], url[start.start() :]


def without_secrets(url: str) -> str:
    """Return a URL fit to be shown: ``sftp://user:***@host/path``, ``https://host/m?token=***``.

    A password may hold any sign, so everything up to the last ``@`` is taken for it. Before a web
    host the user's name may be a token. Of a query and a fragment the names alone stay.
    """
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    user, colon, after = rest.partition(":")
    if colon and "@" in after and re.search(r"[/@?#]", user) is None:
        password, _, place = after.rpartition("@")
        user = "***" if scheme in _WEB else f"{user}:***"
        if split_query(password)[1]:
            # Is it a password with a "?", or a query with an "@"?
            return f"{scheme}://{user}"
        rest = f"{user}@{place}"
    elif scheme in _WEB:
        rest = re.sub(r"^[^/@?#]*@", "***@", rest)
    place, query = split_query(rest)
    return f"{scheme}://{place}" + _QUERY.sub(r"\1\2***", query)


def without_secrets_in(text: str) -> str:
    """Return a text, such as another library's message, with each URL in it fit to be shown."""
    return _IN_TEXT.sub(lambda url: without_secrets(url[0]), text)
