"""Run files, their settings, lengths of data, and checks of values, word for word."""

import shlex

import numpy as np
import pytest
from safetensors.numpy import save_file

from cache.advice import RUN_FILE
from maskgen.checks import check_known, checked_block_size, checked_int, checked_ints, nearest
from maskgen.errors import MaskSpecError
from maskgen.lengths import read_lengths
from maskgen.runfile import (
    read_cache_location,
    read_document,
    read_value,
    setting,
    with_run_file,
)

SECTIONS = "data, drafter, evaluate, masks, run, target, train"


def refusal(call, *arguments):
    with pytest.raises(MaskSpecError) as caught:
        call(*arguments)
    return str(caught.value)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[run]\nseed = 1\n[masks]\ncache = "c.zarr"\n[own]\nx = 1\n', encoding="utf-8")
    return path


def test_settings_override_one_key_each_in_their_order(file):
    settings = [
        "run.seed=2",
        "run.seed = 3",
        "masks.cache=a=b",
        "train.lr=1e-3",
        "train.mixed=true",
        "train.list=[1, 2]",
        "own.y=[1, 2",
        "own.deep.er.z='q'",
        "run.name=",
    ]
    assert read_document(file, settings) == {
        "run": {"seed": 3, "name": ""},
        "masks": {"cache": "a=b"},
        "own": {"x": 1, "y": "[1, 2", "deep": {"er": {"z": "q"}}},
        "train": {"lr": 1e-3, "mixed": True, "list": [1, 2]},
    }
    assert read_document(file)["run"] == {"seed": 1}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("run.seed", "--set = 'run.seed': must read section.key=value"),
        ("seed=3", "--set = 'seed=3': must read section.key=value"),
        (".seed=3", "--set = '.seed=3': must read section.key=value"),
        ("run.=3", "--set = 'run.=3': must read section.key=value"),
        ("run..x=3", "--set = 'run..x=3': must read section.key=value"),
        ("run.x=\udce9", r"--set = 'run.x=\udce9': must be UTF-8, paths too"),
        (
            "runs.seed=3",
            f"--set = 'runs.seed=3': section is unknown; did you mean 'run'? valid are {SECTIONS}",
        ),
        ("zzz.seed=3", f"--set = 'zzz.seed=3': section is unknown; valid are {SECTIONS}"),
        ("run.seed.x=3", "run.seed = 1: must be a table, [run.seed]"),
    ],
)
def test_a_setting_that_is_none_is_named(file, given, message):
    assert refusal(read_document, file, ["run.seed=1", given]) == message


def test_a_run_file_that_cannot_be_read_is_named(tmp_path):
    gone, broken, latin = (tmp_path / name for name in ("gone.toml", "broken.toml", "latin.toml"))
    broken.write_text("[masks")
    latin.write_bytes(b'x = "\xe9"')
    assert refusal(read_document, gone) == (
        f"--config = {str(gone)!r}: cannot be read (No such file or directory)"
    )
    for path in (broken, latin):
        told = refusal(read_document, path)
        assert told.startswith(f"--config = {str(path)!r}: must be TOML (")


def test_where_the_cache_is(file):
    assert read_cache_location(file) == "c.zarr"
    assert read_cache_location({"masks": {}}) == "build/masks.zarr"
    assert refusal(read_cache_location, {"masks": {"cache": 3}}) == (
        "masks.cache = 3: must be a path"
    )
    assert refusal(read_cache_location, {"masks": []}) == (
        "masks = []: must be a [masks] section of the run file"
    )
    assert refusal(read_cache_location, {"masks": {"BLOCKSIZE": 16}}) == (
        "masks: BLOCKSIZE = 16: is unknown; did you mean 'BLOCK_SIZE'? "
        "valid are BLOCK_SIZE, cache, entry"
    )


@pytest.mark.parametrize(
    "value", ["plain", "", "3", "true", "[1]", "'q'", "a b", 'say "é"', "1.5", "'😀'"]
)
def test_what_sets_a_text_is_read_back_as_that_text(file, value):
    given = setting("run.name", value)
    assert given.startswith("run.name=")
    assert read_document(file, [given])["run"]["name"] == value


def test_values_in_toml_and_texts():
    assert read_value("3") == 3
    assert read_value(" 'a' ") == "a"
    assert read_value("a b") == "a b"
    assert setting("run.name", "plain") == "run.name=plain"
    assert setting("run.name", "3") == 'run.name="3"'


