"""A share of the drill of what a run writes: kills, torn files, a full disk, several at once."""

import re

import pytest

from tests.runtime import drill


@pytest.mark.timeout(300)
def test_what_a_run_writes_is_the_old_or_the_new_wherever_it_ends(capsys):
    code = drill.main(["--quick"])
    text = capsys.readouterr().out
    assert code == 0, text
    rows = re.findall(r"^(\S.*?) +(\d+) +(\d+) +(\d+) +0 +0 +[\d.]+$", text, re.MULTILINE)
    assert [name for name, *_ in rows] == [*drill.ROWS.values(), "3 at once"]
    assert all(int(tried) > 5 for _, tried, _, _ in rows)
