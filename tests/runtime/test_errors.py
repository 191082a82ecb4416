"""The runtime's errors: exit codes, kinds that callers may catch, and what they say."""

import inspect

import pytest

from runtime import errors
from runtime.errors import (
    ConfigError,
    NoSamplesError,
    TargetNotFoundError,
    TrainingError,
    WorkerError,
    first_line,
)

KINDS = {
    "TrainingError": Exception,
    "ConfigError": ValueError,
    "TargetNotFoundError": FileNotFoundError,
    "DatasetError": ValueError,
    "NoSamplesError": errors.DatasetError,
    "SampleTooLongError": errors.DatasetError,
    "DeviceUnavailableError": RuntimeError,
    "BucketMissingError": LookupError,
    "CheckpointError": ValueError,
    "LaterFormatError": ValueError,
    "ArtifactError": ValueError,
    "FrozenError": RuntimeError,
    "NonFiniteError": ArithmeticError,
    "NothingLearnedError": Exception,
    "WorkerError": RuntimeError,
    "BrokenCollectiveError": WorkerError,
    "ReplicaMismatchError": RuntimeError,
}


def test_every_error_is_of_its_kind_and_exits_with_its_code():
    found = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert found.keys() == KINDS.keys()
    for name, kind in KINDS.items():
        assert issubclass(found[name], TrainingError), name
        assert issubclass(found[name], kind), name
        assert found[name].exit_code == (2 if name == "ConfigError" else 1), name
    # A later release's document is no damaged one, which is passed over or replaced.
    for damaged in ("DatasetError", "CheckpointError", "ArtifactError"):
        assert not issubclass(errors.LaterFormatError, found[damaged])


def test_a_config_error_names_field_value_and_rule():
    error = ConfigError("train.lr", "a\nb", "must be a number")
    assert str(error) == r"train.lr = 'a\nb': must be a number"
    assert (error.field, error.value, error.rule) == ("train.lr", "a\nb", "must be a number")


def test_a_target_that_is_not_found_says_its_message_alone():
    assert str(TargetNotFoundError("no such model")) == "no such model"
    assert str(TargetNotFoundError("no such model", "more")) == "no such model"


@pytest.mark.parametrize(
    ("reasons", "places", "said"),
    [
        ({}, {}, "nothing (nothing was read)"),
        ({"b": 2}, {}, "nothing (b: 2)"),
        (
            {"b": 2, "a": 10, "c": 1},
            {"a": ["p:7", "p:9"], "c": [], "d": ["x"]},
            "nothing (a: 10 from p:7, b: 2, c: 1)",
        ),
    ],
)
def test_nothing_left_is_told_by_reason_count_and_first_place(reasons, places, said):
    error = NoSamplesError("nothing", reasons, places)
    assert str(error) == said
    assert error.reasons == reasons


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (SystemExit(0), "SystemExit: 0"),
        (SystemExit(), "SystemExit"),
        (ValueError("one\ntwo\nthree"), "one"),
        (ValueError("\n  one  \ntwo"), "one  "),
        (ValueError("one\r\ntwo"), "one"),
        (ValueError(), "ValueError"),
        (ValueError(" \n"), "ValueError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (OSError(2, "gone", "name"), "[Errno 2] gone: 'name'"),
    ],
)
def test_the_first_line_of_an_error(error, line):
    assert first_line(error) == line
