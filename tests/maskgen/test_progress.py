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
