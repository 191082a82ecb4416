"""The cache's errors: what a store, a version, an entry or a transfer may do wrong.

CacheError                                                    exit 1
    StoreNotFoundError     (FileNotFoundError)                exit 1
    VersionNotFoundError   (LookupError)                      exit 1
        VersionRemovedError                                   exit 1
    EntryNotFoundError     (KeyError)                         exit 1
    InvalidEntryError      (ValueError)                       exit 1
    FormatVersionError     (ValueError)                       exit 1
    DamagedEntryError      (ValueError)                       exit 3
    StoreReadError         (OSError)                          exit 1
    StoreWriteError        (OSError)                          exit 1
    ShippingError                                             exit 1
        BackendMissingError (ImportError)                     exit 1
        NotListableError                                      exit 1
"""

from collections.abc import Sequence
from pathlib import PurePath

from cache.address import is_url, without_secrets_in
from cache.causes import why


class CacheError(Exception):
    """Root of the cache's errors; ``exit_code`` is what a command exits with.

    No message shows a password or a token of an address.
    """

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(without_secrets_in(message))

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


def _remedy(file: str, in_folder: str) -> str:
    """What to do about a damaged ``file``, by where it is."""
    if is_url(file):
        return "Run it again; if it stays so, check the address, or `push` a sound version there"
    if PurePath(file.split("!", 1)[0]).suffix == ".zip":
        return "Get the zip again, or `pack` a new one"
    return in_folder


class StoreNotFoundError(CacheError, FileNotFoundError):
    """There is no cache at ``location``."""

    def __init__(self, location: str, message: str) -> None:
        super().__init__(message)
        self.location = location


class VersionNotFoundError(CacheError, LookupError):
    """The store holds no version of that id or prefix, or several of that prefix.

    ``version`` is what was asked for, ``known`` the ids that the store lists.
    """

    def __init__(self, version: str, message: str, known: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.version = version
        self.known = tuple(known)


class VersionRemovedError(VersionNotFoundError):
    """The version was there when it was opened and is gone, as after a gc of another process.

    ``file`` is what was wanted of it.
    """

    def __init__(self, version: str, file: str) -> None:
        super().__init__(
            version,
            f"version {version[:12]} was removed while it was read: expected {file}, found neither "
            f"it nor the version's document. Open the cache again, which reads its current version",
        )
        self.file = file


class EntryNotFoundError(CacheError, KeyError):
    """The version holds no entry of that name; ``nearest`` are names that look like it."""

    def __init__(self, name: str, version: str, nearest: Sequence[str] = ()) -> None:
        hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
        super().__init__(f"version {version[:12]} has no entry {name!r}{hint}")
        self.name = name
        self.version = version
        self.nearest = tuple(nearest)


class InvalidEntryError(CacheError, ValueError):
    """An entry that was handed to ``publish`` breaks a rule of the format."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"entry {name!r}: {message}")
        self.name = name


class FormatVersionError(CacheError, ValueError):
    """The cache is of a format that this reader does not know, or something else stands there."""

    def __init__(
        self,
        file: str,
        found: object,
        supported: object,
        remedy: str = "read it with the release that wrote it, or build the cache again",
    ) -> None:
        super().__init__(
            f"{file} is of format {found!r}, this reader knows format {supported!r}: {remedy}"
        )
        self.file = file
        self.found = found
        self.supported = supported


class DamagedEntryError(CacheError, ValueError):
    """Bytes are not what was published; nothing of them is used.

    ``file`` is the file or object at fault, ``entry`` the entry's name where one is known,
    ``expected`` and ``found`` what differs; ``summary`` is the message without what to do.
    ``remedy`` is what to do; left out, it is that of a zip or a URL, or ``in_folder`` elsewhere.
    """

    exit_code = 3

    def __init__(
        self,
        file: str,
        rule: str,
        *,
        expected: object = None,
        found: object = None,
        entry: str | None = None,
        remedy: str | None = None,
        in_folder: str = "Delete this version and pull, unpack or build it again",
    ) -> None:
        remedy = remedy or _remedy(file, in_folder)
        told = (("expected", expected), ("found", found))
        known = [f"{what} {_shortened(value)}" for what, value in told if value is not None]
        difference = f" ({', '.join(known)})" if known else ""
        whose = f" of entry {entry!r}" if entry is not None else ""
        self.summary = f"{file}{whose} is damaged: {rule}{difference}"
        super().__init__(f"{self.summary}; it is not used. {remedy}")
        self.file = file
        self.rule = rule
        self.expected = expected
        self.found = found
        self.entry = entry


class StoreReadError(CacheError, OSError):
    """The operating system or the remote store refused a read of ``file``."""

    def __init__(self, file: str, cause: BaseException) -> None:
        super().__init__("cannot read {}: {}; {}".format(file, *why(cause, file)))
        self.file = file
        self.errno = getattr(cause, "errno", None)


class StoreWriteError(CacheError, OSError):
    """A write failed or is not allowed; nothing of it is left behind."""

    def __init__(self, file: str, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.errno = errno

    @classmethod
    def caused_by(
        cls, file: str, cause: OSError, state: str = "nothing was changed"
    ) -> "StoreWriteError":
        """Return the error for an ``OSError`` met while ``file`` was written.

        Args:
            file: What could not be written.
            cause: Of the system.
            state: What stands now.
        """
        what, helps = why(cause, file)
        message = f"cannot write {file}: {what}; {state}; {helps}, then run it again"
        return cls(file, message, cause.errno)


class ShippingError(CacheError):
    """A pack, unpack, push or pull failed; ``location`` is the far end."""

    def __init__(self, location: str, message: str) -> None:
        super().__init__(message)
        self.location = location


class BackendMissingError(ShippingError, ImportError):
    """The package for a URL's protocol is not installed; ``pip_line`` installs it."""

    def __init__(self, location: str, protocol: str, pip_line: str) -> None:
        super().__init__(
            location, f"{protocol}:// needs a package that is not installed: {pip_line}"
        )
        self.protocol = protocol
        self.pip_line = pip_line


class NotListableError(ShippingError):
    """The store cannot list what it holds; its current version and a known id still load."""

    def __init__(self, location: str) -> None:
        super().__init__(
            location,
            f"{location} cannot list its versions: load the current one, or name a version by its "
            f"full id of 64 hexadecimal digits",
        )


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:64]}... ({len(text)} characters)"
