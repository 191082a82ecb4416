"""A file of the user's that has the name of one of our packages is told in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

from maskgen.neighbours import hidden_cache

ROOT = Path(__file__).parents[2]


def test_our_own_cache_is_found():
    assert hidden_cache() is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cache.py", "maskgen list"),
        ("cache/__init__.py", "maskgen list"),
        ("cache.py", "runtime.prepare"),
        ("cache.py", "runtime.train"),
        ("cache.py", "runtime.evaluate"),
        ("cache.py", "runtime.export"),
        ("cache.py", "runtime.generate --drafter x --prompt y"),
    ],
)
def test_a_cache_of_ones_own_is_told_in_one_line(tmp_path, name, words):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("raise SystemExit('imported')\n")
    done = subprocess.run(
        [sys.executable, "-m", *words.split()],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"Error: {file} hides")
    assert "python -P -m" in line
