"""``runtime.compare``: two run folders of the commands, and folders written by hand."""

import json
import re

import pytest
from click.testing import CliRunner

from maskgen.cli import main as maskgen
from runtime.compare import main as compare
from runtime.dflash.settings import DFlashConfig
from runtime.evaluate import main as evaluate
from runtime.files.sealed import write_sealed
from runtime.packed.settings import PackedConfig
from runtime.train import main as train
from tests.runtime.tiny_root import command, make_root, options

DATA_ENTRY = """
[[masks.entry]]
name = "dflash-data"
family = "dflash"
kind = "parametric"
context = [32, 64]
anchors = 8
draft_block_size = 4
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two runs of one data folder, scored meanwhile, and evaluated."""
    folder = make_root(tmp_path_factory.mktemp("compare"))
    path = folder / "run.toml"
    path.write_text(path.read_text().replace("[drafter]", DATA_ENTRY + "[drafter]"))
    command(maskgen, "build", path)
    for name, lr in (("one", 1e-3), ("two", 5e-2)):
        given = options(folder, name, **{"train.lr": lr, "evaluate.every": 3})
        command(train, *given)
        command(evaluate, *given)
    return folder


def compared(first, second, *more, code=0):
    return command(compare, first, second, *more, code=code)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_runs_of_the_commands(root):
    one, two = root / "one", root / "two"
    found = json.loads(compared(one, two, "--json").stdout)
    assert found["settings"] == {"train.lr": [1e-3, 5e-2]}
    assert found["course"]["steps"] == [6, 6]
    assert found["steps"] == [2, 3, 4, 6]
    for index, folder in enumerate((one, two)):
        of_step = {(row["step"], key): row[key] for row in rows_of(folder) for key in row}
        for key in ("loss", "tau_forced", "heldout_tau", "heldout_low", "heldout_high"):
            expected = [of_step.get((step, key)) for step in found["steps"]]
            assert found["curves"][key][index] == expected, key
        kept = json.loads((folder / "evaluate.json").read_text())
        assert found["evaluation"]["trained.tau"][index] == kept["trained"]["tau"]
    (held, same) = found["notes"]
    assert held.startswith("heldout_tau at step 6: the intervals ")
    assert same.startswith("the evaluations are of the same samples and lengths")


def test_the_page_of_two_runs(root):
    page = compared(root / "one", root / "two").stdout
    assert f"A = {root}/one\nB = {root}/two\n" in page
    assert re.search(r"^train\.lr +0\.001 +0\.05$", page, re.MULTILINE)
    assert re.search(r"^step +loss A +loss B +tau_forced A", page, re.MULTILINE)
    assert re.search(r"^ *6 .*\d \(\d[\d.]* to \d[\d.]*\)", page, re.MULTILINE)
    assert re.search(r"^trained\.tau +[\d.]+ +[\d.]+$", page, re.MULTILINE)
    assert "run.folder" not in page


