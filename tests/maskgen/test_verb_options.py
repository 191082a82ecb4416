"""The options of every verb with their defaults, and what `plan` and `list` make of odd input."""

import json

import click
import pytest
from click.testing import CliRunner

import cache
from maskgen.build import build_entry
from maskgen.cli import main
from maskgen.errors import MaskSpecError
from maskgen.spec import read_specs
from maskgen.summary import entry_summary, mask_summary

PLACE = {"location": None, "run_file": None, "settings": ()}
VERSION, JSON = {"version": None}, {"as_json": False}
PARAMS = {
    "build": {"config": None, **PLACE, "certify": True, **JSON},
    "list": PLACE | VERSION | JSON,
    "show": PLACE | VERSION | {"png": None, "text": True, "layout": 0, "head": 0} | JSON,
    "report": PLACE | VERSION | {"heads": 32, "head_dim": 128},
    "verify": PLACE | VERSION | {"deep": False, "run_functions": False} | JSON,
    "plan": {"max_buckets": 4, "multiple": 128, "run_file": None, "entries": ()} | JSON,
    "versions": PLACE | JSON,
    "use": PLACE,
    "diff": PLACE | JSON,
    "gc": PLACE | {"keep": 2} | JSON,
    "pack": PLACE | VERSION,
    "unpack": PLACE,
    "push": PLACE | VERSION,
    "pull": PLACE | VERSION,
}
ARGUMENTS = {
    "show": ["name"],
    "report": ["file"],
    "plan": ["data"],
    "use": ["version"],
    "diff": ["a", "b"],
    "pack": ["file"],
    "unpack": ["file"],
    "push": ["url"],
    "pull": ["url"],
}


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def as_json(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("verb", PARAMS)
def test_a_verb_has_its_arguments_and_defaults(verb):
    command, names = main.commands[verb], ARGUMENTS.get(verb, [])
    found = command.make_context(verb, [f"the {name}" for name in names]).params
    assert found == PARAMS[verb] | {name: f"the {name}" for name in names}
    for missing in range(len(names)):
        with pytest.raises(click.MissingParameter):
            command.make_context(verb, names[:missing])
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert all(option.help for option in options)
    assert not any(option.required for option in options)


def test_every_verb_is_told():
    assert set(PARAMS) == set(main.commands)


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("report", ["--heads", "0"]),
        ("report", ["--head-dim", "0"]),
        ("plan", ["--max-buckets", "0"]),
        ("plan", ["--multiple", "0"]),
        ("gc", ["--keep", "0"]),
    ],
)
def test_counts_of_less_than_one_are_a_usage_error(verb, options, tmp_path):
    words = {"report": [tmp_path / "x"], "plan": [tmp_path / "x"], "gc": []}[verb]
    refused = run(verb, *words, *options)
    assert refused.exit_code == 2
    assert "0 is not in the range x>=1" in refused.stderr
    assert options[0] in refused.stderr


def test_help_shows_what_is_taken_where_nothing_is_said():
    told = " ".join(run("list", "--help").stdout.split())
    assert "[default: ([masks].cache of the run file, else build/masks.zarr)]" in told
    told = " ".join(run("verify", "--help").stdout.split())
    assert "[default: (the one that holds the masks of --config, else the current one)]" in told
    assert "exit 3" in told
    told = " ".join(run("plan", "--help").stdout.split())
    assert "[default: 4; x>=1]" in told
    assert "[default: 128; x>=1]" in told


def test_a_plan_takes_four_buckets_of_multiples_of_128(tmp_path):
    (tmp_path / "n.txt").write_text("100 9\n300 9\n600 9\n900 9\n1200 9\n2000 9\n")
    found = as_json("plan", tmp_path / "n.txt")
    assert len(found["context"]) == 4
    assert found["context"][-1] == 2048
    assert all(context % 128 == 0 for context in found["context"])
    assert [bucket["context"] for bucket in found["buckets"]] == found["context"]
    padded = 0
    for bucket in found["buckets"]:
        assert bucket["padded_tokens"] == bucket["context"] * bucket["samples"]
        share = 1 - bucket["tokens"] / bucket["padded_tokens"]
        assert bucket["padding"] == pytest.approx(share)
        padded += bucket["padded_tokens"]
    assert sum(bucket["samples"] for bucket in found["buckets"]) == 54
    tokens = 9 * (100 + 300 + 600 + 900 + 1200 + 2000)
    assert sum(bucket["tokens"] for bucket in found["buckets"]) == tokens
    assert found["padding"] == pytest.approx(1 - tokens / padded)
    assert set(found) == {"context", "buckets", "padding"}
    shown = run("plan", tmp_path / "n.txt").stdout.splitlines()
    assert shown[-1] == f"context = {found['context']}"
    assert shown[-2].split() == ["all", "54", str(tokens), str(padded), f"{found['padding']:.1%}"]


CAUSAL = {"name": "c", "family": "causal", "Q_LEN": [32, 48]}


@pytest.fixture
def specs():
    return read_specs({"masks": {"BLOCK_SIZE": 16, "entry": [CAUSAL]}})


def test_an_entry_that_cannot_be_read_is_listed_with_the_reason(tmp_path, specs):
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    first, second = (build_entry(spec) for spec in specs)
    first.attrs["partial"] = -1
    store.publish([first, second])
    result = run("list", "--cache", tmp_path / "m.zarr")
    reason = "attribute partial of 'c/q32-kv32' = -1: must be an integer of at least 0"
    assert result.exit_code == 0
    assert result.stderr == f"note: {reason}\n"
    assert [line.split()[0] for line in result.stdout.splitlines()] == [
        "name",
        "c/q48-kv48",
        "version",
    ]
    listed = as_json("list", "--cache", tmp_path / "m.zarr")
    info = store.version().entries["c/q32-kv32"]
    assert listed["entries"][0] == {
        "name": "c/q32-kv32",
        "sha256": info.sha256,
        "unreadable": reason,
    }
    assert listed["entries"][1]["name"] == "c/q48-kv48"


def test_the_summary_of_a_mask(tmp_path, specs):
    spec = specs[1]
    row = mask_summary(spec, {"full": 1, "partial": 2, "empty": 5}, 7, build_ms=1.5, reused=True)
    assert (row.name, row.kind, row.Q_LEN, row.KV_LEN) == ("c/q48-kv48", "static", 48, 48)
    assert (row.full, row.partial, row.empty, row.sparsity) == (1, 2, 5, 62.5)
    assert (row.bytes, row.build_ms, row.reused, row.BLOCK_SIZE) == (7, 1.5, True, (16, 16))
    nothing = mask_summary(spec, {"full": 0, "partial": 0, "empty": 0}, 0)
    assert (nothing.sparsity, nothing.build_ms, nothing.reused) == (0.0, 0.0, False)
    for count in ("full", "partial", "empty"):
        counts = {name: 0 for name in ("full", "partial", "empty") if name != count}
        with pytest.raises(MaskSpecError, match=f"^attribute {count} of 'c/q48-kv48' = None: "):
            mask_summary(spec, counts, 0)
    store = cache.open_store(tmp_path / "m.zarr", writable=True)
    store.publish([build_entry(spec)])
    info = store.version().entries["c/q48-kv48"]
    assert entry_summary(info) == mask_summary(spec, info.attrs, info.nbytes)
