"""The runtime's errors: what a run, its data or its config may do wrong.

TrainingError                                                 exit 1
    ConfigError            (ValueError)                       exit 2
    TargetNotFoundError    (FileNotFoundError)                exit 1
    DatasetError           (ValueError)                       exit 1
        NoSamplesError                                        exit 1
        SampleTooLongError                                    exit 1
    DeviceUnavailableError (RuntimeError)                     exit 1
    BucketMissingError     (LookupError)                      exit 1
    CheckpointError        (ValueError)                       exit 1
    LaterFormatError       (ValueError)                       exit 1
    ArtifactError          (ValueError)                       exit 1
    FrozenError            (RuntimeError)                     exit 1
    NonFiniteError         (ArithmeticError)                  exit 1
    NothingLearnedError                                       exit 1
    WorkerError            (RuntimeError)                     exit 1
        BrokenCollectiveError                                 exit 1
    ReplicaMismatchError   (RuntimeError)                     exit 1
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType


class TrainingError(Exception):
    """Root of the runtime's errors; ``exit_code`` is what a command exits with."""

    exit_code = 1


class ConfigError(TrainingError, ValueError):
    """A field of a run file or an option breaks its rule."""

    exit_code = 2

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field} = {value!r}: {rule}")
        self.field = field
        self.value = value
        self.rule = rule


class TargetNotFoundError(TrainingError, FileNotFoundError):
    """The target model cannot be found or read."""

    def __str__(self) -> str:
        return str(self.args[0])


class DatasetError(TrainingError, ValueError):
    """A prepared data folder is missing, damaged or of another target."""


class NoSamplesError(DatasetError):
    """No sample is left after filtering; ``reasons`` counts why.

    Args:
        message: What there is nothing for.
        reasons: Reason -> count.
        places: Reason -> where the first ones are.
    """

    def __init__(
        self,
        message: str,
        reasons: Mapping[str, int],
        places: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        counted = [
            f"{reason}: {count}" + "".join(f" from {place}" for place in places.get(reason, ())[:1])
            for reason, count in sorted(reasons.items())
        ]
        super().__init__(f"{message} ({', '.join(counted) or 'nothing was read'})")
        self.reasons = dict(reasons)


class SampleTooLongError(DatasetError):
    """A sample is longer than the largest bucket and the policy is to refuse it."""


class DeviceUnavailableError(TrainingError, RuntimeError):
    """A device that was asked for is not there."""


class BucketMissingError(TrainingError, LookupError):
    """The cache holds no entry for a bucket that the run needs."""


class CheckpointError(TrainingError, ValueError):
    """A checkpoint is missing, half written, damaged or of another run."""


class LaterFormatError(TrainingError, ValueError):
    """A document is of a later release: neither read, nor passed over, nor replaced."""


class ArtifactError(TrainingError, ValueError):
    """Warm-up artifacts are missing, damaged, of another toolchain, or cannot be saved."""


class FrozenError(TrainingError, RuntimeError):
    """Something compiled, traced, recorded or built a mask after freeze."""


class NonFiniteError(TrainingError, ArithmeticError):
    """The loss or the gradients were not finite several steps running."""


class NothingLearnedError(TrainingError):
    """Every step is done, and none has changed the weights."""


class WorkerError(TrainingError, RuntimeError):
    """A worker or feeder thread died; the first error is the cause."""


class BrokenCollectiveError(WorkerError):
    """A collective ended without its result; why, another rank knows."""


class ReplicaMismatchError(TrainingError, RuntimeError):
    """Replicas that must be equal bit for bit are not."""


def first_line(error: BaseException) -> str:
    """What an error says, without the stack of a library below that may follow."""
    name, text = type(error).__name__, str(error).strip()
    if text and isinstance(error, SystemExit):
        # What it says is a number, mostly.
        text = f"{name}: {text}"
    return (text or name).splitlines()[0]
