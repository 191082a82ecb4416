"""The prompts that examples/compose_prompts.py composes: many, different, and none by hand."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.prompts.conversation import check_messages

EXAMPLES = Path(__file__).parents[1] / "examples"
COUNT = 24000


def command(*arguments):
    line = [sys.executable, str(EXAMPLES / "compose_prompts.py"), *map(str, arguments)]
    environment = {"PYTHONPATH": str(EXAMPLES.parent)}
    return subprocess.run(line, check=False, env=environment, capture_output=True, text=True)


def compose(path, count):
    command("--count", count, path).check_returncode()
    return path.read_text(encoding="ascii").splitlines()


def talk(line):
    record = json.loads(line)
    return record.get("messages") or [{"role": "user", "content": record["prompt"]}]


def words(line):
    return re.findall(r"\w+", " ".join(turn["content"] for turn in talk(line)).lower())


def runs(line, length):
    found = words(line)
    return {tuple(found[start : start + length]) for start in range(len(found) - length + 1)}


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    return compose(tmp_path_factory.mktemp("composed") / "deep" / "prompts.jsonl", COUNT)


def test_all_are_different(lines):
    assert len(lines) == COUNT
    assert len({" ".join(words(line)) for line in lines}) == COUNT


def test_they_are_varied(lines):
    fours = [run for line in lines for run in runs(line, 4)]
    assert len(set(fours)) > 0.3 * len(fours)
    assert len({tuple(words(line)[:3]) for line in lines}) > 3000
    assert sum(len(talk(line)) > 1 for line in lines) > 0.08 * COUNT


def test_each_is_a_question_with_every_slot_filled(lines):
    assert all(check_messages(talk(line))[-1]["role"] == "user" for line in lines)
    assert [line for line in lines if re.search(r"\{\w+[.:]+\w+\}|\{[a-z]+\}| \|\| ", line)] == []


def test_fewer_are_the_first_ones(lines, tmp_path):
    assert compose(tmp_path / "few.jsonl", 50) == lines[:50]


def test_those_of_the_demo_are_the_first_ones(lines):
    shipped = (EXAMPLES / "composed.jsonl").read_text(encoding="ascii").splitlines()
    assert shipped == lines[: len(shipped)]


def test_none_is_close_to_one_that_was_written_by_hand(lines):
    by_hand = (EXAMPLES / "prompts.jsonl").read_text(encoding="ascii").splitlines()
    composed = {" ".join(words(line)) for line in lines}
    assert not composed & {" ".join(words(line)) for line in by_hand}
    long_runs = {run for line in by_hand for run in runs(line, 10)}
    close = [line for line in lines if runs(line, 10) & long_runs]
    assert close == []


@pytest.mark.parametrize("count", ["0", "-3", "2.5", "many"])
def test_another_count_is_refused_in_one_line(tmp_path, count):
    found = command(f"--count={count}", tmp_path / "prompts.jsonl")
    assert (found.returncode, found.stdout) == (2, "")
    assert "error: argument --count: " in found.stderr.splitlines()[-1]
    assert not (tmp_path / "prompts.jsonl").exists()


@pytest.mark.parametrize("place", ["", "file/below", "/proc/prompts.jsonl", "/dev/full"])
def test_a_place_that_takes_nothing_is_named_in_one_line(tmp_path, place):
    """A folder, below a file, where nothing can be made, and a full disk."""
    (tmp_path / "file").write_text("kept")
    found = command("--count", 2, tmp_path / place)
    assert (found.returncode, found.stdout) == (2, "")
    assert f"error: {tmp_path / place} cannot be written (" in found.stderr.splitlines()[-1]
    assert "Traceback" not in found.stderr
    assert (tmp_path / "file").read_text() == "kept"


def test_a_file_that_is_there_is_said_to_be_replaced(tmp_path):
    path = tmp_path / "prompts.jsonl"
    assert command("--count", 2, path).stdout == f"2 prompts in {path}\n"
    assert command("--count", 1, path).stdout == f"1 prompts in {path}, replaced\n"
    assert len(path.read_text(encoding="ascii").splitlines()) == 1


def test_the_help_says_how_many():
    assert "how many prompts (default: 24000)" in command("--help").stdout
