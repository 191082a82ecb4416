"""Progress: a bar on a terminal, few plain lines elsewhere, and nothing on stdout."""

import io
import sys
import time

from maskgen import progress
from maskgen.progress import show_progress


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


def test_a_long_job_writes_a_line_now_and_then(monkeypatch, capsys):
    clock = iter(range(0, 100, 2))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with show_progress("build") as step:
        for done in range(1, 7):
            step(str(done), done, 100)
    assert capsys.readouterr().err == "build: 3/100 3\nbuild: 6/100 6\n"


def test_a_line_is_due_after_five_seconds_and_at_the_end(monkeypatch, capsys):
    # The clock is read as the work begins and after each item.
    clock = iter([0.0, 4.9, 5.0, 9.9, 10.0, 14.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
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