def test_advice_is_filled_in_as_a_shell_takes_it():
    message = f"run `x {RUN_FILE}` or `y {RUN_FILE}`"
    assert with_run_file(message, None, ["run.seed=1"]) == message
    words = "--config 'a b.toml' --set run.seed=1 --set 'run.name=c d'"
    filled = with_run_file(message, "a b.toml", ["run.seed=1", "run.name=c d"])
    assert filled == f"run `x {words}` or `y {words}`"
    assert shlex.split(words)[1] == "a b.toml"
    assert with_run_file(message, "r.toml") == "run `x --config r.toml` or `y --config r.toml`"


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("5\n7\n5\n", [5, 7, 5]),
        ("\ufeff5\n7", [5, 7]),
        ("  5 3  \n\n \n7,2\n", [5, 5, 5, 7, 7]),
        ("5, 2\n9 0\n", [5, 5]),
        ("5\t2\r\n6", [5, 5, 6]),
    ],
)
def test_lengths_of_a_text(tmp_path, text, lengths):
    (tmp_path / "n.txt").write_text(text, encoding="utf-8")
    assert read_lengths(tmp_path / "n.txt") == lengths


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5\n\n-7\n", "DATA line 3 = '-7': must be a length, or a length and a count"),
        ("5 1 1\n", "DATA line 1 = '5 1 1': must be a length, or a length and a count"),
        ("5\n6 x\n", "DATA line 2 = '6 x': must be a length, or a length and a count"),
        ("5.0\n", "DATA line 1 = '5.0': must be a length, or a length and a count"),
        ("4 9999999\n5\n6\n", "DATA line 3 = '6': more than 10000000 samples"),
    ],
)
def test_a_line_that_is_no_length_is_named(tmp_path, text, message):
    (tmp_path / "n.txt").write_text(text)
    assert refusal(read_lengths, tmp_path / "n.txt") == message


def test_data_without_lengths_is_named(tmp_path):
    empty = tmp_path / "n.txt"
    empty.write_text("\n5 0\n")
    rule = "must hold at least one length"
    assert refusal(read_lengths, empty) == f"DATA = {str(empty)!r}: {rule}"
    save_file({"offsets": np.array([0])}, tmp_path / "train.safetensors")
    assert refusal(read_lengths, tmp_path) == f"DATA = {str(tmp_path)!r}: {rule}"
    save_file({"other": np.array([0])}, tmp_path / "train.safetensors")
    told = refusal(read_lengths, tmp_path)
    where = str(tmp_path / "train.safetensors")
    assert told.startswith(f"DATA = {where!r}: must be a file of runtime.prepare with offsets (")
    gone = tmp_path / "gone.txt"
    assert refusal(read_lengths, gone) == (
        f"DATA = {str(gone)!r}: cannot be read (No such file or directory)"
    )


def test_lengths_of_prepared_data_are_integers(tmp_path):
    save_file({"offsets": np.array([0, 4, 4, 9])}, tmp_path / "train.safetensors")
    found = read_lengths(str(tmp_path))
    assert found == [4, 0, 5]
    assert {type(length) for length in found} == {int}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: checked_int("x", 0), "x = 0: must be an integer of at least 1"),
        (lambda: checked_int("x", 2, minimum=3), "x = 2: must be an integer of at least 3"),
        (lambda: checked_int("x", True), "x = True: must be an integer of at least 1"),
        (lambda: checked_int("x", 1.0), "x = 1.0: must be an integer of at least 1"),
        (lambda: checked_ints("x", [], 1), "x = []: must not be empty"),
        (lambda: checked_ints("x", [3, 1, 2], 2), "x = 1: must be an integer of at least 2"),
        (lambda: checked_ints("x", "12", 1), "x = '12': must be an integer of at least 1"),
        (
            lambda: checked_block_size("x", [16]),
            "x = [16]: must be one or two multiples of 16 up to 1024",
        ),
        (
            lambda: checked_block_size("x", [16, True]),
            "x = [16, True]: must be one or two multiples of 16 up to 1024",
        ),
        (
            lambda: check_known("x", {"a": 1, "bb": 2, "cc": 3}, ["cd", "a"]),
            "x: bb = 2: is unknown; valid are a, cd",
        ),
    ],
)
def test_values_that_are_refused(call, message):
    assert refusal(call) == message


def test_values_that_are_taken():
    assert checked_int("x", np.int64(1)) == 1
    assert type(checked_int("x", np.int64(1))) is int
    assert checked_int("x", 0, minimum=0) == 0
    assert checked_ints("x", 5, 5) == [5]
    assert checked_ints("x", [7, 5, 7], 5) == [7, 5, 7]
    assert checked_block_size("x", 16) == (16, 16)
    assert checked_block_size("x", [1024, 48]) == (1024, 48)
    check_known("x", {"a": 1}, ("b", "a"))
    assert nearest("causl", ["full", "causal"]) == (
        "is unknown; did you mean 'causal'? valid are causal, full"
    )
    assert nearest("zzz", ["full", "causal"]) == "is unknown; valid are causal, full"
