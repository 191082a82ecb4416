"""``maskgen plan --write``: planned contexts in a run file, and every other byte as it was."""

import re
import stat

import pytest
from click.testing import CliRunner

from maskgen.cli import main

RUN_FILE = """\
# what this run is for
[run]
folder = 'runs/x'   # quoted as its author likes

[masks]
cache = "masks.zarr"

[[masks.entry]]
name = "dflash"     # drawn ahead
family = "dflash"
kind = "layouts"
context = [ 96, 128 ]  # tokens of a sample
anchors = 8
draft_block_size = 4
draws = 8

# computed in the step
[[masks.entry]]
name = "dflash-data"
family = "dflash"
kind = "parametric"
context = [96, 128]
anchors = 8
draft_block_size = 4

[[masks.entry]]
name = "causal"
family = "causal"
Q_LEN = 1024

[train]
lr = 2e-3
"""
PLAIN = RUN_FILE.replace("[ 96, 128 ]", "[256, 512]").replace("[96, 128]", "[256, 512]")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "lengths.txt").write_text("200 10\n500 10\n")
    (tmp_path / "run.toml").write_text(RUN_FILE)
    return tmp_path


def plan(folder, *options, code=0):
    words = ["plan", folder / "lengths.txt", "--write", folder / "run.toml", *options]
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done


def test_contexts_are_replaced_and_nothing_else(folder):
    done = plan(folder)
    assert (folder / "run.toml").read_text() == PLAIN
    assert done.stdout.endswith("context = [256, 512]\n")
    path = folder / "run.toml"
    assert done.stderr.splitlines() == [
        f"{path}: dflash, context was [96, 128]",
        f"{path}: dflash-data, context was [96, 128]",
        f"next: python -m maskgen build {path}",
    ]
    plan(folder, "--json")
    assert path.read_text() == PLAIN, "once more changes nothing"


def test_line_ends_links_and_permissions_stay(folder):
    path, kept = folder / "run.toml", folder / "kept.toml"
    kept.write_bytes(RUN_FILE.replace("\n", "\r\n").encode())
    kept.chmod(0o640)
    path.unlink()
    path.symlink_to(kept)
    plan(folder)
    assert path.is_symlink()
    assert kept.read_bytes() == PLAIN.replace("\n", "\r\n").encode()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o640


def test_one_length_becomes_a_list_and_a_named_entry_is_written_alone(folder):
    path = folder / "run.toml"
    path.write_text(RUN_FILE.replace("context = [96, 128]", "context = 64"))
    refused = plan(folder, code=2)
    assert "has entries of different contexts: name those to write with --entry" in refused.stderr
    assert "context = 64" in path.read_text()
    plan(folder, "--entry", "dflash-data")
    expected = RUN_FILE.replace("context = [96, 128]", "context = [256, 512]")
    assert path.read_text() == expected
    plan(folder, "--entry", "dflash-data", "--entry", "dflash")
    assert path.read_text() == PLAIN


def test_entries_in_an_inline_list(folder):
    entry = '{name = "d", family = "dflash", kind = "parametric", context = %s, anchors = 8, '
    entry += "draft_block_size = 4}"
    text = f"[masks]\nentry = [{entry}] # all of them\n"
    (folder / "run.toml").write_text(text % "32")
    plan(folder)
    assert (folder / "run.toml").read_text() == text % "[256, 512]"


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (("", ""), ["--entry", "causal"], "must name an entry with a context; .* has dflash, dfl"),
        (("context = [", "contxet = ["), [], "contxet"),
        (("[run]", "[run"), [], "must be TOML"),
    ],
)
def test_what_cannot_be_written_is_refused_and_left_as_it_is(folder, change, options, message):
    path = folder / "run.toml"
    text = RUN_FILE.replace(*change) if change[0] else RUN_FILE
    path.write_text(text)
    assert path.read_text() == text
    refused = plan(folder, *options, code=2)
    assert re.search(message, refused.stderr), refused.stderr
    assert path.read_text() == text


def test_a_run_file_without_contexts_and_options_without_it(folder):
    (folder / "run.toml").write_text('[masks]\n[[masks.entry]]\nname="c"\nfamily="causal"\nQ_LEN=9')
    assert "must have an entry with a context" in plan(folder, code=2).stderr
    done = CliRunner().invoke(main, ["plan", str(folder / "lengths.txt"), "--entry", "x"])
    assert (done.exit_code, "name a run file" in done.stderr) == (2, True)


def test_contexts_that_break_a_rule_of_the_entry_are_refused(folder):
    path = folder / "run.toml"
    text = RUN_FILE.replace("[ 96, 128 ]", "[600]").replace("[96, 128]", "[600]")
    path.write_text(text.replace("draws = 8", "draws = 8\nanswer_ends = [600]"))
    before = path.read_text()
    assert "answer_ends" in plan(folder, code=2).stderr
    assert path.read_text() == before
