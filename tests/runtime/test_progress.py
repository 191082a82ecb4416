import io

from runtime.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_where_there_is_no_terminal(capsys):
    with Progress("work", 40) as progress:
        for _ in range(40):
            progress.advance()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("work: 10 % (")
    assert lines[-1].startswith("work: 100 % (")


def test_one_line_for_a_large_step(capsys):
    with Progress("work", 4) as progress:
        progress.advance(3)
    assert capsys.readouterr().err.startswith("work: 75 % (")


def test_bar_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress("work", 2) as progress:
        progress.advance(2)
    assert "work: 100%" in terminal.getvalue()
    assert "(0 s)" not in terminal.getvalue()
