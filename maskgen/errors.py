"""The mask compiler's errors.

MaskgenError                                                  exit 1
    MaskSpecError           (ValueError)                      exit 2
    UnsupportedMaskError    (NotImplementedError)             exit 1
    LayoutInvariantError    (RuntimeError)                    exit 3
    StaleMaskError          (RuntimeError)                    exit 1
    BackendUnavailableError (ImportError)                     exit 1
    HostBuildForbiddenError (RuntimeError)                    exit 1
"""


class MaskgenError(Exception):
    """Root of the mask compiler's errors; ``exit_code`` is what a command exits with."""

    exit_code = 1


class MaskSpecError(MaskgenError, ValueError):
    """A parameter of a mask, of its spans or of its tables breaks its rule."""

    exit_code = 2

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field} = {value!r}: {rule}")
        self.field = field
        self.value = value
        self.rule = rule


class UnsupportedMaskError(MaskgenError, NotImplementedError):
    """A mask that row intervals, or the torch in use, cannot express.

    ``row`` is the first offending ``(b, h, q)``, ``count`` what it needs and ``limit`` what is
    possible; all None where the reason is another one.
    """

    def __init__(
        self,
        message: str,
        *,
        row: tuple[int, int, int] | None = None,
        count: int | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(message)
        self.row = row
        self.count = count
        self.limit = limit


class LayoutInvariantError(MaskgenError, RuntimeError):
    """Tables that break what every block layout must hold: damage, or a fault of ours."""

    exit_code = 3

    def __init__(self, table: str, found: object, rule: str) -> None:
        super().__init__(f"{table}: {rule}, but found {found}; rebuild the entry")
        self.table = table
        self.found = found
        self.rule = rule


class StaleMaskError(MaskgenError, RuntimeError):
    """A mask was built from code that has changed since."""


class BackendUnavailableError(MaskgenError, ImportError):
    """A package that the asked-for work needs is not installed."""

    def __init__(self, package: str, needed_for: str, install: str) -> None:
        super().__init__(f"{needed_for} needs {package}, which is not installed: {install}")
        self.package = package
        self.install = install


class HostBuildForbiddenError(MaskgenError, RuntimeError):
    """A mask was built on the host while that was forbidden; ``what`` names the call."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what} may not run now: {reason}")
        self.what = what
        self.reason = reason