def test_the_picture_has_both_runs(root, tmp_path):
    compared(root / "one", root / "two", "--png", tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes()[:4] == b"\x89PNG"


def write_run(folder, kind=DFlashConfig, *, rows=(), drop=(), evaluation=None, data=None, **sets):
    folder.mkdir()
    config = json.loads(json.dumps(kind().as_dict(), default=str))
    config["run"] |= {"folder": str(folder)}
    if kind is PackedConfig:
        config["run"]["method"] = "packed"
    for name, value in sets.items():
        section, _, key = name.partition("__")
        config[section][key] = value
    for name in drop:
        section, _, key = name.partition(".")
        del config[section][key]
    record = {"config": config, "data": data or {"context": 64}, "masks": {}, "torch": "2"}
    write_sealed(folder / "run.json", {"format": 2, **record})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if evaluation:
        (folder / "evaluate.json").write_text(json.dumps(evaluation))
    return folder


def scored(step, tau, low, high):
    return {"step": step, "heldout_tau": tau, "heldout_low": low, "heldout_high": high}


@pytest.mark.parametrize(
    ("low", "said"),
    [(1.29, "the intervals overlap, so neither run is shown"), (1.31, "the intervals are apart")],
)
def test_intervals_that_overlap_show_no_difference(tmp_path, low, said):
    one = write_run(tmp_path / "one", rows=[scored(4, 1.2, 1.1, 1.3)])
    two = write_run(tmp_path / "two", rows=[scored(4, 1.4, low, 1.5), scored(9, 2.0, 2.0, 2.0)])
    assert f"heldout_tau at step 4: {said}" in compared(one, two).stdout
    assert f"heldout_tau at step 4: {said}" in compared(two, one).stdout


def test_what_keeps_evaluations_from_comparing_is_said(tmp_path):
    tau = {"trained": {"tau": 1.25}, "untrained": {"tau": 1.0}}
    one = write_run(tmp_path / "one", evaluation={"prompts": 16, **tau})
    two = write_run(tmp_path / "two", evaluation={"prompts": 24, **tau}, data={"context": 32})
    page = compared(one, two).stdout
    assert re.search(r"^trained\.tau +1\.250 +1\.250$", page, re.MULTILINE), "equal, and shown"
    assert "not of the same samples and lengths: prompts 16 and 24; the prepared data" in page
    assert re.search(r"^prepared data\.context +64 +32$", page, re.MULTILINE)
    (two / "evaluate.json").unlink()
    assert f"not evaluated: {two}" in compared(one, two).stdout


def test_a_key_that_an_older_run_lacks_had_its_default(tmp_path):
    lacks = ["train.loss", "drafter.markov_rank", "drafter.layers", "run.method"]
    older = write_run(tmp_path / "older", drop=lacks)
    same, other = write_run(tmp_path / "same"), write_run(tmp_path / "x", train__loss="dpace")
    assert "no setting differs" in compared(older, same).stdout
    found = json.loads(compared(older, other, "--json").stdout)
    assert found["settings"] == {"train.loss": ["decay", "dpace"]}


def test_mask_entries_are_compared_by_name(tmp_path):
    def masks(draws):
        return [{"name": "dflash", "draws": draws}, {"name": "more"}]

    one = write_run(tmp_path / "one", masks__entry=masks(4))
    two = write_run(tmp_path / "two", masks__entry=masks(8)[::-1])
    found = json.loads(compared(one, two, "--json").stdout)
    assert found["settings"] == {"masks.entry dflash.draws": [4, 8]}


def test_long_curves_are_thinned_with_both_ends_kept(tmp_path):
    rows = [{"step": step, "loss": 1.0 / step} for step in range(1, 101)]
    one, two = (write_run(tmp_path / name, rows=rows) for name in ("one", "two"))
    table = compared(one, two).stdout.partition("loss B\n")[2].partition("\n\n")[0]
    steps = [int(line.split()[0]) for line in table.splitlines()]
    assert (len(steps), steps[0], steps[-1]) == (12, 1, 100)
    assert len(json.loads(compared(one, two, "--json").stdout)["steps"]) == 100


def test_runs_without_a_common_step(tmp_path):
    one = write_run(tmp_path / "one", rows=[{"step": 2, "loss": 1.0}])
    two = write_run(tmp_path / "two", rows=[{"step": 3, "loss": 1.0}])
    assert "no step is in the metrics of both" in compared(one, two).stdout


def test_damaged_files_are_named(tmp_path):
    one, two = (write_run(tmp_path / name, rows=[{"step": 1}]) for name in ("one", "two"))
    with (two / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    (two / "evaluate.json").write_text("{")
    done = compared(one, two)
    assert f"{two}/metrics.jsonl, line 2, is no row of metrics" in done.stderr
    assert f"{two}/evaluate.json is no evaluation and is passed over" in done.stderr
    text = (two / "run.json").read_text()
    (two / "run.json").write_text(text.replace("dflash", "dflush"))
    assert "run.json is damaged: the SHA-256" in compared(one, two, code=1).stderr


def test_what_cannot_be_compared_is_refused(tmp_path):
    one = write_run(tmp_path / "one")
    packed = write_run(tmp_path / "packed", PackedConfig)
    assert "both runs must be of one method" in compared(one, packed, code=2).stderr
    for wrong in (tmp_path, tmp_path / "none", tmp_path / "one" / "run.json"):
        assert f"RUN = '{wrong}': must be a run folder" in compared(one, wrong, code=2).stderr
    assert CliRunner().invoke(compare, [str(one)]).exit_code == 2


def test_packed_runs_compare_by_their_losses(tmp_path):
    found = {"documents": 4, "before": 2.0, "after": 1.5}
    rows = [{"step": 1, "loss": 2.0}]
    one, two = (
        write_run(tmp_path / name, PackedConfig, rows=rows, evaluation=found)
        for name in ("one", "two")
    )
    page = compared(one, two).stdout
    assert re.search(r"^after +1\.500 +1\.500$", page, re.MULTILINE)
    assert "of the same samples and lengths" in page
