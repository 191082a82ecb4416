"""What train refuses before it loads anything, prepare refuses before anything is answered.

Neither the target nor the prompts of these run files are there, and both are looked for later.
"""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from runtime.prepare import main as prepare
from runtime.train import main as train

EXAMPLES = Path(__file__).parents[2] / "examples"
DRAFTS = ['family = "dflash"', "draft_block_size = 4", "context = [48, 80]"]
LAYOUTS = ['name = "dflash"', 'kind = "layouts"', "anchors = 3", *DRAFTS]
PARAMETRIC = ['name = "dflash-data"', 'kind = "parametric"', "anchors = 3", *DRAFTS]
OTHER_SIZE = [line.replace("= 4", "= 5") for line in PARAMETRIC]
DOCUMENT = ['name = "packed"', 'family = "document"', 'kind = "parametric"', "Q_LEN = 48"]
WINDOW = ['name = "w"', 'family = "sliding_window"', 'kind = "static"', "Q_LEN = 48", "window = 5"]


def run_file(folder, method, *entries, masks):
    lines = [
        "[run]",
        f"method = {method!r}",
        'devices = "cpu"',
        f"folder = '{folder}/run'",
        f"[target]\nmodel = '{folder}/none'",
        f"[data]\nfolder = '{folder}/data'\nprompts = ['{folder}/none.jsonl']",
        f"[train]\nmasks = {masks!r}",
        f"[masks]\ncache = '{folder}/masks.zarr'\nBLOCK_SIZE = 16",
    ]
    for entry in entries:
        lines += ["[[masks.entry]]", *entry]
    (folder / "run.toml").write_text("\n".join(lines))


DFLASH = ("dflash", "dflash")
CASES = [
    (*DFLASH, [LAYOUTS], ["evaluate.every=3"], "evaluate.every = 3: needs entries 'dflash-data'"),
    (
        *DFLASH,
        [LAYOUTS, OTHER_SIZE],
        ["evaluate.every=7"],
        "evaluate.every = 7: needs entries 'dflash-data'",
    ),
    (
        *DFLASH,
        [LAYOUTS, PARAMETRIC],
        ["evaluate.every=7", 'drafter.layers=["sliding","full"]', "drafter.sliding_window=9"],
        "drafter.layers",
    ),
    (
        *DFLASH,
        [LAYOUTS, PARAMETRIC],
        ["evaluate.every=3", "data.heldout=0"],
        "evaluate.every = 3: needs held-out samples",
    ),
    (*DFLASH, [LAYOUTS], ["train.export=best"], "train.export = 'best': needs evaluate.every"),
    (*DFLASH, [LAYOUTS], ["evaluate.patience=2"], "evaluate.patience = 2: needs evaluate.every"),
    ("packed", "packed", [DOCUMENT], ["evaluate.every=1"], "evaluate.every = 1: must be 0 where"),
    ("packed", "packed", [DOCUMENT], ["train.export=best"], "train.export = 'best': needs"),
    ("next_token:METHOD", "w", [WINDOW], ["evaluate.every=4"], "evaluate.every = 4: must be 0"),
    ("next_token:METHOD", "w", [WINDOW], ["evaluate.patience=1"], "evaluate.patience = 1: needs"),
    (
        "next_token:METHOD",
        "w",
        [WINDOW],
        ['run.devices="cpu,cpu"', "train.global_batch=3"],
        "train.global_batch",
    ),
]


@pytest.mark.parametrize("command", [prepare, train])
@pytest.mark.parametrize(("method", "masks", "entries", "settings", "said"), CASES)
def test_both_refuse_it_with_the_same_words(
    tmp_path, monkeypatch, command, method, masks, entries, settings, said
):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    run_file(tmp_path, method, *entries, masks=masks)
    given = [part for setting in settings for part in ("--set", setting)]
    result = CliRunner().invoke(command, ["--config", str(tmp_path / "run.toml"), *given])
    sys.modules.pop("next_token", None)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize(
    ("entries", "settings"),
    [([LAYOUTS], []), ([LAYOUTS, PARAMETRIC], ["evaluate.every=3", "train.export=best"])],
)
def test_what_has_its_masks_is_let_pass(tmp_path, entries, settings):
    """As far as the prompts, which are not there."""
    run_file(tmp_path, *DFLASH[:1], *entries, masks="dflash")
    given = [part for setting in settings for part in ("--set", setting)]
    result = CliRunner().invoke(prepare, ["--config", str(tmp_path / "run.toml"), *given])
    assert "none.jsonl': must be a readable file" in result.stderr
