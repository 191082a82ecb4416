"""Progress: a bar on a terminal, few plain lines elsewhere, and nothing on stdout."""

import contextlib
import io
import re
import sys
import time

import pytest

from maskgen import progress
from maskgen.progress import Progress, say, show_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with show_progress("build") as step:
        step("first", 1, 2)
        # A bar is drawn ten times a second at most.
        time.sleep(0.15)
        step("second", 2, 2)
    assert "build" in screen.getvalue()
    assert "2/2" in screen.getvalue()
    assert capsys.readouterr().out == ""


def test_elsewhere_the_last_line_is_enough(capsys):
    with show_progress("build") as step:
        for done in range(1, 101):
            step(f"mask{done}", done, 100)
    captured = capsys.readouterr()
    assert captured.err == "build: 100/100 mask100\n"
    assert captured.out == ""


def test_a_long_job_writes_a_line_for_a_tenth(monkeypatch, capsys):
    clock = iter(range(0, 200, 2))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    with show_progress("build") as step:
        for done in range(1, 32):
            step(str(done), done, 100)
    assert capsys.readouterr().err == "build: 10/100 10\nbuild: 20/100 20\nbuild: 30/100 30\n"


def test_a_line_is_due_after_five_seconds_and_at_the_end(monkeypatch, capsys):
    # The clock is read as the work begins and after each item.
    clock = iter([0.0, 4.9, 5.0, 9.9, 10.0, 14.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    with show_progress("certify") as step:
        for done in range(1, 6):
            step(f"m{done}", done, 5)
    assert capsys.readouterr().err == "certify: 2/5 m2\ncertify: 4/5 m4\ncertify: 5/5 m5\n"


def test_a_bar_names_the_mask_that_is_done(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with show_progress("verify") as step:
        time.sleep(0.15)
        step("first/mask", 1, 3)
        time.sleep(0.15)
        step("third/mask", 3, 3)
    drawn = screen.getvalue().split("\r")
    assert any("verify" in line and "1/3" in line and "first/mask" in line for line in drawn)
    assert any("3/3" in line and "third/mask" in line for line in drawn)
    assert "mask/s" in screen.getvalue()
    # Nothing of it stays on the screen.
    assert screen.getvalue().split("\r")[-1].strip() == ""


class Broken(io.StringIO):
    """A stream whose other end is gone."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


def shares(text):
    """The percentages told, in order."""
    return [int(share) for share in re.findall(r"^work: (\d+) % \(\d+ s\)$", text, re.MULTILINE)]


@pytest.fixture
def slow(monkeypatch):
    """A clock by which each step takes five seconds."""
    clock = iter(range(0, 10**6, 5))
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))


def test_ten_lines_where_there_is_no_terminal(capsys, slow):
    with Progress("work", 40) as shown:
        for _ in range(40):
            shown.advance()
    found = capsys.readouterr()
    assert shares(found.err) == list(range(10, 101, 10))
    assert found.err.count("\n") == 10
    assert found.out == ""


def test_of_quick_work_the_last_line_alone(capsys):
    with Progress("work", 40) as shown:
        for _ in range(40):
            shown.advance()
    assert shares(capsys.readouterr().err) == [100]


def test_one_line_for_a_large_step(capsys, slow):
    with Progress("work", 4) as shown:
        shown.advance(3)
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
def test_a_line_as_soon_as_another_tenth_is_done_and_not_before(capsys, slow, total, steps, told):
    with Progress("work", total) as shown:
        for count in steps:
            shown.advance(count)
    assert shares(capsys.readouterr().err) == told


def test_the_seconds_are_those_since_the_beginning(capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    with Progress("work", 2) as shown:
        now[0] += 61.4
        shown.advance()
        now[0] += 60.0
        shown.advance()
    assert capsys.readouterr().err == "work: 50 % (61 s)\nwork: 100 % (121 s)\n"


def test_bar_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress("work", 20) as shown:
        shown.advance(15)
        shown.advance()
        shown.advance(4)
    assert "work: 100%" in terminal.getvalue()
    assert "20/20" in terminal.getvalue()
    assert "(0 s)" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\n"), "the bar is closed"


def test_a_bar_is_closed_where_the_work_fails(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with contextlib.suppress(ZeroDivisionError), Progress("work", 20) as shown:
        shown.advance(15)
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
    with Progress("work", 2) as shown:
        shown.advance(2)


def test_work_goes_on_where_a_bar_cannot_be_drawn_any_more(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress("work", 4) as shown:

        def refuse(text):
            raise BrokenPipeError(32, "Broken pipe")

        shown._bar.update = refuse
        shown.advance(2)
