"""The file of a run's metrics: strict JSON, a row a line, and no line decides more than itself."""

import io
import json
import math
import re

import pytest

from runtime.errors import WorkerError
from runtime.training.checkpoint import find_checkpoints
from runtime.training.metrics import MetricsLog, read_metrics
from tests.full_disk import full_disk
from tests.runtime.tiny_run import first_drafter, make_trainer, train
from tests.runtime.training.test_trainer import prepared

BAD = {
    "not UTF-8": (b'{"step": 3, "note": "\xff"}', "can't decode"),
    "UTF-16": ('{"step": 3}'.encode("utf-16"), "can't decode"),
    "torn": (b'{"step": 3, "lo', "Unterminated string"),
    "a number": (b"3", "must be an object, found int"),
    "a list": (b'[{"step": 3}]', "must be an object, found list"),
    "no step": (b'{"loss": 1.0}', "step must be 0 to 9007199254740992, found None"),
    "a step before the first": (b'{"step": -1}', "step must be .* found -1"),
    "a step of text": (b'{"step": "3"}', "step must be .* found '3'"),
    "half a step": (b'{"step": 3.5}', "step must be .* found 3.5"),
    "a true step": (b'{"step": true}', "step must be .* found True"),
    "a step without end": (b'{"step": 1' + b"0" * 5000 + b"}", "limit"),
    "a step beyond": (b'{"step": 9007199254740993}', "step must be"),
    "a loss of text": (b'{"step": 3, "loss": "low"}', "loss must be a number or null, found 'low'"),
    "tau within lists": (b'{"step": 3, "tau_forced": [[1]]}', "tau_forced must be a number or nu"),
    "nested": (b'{"step": ' + b"[" * 100_000, "recursion"),
    "nothing": (b"\0" * 40, "Expecting value"),
}
SHOWN = {"loss": "loss", "tau~": "tau_forced"}
ROWS = [{"step": step, "loss": 1.0 / step, "tau_forced": 1.5} for step in (1, 2, 3, 4)]


def lines(rows):
    return [json.dumps(row).encode() for row in rows]


@pytest.mark.parametrize("place", [0, 2, 4])
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_row_is_told_and_costs_itself_alone(tmp_path, capsys, kind, place):
    content, message = BAD[kind]
    path = tmp_path / "metrics.jsonl"
    written = lines(ROWS)
    written.insert(place, content)
    path.write_bytes(b"\n".join(written))
    assert read_metrics(path) == ROWS
    (told,) = capsys.readouterr().err.splitlines()
    start = f"{path}, line {place + 1}, is no row of metrics and is passed over: "
    assert told.startswith(start)
    assert re.search(message, told)
    log = MetricsLog(path, first_step=3, total_steps=9, shown=SHOWN, stream=io.StringIO())
    log.close()
    assert path.read_bytes() == b"".join(line + b"\n" for line in lines(ROWS[:3]))


def test_blank_lines_and_other_line_ends_are_no_news(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\r\n".join(lines(ROWS)) + b"\r\n\n  \n")
    assert read_metrics(path) == ROWS
    assert read_metrics(tmp_path / "none.jsonl") == []
    assert capsys.readouterr().err == ""


def row(**values):
    speeds = {"step_ms": 1.0, "tokens_per_s": 1.0, "skipped": 0, "accuracy": [0.5]}
    return {"step": 5, "loss": 1.0, "tau_forced": 1.0, "lr": 0.1, **speeds, **values}


def refuse(word):
    raise AssertionError(f"{word} is no JSON")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null_in_the_file(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    stream = io.StringIO()
    log = MetricsLog(path, first_step=0, total_steps=9, shown=SHOWN, stream=stream)
    log.write(row(loss=value, grad_norm=value, accuracy=[0.5, value]))
    log.close()
    (found,) = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert (found["loss"], found["grad_norm"], found["accuracy"]) == (None, None, [0.5, None])
    assert f"loss {value:.3f}" in stream.getvalue()


def test_a_file_of_before_with_nan_is_read_and_mended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": NaN, "accuracy": [Infinity, 1]}\n{"step": 2}\n')
    assert read_metrics(path) == [{"step": 1, "loss": None, "accuracy": [None, 1]}, {"step": 2}]
    MetricsLog(path, first_step=2, total_steps=9, shown=SHOWN, stream=io.StringIO()).close()
    found = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert found[0]["accuracy"] == [None, 1]


class Gone(io.StringIO):
    """A terminal that is not there any more."""

    def write(self, text):
        raise OSError(5, "Input/output error")


def test_a_run_goes_on_where_nobody_can_read_its_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, first_step=0, total_steps=9, shown=SHOWN, stream=Gone())
    log.write(row())
    log.close()
    assert [found["step"] for found in read_metrics(path)] == [5]


def test_a_row_that_cannot_be_written_ends_the_run_and_names_the_file(tmp_path, capsys):
    config = prepared(tmp_path, "a", train={"save_every": 1000})
    trainer = make_trainer(config)
    trainer.prepare()
    trainer.start_from(weights=first_drafter().state_dict())
    path = tmp_path / "a" / "metrics.jsonl"
    match = r"training stopped after step 1: \S+/metrics.jsonl: File too large; raise the limit"
    with full_disk(), pytest.raises(WorkerError, match=match) as caught:
        trainer.run()
    trainer.teardown()
    assert caught.value.__cause__.filename == str(trainer.folder / path.name)


def test_a_run_with_a_damaged_log_is_resumed(tmp_path, capsys):
    config = prepared(tmp_path, "a", train={"steps": 4, "save_every": 2})
    _, rows, _ = train(config)
    folder = make_trainer(config).folder
    path = folder / "metrics.jsonl"
    whole = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([whole[0], b"\xfe[]", *whole[1:]]))
    (state,) = [item for item in find_checkpoints(folder / "checkpoints") if item.step == 2]
    _, again, _ = train(config, first_step=2, state=state.load())
    assert [found["step"] for found in again] == [found["step"] for found in rows]
    assert "line 2, is no row of metrics" in capsys.readouterr().err
