"""What a command tells while it works: a bar on a terminal, or about ten lines."""

import contextlib
import io
import re

import pytest

from runtime import progress as progress_module
from runtime.progress import Progress, say


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Broken(io.StringIO):
    """A stream whose other end is gone."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


def shares(text):
    """The percentages told, in order."""
    return [int(share) for share in re.findall(r"^work: (\d+) % \(\d+ s\)$", text, re.MULTILINE)]


def test_plain_lines_where_there_is_no_terminal(capsys):
    with Progress("work", 40) as progress:
        for _ in range(40):
            progress.advance()
    found = capsys.readouterr()
    assert shares(found.err) == list(range(10, 101, 10))
    assert found.err.count("\n") == 10
    assert found.out == ""


def test_one_line_for_a_large_step(capsys):
    with Progress("work", 4) as progress:
        progress.advance(3)
    assert shares(capsys.readouterr().err) == [75]


@pytest.mark.parametrize(
    ("total", "steps", "told"),
    [
        (100, [9, 1, 9, 1], [10, 20]),
        (99, [9, 1, 89], [10, 100]),
        (1000, [99, 0, 900, 1], [99, 100]),
        (3, [1, 1, 1], [33, 66, 100]),
        (2, [2, 2], [100, 200]),
        (0, [], []),
    ],
)
def test_a_line_as_soon_as_another_tenth_is_done_and_not_before(capsys, total, steps, told):
    with Progress("work", total) as progress:
        for count in steps:
            progress.advance(count)
    assert shares(capsys.readouterr().err) == told


def test_the_seconds_are_those_since_the_beginning(capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: now[0])
    with Progress("work", 2) as progress:
        now[0] += 61.4
        progress.advance()
        now[0] += 60.0
        progress.advance()
    assert capsys.readouterr().err == "work: 50 % (61 s)\nwork: 100 % (121 s)\n"


def test_bar_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress("work", 20) as progress:
        progress.advance(15)
        progress.advance()
        progress.advance(4)
    assert "work: 100%" in terminal.getvalue()
    assert "20/20" in terminal.getvalue()
    assert "(0 s)" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\n"), "the bar is closed"


def test_a_bar_is_closed_where_the_work_fails(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with contextlib.suppress(ZeroDivisionError), Progress("work", 20) as progress:
        progress.advance(15)
        raise ZeroDivisionError
    assert terminal.getvalue().endswith("\n")


def test_a_line_is_told_at_once_on_standard_error(capsys, monkeypatch):
    say("one")
    assert capsys.readouterr() == ("", "one\n")
    flushed = []

    class Stream(io.StringIO):
        def flush(self):
            flushed.append(self.getvalue())

    monkeypatch.setattr("sys.stderr", Stream())
    say("two")
    assert flushed == ["two\n"]


def test_work_goes_on_where_nobody_can_be_told(monkeypatch):
    monkeypatch.setattr("sys.stderr", Broken())
    say("one")
    with Progress("work", 2) as progress:
        progress.advance(2)


def test_work_goes_on_where_a_bar_cannot_be_drawn_any_more(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress("work", 4) as progress:

        def refuse(text):
            raise BrokenPipeError(32, "Broken pipe")

        progress._bar.update = refuse
        progress.advance(2)
